"""Values with their source."""

from __future__ import annotations

import pytest

from megabatch.errors import ConfigError
from megabatch.plan.quantity import Quantity, read_quantity


def test_bare_numbers_and_tables() -> None:
    assert read_quantity(3, "x") == Quantity(3.0, "given", "")
    full = read_quantity({"value": 2.5, "certainty": "quoted", "source": "paper"}, "x")
    assert (full.value, full.relative_deviation, full.source) == (2.5, 0.10, "paper")
    assert full.times(4) == Quantity(10.0, "quoted", "paper")
    assert read_quantity(0, "x", zero_allowed=True).value == 0


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (0, "more than 0"),
        (-1, "more than 0"),
        (float("nan"), "finite"),
        ("fast", "finite number"),
        (True, "finite number"),
        ({"value": 1, "certainty": "sure"}, "choose one of"),
        ({"value": 1, "unit": "s"}, "unknown keys unit"),
        ({"source": "nobody"}, "finite number"),
    ],
)
def test_what_cannot_be_is_one_line(entry: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_quantity(entry, "link.nic.rate")
    assert "link.nic.rate" in str(caught.value)
    assert "\n" not in str(caught.value)
