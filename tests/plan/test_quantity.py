"""Values with their source."""

from __future__ import annotations

import numpy as np
import pytest

from megabatch.errors import ConfigError
from megabatch.plan.edge import LATENCY, RATE, Span
from megabatch.plan.quantity import Quantity, read_quantity

ANY = Span(1e-9, 1e9)


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
