"""What may enter the planner."""

from __future__ import annotations

import math

import pytest

from megabatch.errors import ConfigError
from megabatch.plan.edge import COUNT, LATENCY, RATE, Span, is_plain, plain_text, shown


@pytest.mark.parametrize("value", [1, 1.0, 1e16, 10**16])
def test_numbers_inside_and_on_the_limits(value: float) -> None:
    assert RATE.why_not(value) == ""


@pytest.mark.parametrize("value", [0, -1, 0.99, 1.01e16, 10**400, math.nan, math.inf, True, None, "5", [1.0]])
def test_numbers_that_cannot_be(value: object) -> None:
    assert RATE.why_not(value) == "give a number from 1 to 1e+16"


def test_limits_are_told_in_the_unit_of_the_number() -> None:
    assert RATE.why_not(8e7, 1e9 / 8) == ""
    assert RATE.why_not(9e7, 1e9 / 8) == "give a number from 8e-09 to 8e+07"


def test_zero_whole_numbers_and_hints() -> None:
    assert LATENCY.why_not(0) == ""
    assert LATENCY.why_not(1e-13) == "give 0 or a number from 1e-12 to 3600"
    assert COUNT.why_not(8.0) == ""
    assert COUNT.why_not(8.5) == "give a whole number from 1 to 1e+09"
    assert Span(1, 2, hint="; or none").why_not(3) == "give a number from 1 to 2; or none"


def test_plain_text_is_one_line() -> None:
    assert plain_text("gr\u00f6\u00dfer [/x] \u5927", "title") == "gr\u00f6\u00dfer [/x] \u5927"
    for text in ("two\nlines", "\x1b[31mred", "a\u2028b", "tab\t", "\x00"):
        assert not is_plain(text)
        with pytest.raises(ConfigError, match=r"title is .*; give text on one line") as caught:
            plain_text(text, "title")
        assert is_plain(str(caught.value))
    with pytest.raises(ConfigError, match="title is 5; give text"):
        plain_text(5, "title")


def test_long_values_are_shortened() -> None:
    assert shown("x") == "'x'"
    assert len(shown("x" * 1000)) < 70
