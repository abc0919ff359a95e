"""What a person sees."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from megabatch.plan.cluster import load_cluster
from megabatch.plan.crosscheck import CheckedBucket, Crosscheck
from megabatch.plan.planner import Goal, plan
from megabatch.plan.show import duration, print_check, print_plan, print_validation
from megabatch.plan.validate import validate_rows
from tests.plan.laboratory import workload
from tests.plan.test_validate import written


def test_a_plan_fits_the_terminal_and_says_everything() -> None:
    console = Console(width=80, soft_wrap=True, file=io.StringIO())
    cluster, load = load_cluster("dgx-a100"), workload(65536, 16)
    print_plan(plan(cluster, load, [512, 1024, 4096], Goal()), cluster, load, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for words in ("Choice (least time)", "training", "80", "Bound by", "Would save most", "wider interval", "USD", "*"):
        assert words in text
    table = text.split("> chosen")[0].splitlines()
    assert max(len(line) for line in table) <= 80
    assert "\u2026" not in text


def test_a_check_fits_the_terminal() -> None:
    console = Console(width=80, soft_wrap=True, file=io.StringIO())
    buckets = (
        CheckedBucket(25 << 20, 3, "in step", 1.2, 1.25, 1.0),
        CheckedBucket(5 << 18, 12, "free", 1e-3, 1e-3, 1e-3),
    )
    print_check(Crosscheck(buckets, "3.32.0"), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for words in ("SimGrid 3.32.0", "25.00 MB", "1,200.000 ms", "+20.000%", "in step", "1.25 MB", "+0.000%"):
        assert words in text
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "\u2026" not in text


def test_a_validation_shows_rows_and_groups(tmp_path: Path) -> None:
    console = Console(width=120, soft_wrap=True, file=io.StringIO())
    print_validation(validate_rows(written(tmp_path, 20.8)), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "nvidia 2.0 dgxa100_n64_mx" in text
    assert "larger, GPU, own stack" in text
    assert "not predicted" in text


def test_durations() -> None:
    assert [duration(x) for x in (0.0265, 45.3, 89.0, 750.0, 11_520.0, 200_000.0)] == [
        *("26.5 ms", "45.3 s", "89.0 s", "12.5 min", "3.2 h", "2.3 days")
    ]
