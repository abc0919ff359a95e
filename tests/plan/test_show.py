"""What a person sees."""

from __future__ import annotations

import dataclasses
import io

from rich.console import Console

from megabatch.plan.calibrate import fit_steps
from megabatch.plan.cluster import load_cluster
from megabatch.plan.evidence import Evidence
from megabatch.plan.planner import Goal, plan
from megabatch.plan.show import duration, print_plan
from tests.plan.laboratory import workload
from tests.plan.test_calibrate import row


def test_a_plan_fits_the_terminal_and_says_everything() -> None:
    console = Console(width=80, soft_wrap=True, file=io.StringIO())
    cluster, load = load_cluster("dgx-a100"), workload(65536, 16)
    print_plan(plan(cluster, load, [512, 1024, 4096, 40960], Goal()), Evidence(cluster), load, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for words in ("Choice (least time", "training", "80", "Bound by", "would save", "wider interval", "USD", "*"):
        assert words in text
    assert "left out: 40,960 workers: " in text
    table = text.split("> chosen")[0].splitlines()
    assert max(len(line) for line in table) <= 80
    assert "\u2026" not in text


def test_a_fit_is_shown_with_its_uncertainty() -> None:
    console = Console(width=80, soft_wrap=True, file=io.StringIO())
    cluster, load = load_cluster("dgx-a100"), workload(65536, 16)
    evidence = Evidence(cluster, fit=fit_steps([row(8, 408.0), row(64, 51.0)]))
    print_plan(plan(cluster, load, [512], Goal(), fit=evidence.fit), evidence, load, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for words in ("per_image", "us an image", "+-", "scatter", "not determined by the rows"):
        assert words in text
    assert "evaluation  " not in text.split("Choice")[0]


def test_names_are_no_markup() -> None:
    console = Console(width=80, soft_wrap=True, file=io.StringIO())
    cluster = dataclasses.replace(load_cluster("dgx-a100"), title="[/x] [bold]mine", currency="[/USD]")
    load = workload(65536, 16)
    print_plan(plan(cluster, load, [64], Goal()), Evidence(cluster), load, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[/x] [bold]mine" in text
    assert "[/USD]" in text


def test_durations() -> None:
    assert [duration(x) for x in (0.0265, 45.3, 89.0, 750.0, 11_520.0, 200_000.0)] == [
        *("26.5 ms", "45.3 s", "89.0 s", "12.5 min", "3.2 h", "2.3 days")
    ]
