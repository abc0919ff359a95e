"""Text of a run never becomes markup."""

from __future__ import annotations

import base64
import hashlib
import json

import pytest

from megabatch.report.markup import chip, definitions, escape, html_table, json_for_script, script_hash
from tests.report.folders import HOSTILE


def test_every_piece_escapes() -> None:
    pieces = [chip(HOSTILE, HOSTILE), html_table(HOSTILE, [HOSTILE], [[HOSTILE]]), definitions([(HOSTILE, HOSTILE)])]
    for piece in pieces:
        assert "<script" not in piece
        assert "<img" not in piece
        assert 'onerror="' not in piece
    assert escape("\"'<>&") == "&quot;&#x27;&lt;&gt;&amp;"


def test_json_cannot_end_its_script_element_and_reads_back() -> None:
    value = {"a": "</script><!--", "b": ["&amp;", "\u2028"]}
    dumped = json_for_script(value)
    assert not set("<>&") & set(dumped)
    assert json.loads(dumped) == value
    with pytest.raises(ValueError, match="JSON"):
        json_for_script({"a": float("nan")})


def test_tables_have_captions_scopes_and_right_aligned_numbers() -> None:
    made = html_table("what", ["name", "value"], [["a", "1.5"], ["b", "-"], ["c", "-3"]])
    assert "<caption>what</caption>" in made
    assert made.count('scope="col"') == 2
    assert made.count('class="number"') == 4
    assert 'class="number"' not in html_table("what", ["value"], [["1"]], numeric=False)


def test_the_hash_is_what_a_policy_wants() -> None:
    digest = base64.b64encode(hashlib.sha256(b"let a = 1;").digest()).decode()
    assert script_hash("let a = 1;") == f"'sha256-{digest}'"
