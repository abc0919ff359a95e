"""The token of a run: where it comes from, what is refused, and that it is never told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megabatch.errors import LaunchError
from megabatch.workers.token import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, is_signed, open_to_others, run_token, sign

SECRET = "0123456789abcdef" * 4


def test_the_token_comes_from_the_environment_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(SECRET + "\n", encoding="utf-8")
    assert run_token({}) is None
    assert run_token({TOKEN_VARIABLE: f" {SECRET}\n"}) == SECRET.encode()
    assert run_token({TOKEN_FILE_VARIABLE: str(file)}) == SECRET.encode()
    assert run_token({TOKEN_FILE_VARIABLE: str(file), TOKEN_VARIABLE: "b" * 32}) == b"b" * 32
    file.write_bytes(os.urandom(3) + b"\xff" * 29)  # any bytes will do
    assert len(run_token({TOKEN_FILE_VARIABLE: str(file)}) or b"") >= 29


@pytest.mark.parametrize("text", ["", "   \n", "short-secret", "x" * 5000])
def test_a_bad_token_is_refused_in_one_line_that_does_not_tell_it(text: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(text, encoding="utf-8")
    for environ in ({TOKEN_VARIABLE: text}, {TOKEN_FILE_VARIABLE: str(file)}):
        with pytest.raises(LaunchError, match=r"bytes; a token has 16 to 4096 of them: make one with") as refused:
            run_token(environ)
        assert "\n" not in str(refused.value)
        assert not text.strip() or text not in str(refused.value)


def test_a_file_that_is_none_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name, reason in (("fifo", "is not a file"), ("", "is not a file"), ("nowhere", "No such file")):
        with pytest.raises(LaunchError, match=reason):
            run_token({TOKEN_FILE_VARIABLE: str(tmp_path / name)})
    with pytest.raises(LaunchError, match="cannot be read"):
        run_token({TOKEN_FILE_VARIABLE: "a\0b"})


def test_a_file_that_others_can_read_is_warned_of(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(SECRET, encoding="utf-8")
    for mode, is_open in ((0o600, False), (0o400, False), (0o640, True), (0o604, True)):
        file.chmod(mode)
        told = open_to_others({TOKEN_FILE_VARIABLE: str(file)})
        assert (f"other users can read the token in '{file}'; chmod 600 it" in told, "\n" in told) == (is_open, False)
        assert open_to_others({TOKEN_FILE_VARIABLE: str(file), TOKEN_VARIABLE: SECRET}) == ""
    assert open_to_others({}) == open_to_others({TOKEN_FILE_VARIABLE: str(tmp_path / "gone")}) == ""


def test_only_the_same_token_signs_the_same_text_alike() -> None:
    signature = sign(SECRET.encode(), "runs/a")
    assert len(signature) == 64
    assert is_signed(SECRET.encode(), "runs/a", signature)
    assert not is_signed(SECRET.encode(), "runs/b", signature)
    assert not is_signed(b"x" * 16, "runs/a", signature)
    assert not is_signed(SECRET.encode(), "runs/a", "\u00e9")
