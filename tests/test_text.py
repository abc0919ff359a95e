"""Numbers and tables as people and spreadsheets read them."""

from __future__ import annotations

import csv
import io

import pytest

from megabatch.errors import ConfigError
from megabatch.text import (
    bytes_text,
    count_text,
    csv_of_tables,
    csv_text,
    markdown_table,
    percent_text,
    read_seconds,
    seconds_text,
)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        *((3.8e-5, "38 us"), (0.0124, "12.4 ms"), (8.3, "8.3 s"), (89.0, "89 s"), (145, "2.42 min")),
        *((3599.6, "60 min"), (11_070, "3.08 h"), (864_000, "10 days"), (1e11, "3,169 years"), (-2.0, "-2 s")),
        (0, "0 us"),
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


def test_csv_reads_back() -> None:
    rows = [["name", "value"], ['a "b", c', "1.5"], ["line\nbreak", ""]]
    assert list(csv.reader(io.StringIO(csv_text(rows)))) == rows
    tables: list[dict[str, object]] = [{"x": 1, "y": None}, {"x": 2, "y": 0.5}]
    assert list(csv.DictReader(io.StringIO(csv_of_tables(tables)))) == [{"x": "1", "y": ""}, {"x": "2", "y": "0.5"}]


def test_a_markdown_table_puts_numbers_on_the_right() -> None:
    table = markdown_table(("arm", "steps"), [("one", "12"), ("two", "3")], numbers=("steps",))
    assert table == "| arm | steps |\n| --- | ---: |\n| one | 12 |\n| two | 3 |\n"


def test_seconds_are_read() -> None:
    read = [read_seconds(text, "--budget") for text in ("90s", ".5 min", "2H", "1.5d")]
    assert read == [90, 30, 7200, 129_600]


@pytest.mark.parametrize("text", ["", "2", "h", "0s", "-1h", "2 weeks", "1e3s", "1.2.3s", "soon"])
def test_what_is_no_time_is_said(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--budget '.*' is no time; .* 10min"):
        read_seconds(text, "--budget")


def test_seconds_that_are_compared_share_a_unit() -> None:
    assert [seconds_text(x, like=3600.0 * 3) for x in (5400.0, 60.0, 36e6)] == ["1.5 h", "0.0167 h", "10,000 h"]
