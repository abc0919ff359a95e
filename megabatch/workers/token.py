"""The token of a run: a secret that its workers share, so that nobody else can speak in their name.

It comes from a file or from the environment, never from a command line, and is never printed. Torch's store and Gloo
know no passwords: whoever reaches their ports can read and write there. So what one worker leaves for another outside
of a process group is signed, and the keys under which a run's workers meet are derived from the token.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from megabatch.errors import LaunchError

TOKEN_VARIABLE = "MEGABATCH_TOKEN"
TOKEN_FILE_VARIABLE = "MEGABATCH_TOKEN_FILE"

_MIN_BYTES, _MAX_BYTES = 16, 4096
_HOW = "make one with `openssl rand -hex 32`"


def run_token(environ: Mapping[str, str]) -> bytes | None:
    """The token in MEGABATCH_TOKEN, else in the file named by MEGABATCH_TOKEN_FILE, else None.

    Raises:
        LaunchError: the file cannot be read, or what it holds is no token; the token itself is never told.
    """
    if TOKEN_VARIABLE in environ:
        where, text = TOKEN_VARIABLE, environ[TOKEN_VARIABLE].encode(errors="surrogateescape")
    elif TOKEN_FILE_VARIABLE in environ:
        where = f"{TOKEN_FILE_VARIABLE} '{environ[TOKEN_FILE_VARIABLE]}'"
        text = _read(Path(environ[TOKEN_FILE_VARIABLE]), where)
    else:
        return None
    token = text.strip()
    if not _MIN_BYTES <= len(token) <= _MAX_BYTES:
        raise LaunchError(f"{where} holds {len(token)} bytes; a token has {_MIN_BYTES} to {_MAX_BYTES} of them: {_HOW}")
    return token


def needed_token(environ: Mapping[str, str], who: str) -> bytes:
    """As `run_token`, where there must be one."""
    token = run_token(environ)
    if token is None:
        raise LaunchError(
            f"{who} needs the token of the run; {_HOW} and give it to the lighthouse and to every worker in "
            f"{TOKEN_FILE_VARIABLE} or {TOKEN_VARIABLE}"
        )
    return token


def open_to_others(environ: Mapping[str, str]) -> str:
    """A warning when other users of the machine can read the file of the token; empty when they cannot."""
    if TOKEN_VARIABLE in environ or TOKEN_FILE_VARIABLE not in environ:
        return ""
    path = Path(environ[TOKEN_FILE_VARIABLE])
    try:
        is_open = path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH)
        is_mounted = os.statvfs(path).f_flag & os.ST_RDONLY  # as a Secret in a pod: whoever mounts it decides
    except (OSError, ValueError):
        return ""
    return (
        f"warning        other users can read the token in '{path}'; chmod 600 it" if is_open and not is_mounted else ""
    )


def sign(token: bytes, text: str) -> str:
    """The signature of a text (HMAC with SHA-256, in hexadecimal): only who has the token can make it."""
    return hmac.new(token, text.encode(), hashlib.sha256).hexdigest()


def is_signed(token: bytes, text: str, signature: str) -> bool:
    """Whether somebody who has the token signed this text."""
    return hmac.compare_digest(sign(token, text).encode(), signature.encode())


def _read(path: Path, where: str) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise LaunchError(f"{where} is not a file; {_HOW} and write it into one")
        with open(path, "rb") as file:
            return file.read(_MAX_BYTES + 2)  # one more than a token and a line's end: then it is too long
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LaunchError(f"{where} cannot be read ({reason}); {_HOW} and write it into that file") from None
