"""Reading what may be damaged, huge or hostile."""

from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from megabatch.files import UnreadableError, open_regular
from megabatch.report.untrusted import (
    bounded_lines,
    items,
    number,
    read_table,
    table,
    text,
    whole,
)


@pytest.mark.parametrize("value", [None, True, "1", [], {}, math.nan, math.inf, -math.inf, 10**400, b"1"])
def test_what_is_no_finite_number_is_none(value: Any) -> None:
    assert number(value) is None
    assert whole(value) is None


def test_numbers_and_whole_numbers() -> None:
    assert (number(3), number(-2.5)) == (3.0, -2.5)
    assert (whole(3.0), whole(3.5), whole(-1), whole(-1, low=-1), whole(11, high=10)) == (3, None, None, -1, None)


def test_text_is_one_bounded_line_of_visible_characters() -> None:
    assert text("a\nb\tc\x00\x1b[31m\u202egnp.exe\ud800") == "a b c[31mgnp.exe"
    assert text("caf\u00e9 \u4e2d") == "caf\u00e9 \u4e2d"
    assert len(text("x" * 10**6)) == 300
    assert text("x" * 10, 5) == "xx..."
    assert text(None) == ""
    assert text(math.nan) == text(10**5000) == "not a number"
    assert (text(3), text(True), text(0.5)) == ("3", "True", "0.5")
    assert text([["x"] * 1000] * 1000) == ""  # a structure is not shown, and not built as text first
    text("\ud800").encode()  # what comes out can be written


def test_tables_and_lists_of_other_kinds_are_empty() -> None:
    assert (table([1]), table({"a": 1})) == ({}, {"a": 1})
    assert (items({"a": 1}), items([1, 2, 3], 2)) == ([], [1, 2])


def test_a_pipe_or_a_folder_in_place_of_a_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    for name in ("pipe.json", "folder.json"):
        with pytest.raises(UnreadableError):
            read_table(tmp_path / name)
    with pytest.raises(FileNotFoundError), open_regular(tmp_path / "none"):
        pass


@pytest.mark.parametrize("content", [b"{", b'{"a": 1', b"3", b"[" * 200_000, b"\xff\xfe", b'{"a":' * 99_999, b""])
def test_what_is_not_whole_json_is_said_and_not_raised_further(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(UnreadableError):
        read_table(tmp_path / "x.json")


def test_tables_of_json_and_toml(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": NaN}')
    (tmp_path / "b.json").write_text("[1]")
    (tmp_path / "c.toml").write_text("a = 1")
    (tmp_path / "d.toml").write_text("a = ")
    found = read_table(tmp_path / "a.json")
    assert found is not None
    assert number(found["a"]) is None
    assert read_table(tmp_path / "b.json") == {"rows": [1]}
    assert read_table(tmp_path / "c.toml") == {"a": 1}
    assert read_table(tmp_path / "none.json") is None
    with pytest.raises(UnreadableError, match="TOML"):
        read_table(tmp_path / "d.toml")


def test_a_file_over_its_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"a": "x" * 17 * 2**20}))
    with pytest.raises(UnreadableError, match="larger than 16 MiB"):
        read_table(tmp_path / "x.json")


def test_lines_over_the_limit_are_passed_over_and_a_torn_one_is_left() -> None:
    data = b"one\n" + b"x" * 25 + b"\n" + b"0123456789\n" + b"y" * 12 + b"\nlast\ntorn"
    assert list(bounded_lines(io.BytesIO(data), 11)) == [b"one\n", None, b"0123456789\n", None, b"last\n"]
    assert list(bounded_lines(io.BytesIO(b"x" * 50), 11)) == []
    assert list(bounded_lines(io.BytesIO(b""), 11)) == []
