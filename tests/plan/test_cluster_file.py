"""Sections, keys and units of cluster files."""

from __future__ import annotations

import re

import pytest

from megabatch.errors import ConfigError
from megabatch.plan.cluster import Cluster
from megabatch.plan.cluster_file import cluster_as_data, read_cluster
from tests.plan.laboratory import CLUSTER

RATE = "gigabytes_per_second = 50"
STEPS = 'milliseconds_by_local_batch = { "16" = 26.0, "32" = 49.9, "64" = 98.0 }'


def parsed(old: str = "", new: str = "") -> Cluster:
    """The laboratory's file with a text in it replaced, or with one more section."""
    assert old in CLUSTER
    text = CLUSTER.replace(old, new, 1) if old else CLUSTER + new
    return read_cluster(text, "cluster file 'x.toml'")


@pytest.mark.parametrize(
    ("key", "value"),
    [("gigabits_per_second", 8), ("gigabytes_per_second", 1), ("bytes_per_second", 1e9)],
)
def test_rates_by_their_units(key: str, value: float) -> None:
    assert parsed(RATE, f"{key} = {value}").worker_rate.value == pytest.approx(1e9)


@pytest.mark.parametrize(
    ("unit", "value"), [("microseconds", 7.2e9), ("milliseconds", 7.2e6), ("seconds", 7200), ("hours", 2)]
)
def test_times_by_their_units(unit: str, value: float) -> None:
    found = parsed(new=f"[start]\ninitialisation_{unit} = {{ value = {value}, certainty = 'measured' }}")
    assert found.initialisation_seconds.value == pytest.approx(7200)
    assert found.initialisation_seconds.certainty == "measured"


def test_what_is_not_there() -> None:
    bare = parsed('name = "laboratory"')
    assert bare.price_per_node_hour is None
    assert bare.num_nodes == 0
    assert bare.straggler_ratios == ()
    assert bare.backend == "nccl"
    assert not bare.measured_here
    assert read_cluster(CLUSTER.replace('name = "laboratory"', ""), "nameless").name == "nameless"
    with pytest.raises(ConfigError, match="lacks its latency; give one of latency_microseconds"):
        parsed("[software]\nlatency_microseconds = 0")
    with pytest.raises(ConfigError, match="lacks workers_per_node"):
        parsed("workers_per_node = 4")
    with pytest.raises(ConfigError, match=r"\[link.nic\] of .* lacks its rate; give one of gigabits_per_second"):
        read_cluster("workers_per_node = 4\n[link.worker]\nbytes_per_second = 5\nlatency_seconds = 1", "x")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("link = 5", r"'link' of .* is 5, but a section is needed; write its keys below a line \[link\]"),
        ("link.nic = 'fast'\nlink.worker = {bytes_per_second = 5, latency_seconds = 1}", r"'nic' of .* is 'fast', but"),
        ("straggler = 0.01", r"'straggler' of .* is 0.01, but a section is needed"),
        ("compute = 50", r"'compute' of .* is 50, but a section is needed"),
        ("[[failures]]\nnode_mtbf_hours = 5", r"'failures' of .* but a section is needed"),
        ("[computes]\nmodel = 'x'", "unknown key 'computes' in .* did you mean 'compute'"),
        ("link.fast = {}", r"unknown key 'fast' in \[link\] of .*; known: worker, nic, rack"),
        ("[software]\nlatency = 1", "'latency' in .software. .* has no unit; write latency_microseconds or"),
        ("[loader]\nrate = 1", "'rate' in .loader. .* has no unit; write images_per_second_per_node"),
        ('"a\\nb" = 1', "unknown key 'a.*nb'"),
        ("x = 1" + "0" * 5000, "not valid TOML"),
        ("x = " + "[" * 5000, "not valid TOML"),
    ],
)
def test_shapes_and_keys_that_cannot_be(text: str, words: str) -> None:
    name = re.match(r"[\[\s]*(\w*)", text)[1]  # type: ignore[index]
    rest = re.sub(rf"^\[{name}[^\]]*\]\n[^\[]*", "", CLUSTER, flags=re.MULTILINE)
    with pytest.raises(ConfigError, match=words) as caught:
        read_cluster(f"{rest}\n{text}" if text.startswith("[") else f"{text}\n{rest}", "cluster file 'x.toml'")
    assert "\n" not in str(caught.value)


