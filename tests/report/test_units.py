"""Numbers as people read them."""

from __future__ import annotations

import pytest

from megabatch.report.units import bytes_text, count_text, percent_text, seconds_text


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        *((3.8e-5, "38 us"), (0.0124, "12.4 ms"), (8.3, "8.3 s"), (59.94, "59.9 s"), (145, "2 min 25 s")),
        *((3599.6, "1 h 00 min"), (11_070, "3 h 04 min"), (-2.0, "-2 s"), (0, "0 us"), (864_000, "10 days")),
    ],
)
def test_seconds(seconds: float, said: str) -> None:
    assert seconds_text(seconds) == said


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (26_843_546, "25.6 MiB"), (2**60, "1.05e+06 TiB")],
)
def test_bytes(count: float, said: str) -> None:
    assert bytes_text(count) == said


def test_counts_and_percentages() -> None:
    assert [count_text(v) for v in (3315.4, 0.25, 7, 12.345)] == ["3,315", "0.25", "7", "12.3"]
    assert percent_text(0.91174) == "91.17 %"
