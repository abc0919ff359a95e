"""What a worker leaves for its launcher: the first error that would come again, with the traceback of a bug."""

from __future__ import annotations

from pathlib import Path

import pytest

from megabatch.errors import CommunicationError, ConfigError
from megabatch.workers.error_file import ERROR_FILE_VARIABLE, leave_error, leave_error_of
from megabatch.workers.world import World

WORLD = World(1, 4, 1, 4, "torchrun", "127.0.0.1", 0)


def test_the_first_error_is_the_one_that_is_told(tmp_path: Path) -> None:
    environ = {ERROR_FILE_VARIABLE: str(tmp_path / "error")}
    assert leave_error("first: caf\u00e9", environ)
    assert leave_error("second", environ)
    assert (tmp_path / "error").read_text(encoding="utf-8") == "first: caf\u00e9"


def test_without_our_launcher_there_is_nowhere_to_leave_it() -> None:
    assert not leave_error("lost", {})
    assert not leave_error_of(ConfigError("lost"), WORLD, {})
    assert not leave_error_of(ValueError("lost"), WORLD, {})


def test_a_place_that_is_gone_does_no_harm(tmp_path: Path) -> None:
    """The launcher may have been killed and its scratch folder cleared away."""
    assert leave_error("late", {ERROR_FILE_VARIABLE: str(tmp_path / "gone" / "error")})


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConfigError("given a, needed b, do c"), "given a, needed b, do c"),
        (ValueError("a bad image\nof many"), "rank 1 met ValueError: a bad image"),
        (CommunicationError("rank 3 is silent"), ""),
        (RuntimeError("[/x/gloo/transport/tcp/pair.cc:1] Connection closed by peer"), ""),
        (KeyboardInterrupt(), ""),
    ],
)
def test_an_error_that_is_worth_another_try_is_not_left(tmp_path: Path, error: BaseException, text: str) -> None:
    path = tmp_path / "error"
    assert leave_error_of(error, WORLD, {ERROR_FILE_VARIABLE: str(path)}) == bool(text)
    assert (path.read_text() if path.exists() else "") == text


def test_the_traceback_of_a_bug_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bug = ValueError("a bad image")
    for _ in range(2):
        assert leave_error_of(bug, WORLD, {ERROR_FILE_VARIABLE: str(tmp_path / "error")})
    assert capsys.readouterr().err.count("ValueError: a bad image") == 1