def test_a_rack_without_a_unit() -> None:
    with pytest.raises(ConfigError, match=r"'speed' in .link.rack. .* has no unit; write gigabits_per_second or"):
        parsed("oversubscription = 3", "speed = 3")


@pytest.mark.parametrize("value", ["0", "4.5", "true", "'4'", "1000000000000000000", "[4]"])
def test_counts_that_cannot_be(value: str) -> None:
    with pytest.raises(ConfigError, match=r"num_nodes of .* give a whole number from 1 to 1e\+09"):
        parsed("workers_per_node = 4", f"workers_per_node = 4\nnum_nodes = {value}")


def test_words_and_switches_that_cannot_be() -> None:
    name = 'name = "laboratory"'
    with pytest.raises(ConfigError, match=r"backend of .* is 'mpi'; give 'nccl' or 'gloo'"):
        parsed(name, "backend = 'mpi'")
    with pytest.raises(ConfigError, match=r"measured_here of .* is 1; give a valid boolean"):
        parsed(name, "measured_here = 1")
    with pytest.raises(ConfigError, match=r"currency of .* give text on one line"):
        parsed(new='[price]\ncurrency = "EUR\\nUSD"')


def test_the_least_certain_step_time_speaks_for_the_table() -> None:
    doubted = 'milliseconds_by_local_batch = { "64" = { value = 98.0, certainty = "assumed" }, "32" = 49.9 }'
    table = read_cluster(CLUSTER.replace(STEPS, f'certainty = "measured"\n{doubted}'), "x").compute
    assert table.batches == (32, 64)
    assert table.seconds(32) == pytest.approx(0.0499)
    assert table.relative_deviation == 0.35
    assert (
        read_cluster(CLUSTER.replace(STEPS, f'certainty = "measured"\n{STEPS}'), "x").compute.relative_deviation == 0.03
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no measured step times"),
        ("milliseconds_by_local_batch = 5", "is 5; give at least one batch"),
        ("milliseconds_by_local_batch = {}", "give at least one batch"),
        (f"milliseconds_by_local_batch = {{ {'9' * 5000} = 5 }}", "not a whole number above 0"),
        ("milliseconds_by_local_batch = { 9999999999 = 5 }", "at most 1e.09"),
        ("milliseconds_by_local_batch = { 32 = 5, 032 = 5 }", "hold local batch 32 twice; keep one"),
        ("milliseconds_by_local_batch = { 32 = 1e300 }", "give a number from"),
        (f"{STEPS}\nbackward_share = 1", "backward_share of x is 1; give a number"),
        (f"{STEPS}\nbackward_share = {{ value = 0.6 }}", "give a number from 0.01"),
        (f'{STEPS}\ncertainty = "sure"', "choose one of"),
        (f"{STEPS}\ncertainty = 5", "choose one of"),
        (f'{STEPS}\nsource = "a\\nb"', "text on one line"),
        (f'{STEPS}\n"a\\nb" = 1', "unknown key"),
    ],
)
def test_step_times_that_cannot_be(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_cluster(CLUSTER.replace(STEPS, text), "x")
    assert "\n" not in str(caught.value)


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
    values = {entry.pop("key"): entry for entry in cluster_as_data(text)}
    assert values["workers_per_node"] == {"value": 8, "certainty": "given", "source": ""}
    assert values["link.worker.gigabytes_per_second"] == {"value": 2, "certainty": "quoted", "source": "sheet"}
    assert values["compute.resnet50.milliseconds.32"] == {"value": 5.0, "certainty": "measured", "source": "mine"}
    assert values["compute.resnet50.milliseconds.64"]["source"] == "guess"
    assert values["price.currency"]["certainty"] == ""
