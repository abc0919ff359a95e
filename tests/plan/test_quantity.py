"""Values with their source."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megabatch.errors import ConfigError
from megabatch.plan.quantity import (
    COUNT,
    LATENCY,
    RATE,
    Bounds,
    Quantity,
    Reach,
    check_text,
    interval,
    is_plain,
    read_quantity,
    shown,
)

ANY = Bounds(1e-9, 1e9)


def test_bare_numbers_and_tables() -> None:
    assert read_quantity(3, "x", ANY) == Quantity(3.0, "given", "")
    full = read_quantity({"value": 2.5, "certainty": "quoted", "source": "paper"}, "x", ANY)
    assert (full.value, full.relative_deviation, full.source) == (2.5, 0.10, "paper")
    assert full.times(4) == Quantity(10.0, "quoted", "paper")
    assert read_quantity(0, "x", LATENCY).value == 0
    assert read_quantity(2, "x", ANY, unit=1e-3) == Quantity(0.002)
    assert read_quantity(2, "x", ANY, certainty="assumed").certainty == "assumed"
    assert read_quantity({"value": 2, "certainty": "quoted"}, "x", ANY, certainty="assumed").certainty == "quoted"


def test_products_are_as_uncertain_as_all_their_factors() -> None:
    rate, count, part = Quantity(100.0, "quoted"), Quantity(2.0, "derived"), Quantity(0.8, "assumed")
    product, quotient = rate.by(count).by(part), rate.over(part)
    assert product.value == pytest.approx(160)
    assert quotient.value == pytest.approx(125)
    # Against draws: products of log-normal factors with these deviations.
    draws = np.random.default_rng(2).standard_normal((200_000, 3)) * [0.10, 0.15, 0.35]
    assert product.relative_deviation == pytest.approx(float(draws.sum(axis=1).std()), rel=0.01)
    assert quotient.relative_deviation == pytest.approx(float((draws[:, 0] - draws[:, 2]).std()), rel=0.01)
    assert product.times(3).relative_deviation == product.relative_deviation


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (0, "is 0; give a number from 1 to"),
        (-1, "is -1; give a number from 1 to"),
        (1e300, "is 1e.300; give a number from 1 to 1e.16"),
        (10**400, "give a number from 1 to"),
        (float("nan"), "is nan; give a number"),
        ("fast", "is 'fast'; give a number"),
        (True, "is True; give a number"),
        ({"value": 1, "certainty": "sure"}, "choose one of"),
        ({"value": 1, "certainty": ["quoted"]}, "choose one of"),
        ({"value": 1, "unit": "s"}, "unknown keys 'unit'"),
        ({"value": 1, "source": "two\nlines"}, "text on one line"),
        ({"source": "nobody"}, "has no value"),
    ],
)
def test_what_cannot_be_is_one_line(entry: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_quantity(entry, "link.nic.rate", RATE)
    assert "link.nic.rate" in str(caught.value)
    assert "\n" not in str(caught.value)


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
    assert Bounds(1, 2, hint="; or none").why_not(3) == "give a number from 1 to 2; or none"


def test_plain_text_is_one_line() -> None:
    assert check_text("gr\u00f6\u00dfer [/x] \u5927") == "gr\u00f6\u00dfer [/x] \u5927"
    for text in ("two\nlines", "\x1b[31mred", "a\u2028b", "tab\t", "\x00"):
        assert not is_plain(text)
        with pytest.raises(ConfigError, match=r"the source of x is .*; give text on one line") as caught:
            read_quantity({"value": 1, "source": text}, "x", ANY)
        assert is_plain(str(caught.value))
    with pytest.raises(ValueError, match="is 5; give text"):
        check_text(5)


def test_long_values_are_shortened() -> None:
    assert shown("x") == "'x'"
    assert len(shown("x" * 1000)) < 70


def test_holds_four_of_five() -> None:
    draws = 3.0 * np.exp(0.2 * np.random.default_rng(1).standard_normal(20_000))
    here = interval(3.0, 0.2)
    assert np.mean([here.holds(value) for value in draws]) == pytest.approx(0.8, abs=0.01)
    assert here.times(2).high == pytest.approx(2 * here.high)


@pytest.mark.parametrize(
    ("reach", "words"),
    [
        (Reach(workers=5), "32 times the workers"),
        (Reach(batch=1), "local batch of a pass 2 times outside"),
        (Reach(evidence="same stack"), "another machine"),
        (Reach(evidence="other stack"), "another software stack"),
        (Reach(evidence="other framework"), "another framework"),
        (Reach(evidence="other system"), "other organisations"),
        (Reach(first_time_across_nodes=True), "one node only"),
        (Reach(mixed_measurement=True), "evaluation"),
    ],
)
def test_distance_widens_and_is_told(reach: Reach, words: str) -> None:
    assert reach.deviation > Reach().deviation
    assert words in reach.warnings[0]
    assert Reach().warnings == []


def test_a_few_more_workers_are_told_apart_from_far_more() -> None:
    assert Reach(workers=1).warnings == ["2.0 times the workers that were calibrated"]
    assert "far outside" in Reach(workers=5).warnings[0]
    assert Reach(workers=-1).warnings == ["2.0 times fewer workers than those that were calibrated"]
    assert Reach(workers=-1).deviation == Reach(workers=1).deviation


def test_rows_that_disagree_widen_and_are_told() -> None:
    apart = Reach(lack_of_fit=0.2)
    assert apart.deviation > 4 * Reach().deviation
    assert "disagree with one another by 20%" in apart.warnings[0]
