"""A cluster file shown: nothing of it is left out."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from megabatch.plan.cluster import cluster_names, cluster_of, load_cluster_file
from megabatch.plan.cluster_file import parse_cluster
from megabatch.plan.show_cluster import cluster_as_data, print_cluster


@pytest.mark.parametrize("name", cluster_names())
def test_every_value_of_a_shipped_file_is_shown_with_its_source(name: str) -> None:
    file = load_cluster_file(name)
    console = Console(width=200, file=io.StringIO())
    print_cluster(cluster_of(file), file, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    values = cluster_as_data(file)
    assert len(values) >= 10
    for entry in values:
        assert entry["key"] in text
        assert entry["source"][:40] in text
    # A number without a source vouches for itself; everything uncertain says why.
    assert all(entry["source"] for entry in values if entry["certainty"] in ("assumed", "unknown", "derived"))


def test_links_step_times_and_bare_numbers() -> None:
    text = """
    name = "x"
    workers_per_node = 8
    [link.worker]
    gigabytes_per_second = { value = 2, certainty = "quoted", source = "sheet" }
    [compute]
    certainty = "measured"
    source = "mine"
    milliseconds_by_local_batch = { "32" = 5.0, "64" = { value = 9.0, certainty = "assumed", source = "guess" } }
    [price]
    currency = "EUR"
    """
    values = {entry.pop("key"): entry for entry in cluster_as_data(parse_cluster(text, "x"))}
    assert values["workers_per_node"] == {"value": 8, "certainty": "given", "source": ""}
    assert values["link.worker.gigabytes_per_second"] == {"value": 2, "certainty": "quoted", "source": "sheet"}
    assert values["compute.resnet50.milliseconds.32"] == {"value": 5.0, "certainty": "measured", "source": "mine"}
    assert values["compute.resnet50.milliseconds.64"]["source"] == "guess"
    assert values["price.currency"]["certainty"] == ""
