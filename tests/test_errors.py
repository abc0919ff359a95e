"""The tree of errors is the one its own docstring draws, and hints name the nearest known word."""

from __future__ import annotations

import re

import pytest

from megabatch import errors
from megabatch.errors import MegabatchError, first_line, nearest

HELPERS = {"complaint", "first_line", "nearest", "some_names"}


def test_the_docstring_draws_every_error_there_is() -> None:
    assert errors.__doc__ is not None
    drawn = set(re.findall(r"\b(\w+Error)\b", errors.__doc__))
    defined = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert drawn == defined
    assert defined | HELPERS == set(errors.__all__)


def test_one_base_class_catches_them_all_and_is_one_level_above() -> None:
    for name in set(errors.__all__) - HELPERS - {"MegabatchError", "DisagreementError"}:
        assert getattr(errors, name).__bases__ == (MegabatchError,)
    assert errors.DisagreementError.__bases__ == (errors.CommunicationError,)  # who hears one hears both
    # A user's mistake must not pass for one of Python's own errors, which are caught elsewhere for other reasons.
    assert MegabatchError.__bases__ == (Exception,)


@pytest.mark.parametrize(
    ("word", "known", "hint"),
    [
        ("epoch", ["epochs", "seed"], "; did you mean 'epochs'?"),
        ("mikami2108", ["mikami2018", "akiba2017"], "; did you mean 'mikami2018'?"),
        ("zzz", ["epochs", "seed"], ""),
        ("epochs", [], ""),
    ],
)
def test_nearest_names_one_close_word_or_nothing(word: str, known: list[str], hint: str) -> None:
    assert nearest(word, known) == hint
    assert nearest(word, iter(known)) == hint


def test_the_first_line_of_an_error() -> None:
    assert first_line(ValueError("one\ntwo")) == "ValueError: one"
    assert first_line(ValueError()) == "ValueError"
