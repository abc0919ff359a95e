"""The members of a tar file as (name, offset, size), found by reading headers only; nothing is ever unpacked.

Headers of POSIX.1-1988 (ustar), the pax records of POSIX.1-2001 as far as they speak of name and size, and long names
as GNU tar writes them. Python's `tarfile` knows more and is much slower, which counts for the millions of
members of ImageNet. A file must end with a block of zeros, as the format asks: without that mark a file cut between
two members could not be told from a whole one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megabatch.data.storage import Storage
from megabatch.errors import DataError

__all__ = ["BLOCK_BYTES", "Member", "list_members", "tar_header"]

BLOCK_BYTES = 512
WINDOW_BYTES = 64 * 1024  # headers of small neighbours come with one read

_REGULAR, _FOLDER = (b"0", b"\0", b"7"), b"5"
_PAX, _PAX_GLOBAL, _LONG_NAME, _LONG_LINK = b"x", b"g", b"L", b"K"


class Member(NamedTuple):
    """A regular file inside a tar file; `offset` is where its content begins."""

    name: str
    offset: int
    num_bytes: int


def list_members(storage: Storage, file: int) -> Iterator[Member]:
    """The regular files of a tar file in their order; folders are passed over.

    Raises:
        DataError: not a tar file, a damaged header, a member that is a link, or a file that ends too early.
    """
    place, total = storage.place(file), storage.stamps[file].num_bytes
    window, window_start = b"", 0
    at = 0
    said: dict[str, str] = {}  # what an extension says about the next member
    while True:
        if not window_start <= at <= at + BLOCK_BYTES <= window_start + len(window):
            window, window_start = storage.read_at(file, at, WINDOW_BYTES), at
        block = window[at - window_start : at - window_start + BLOCK_BYTES]
        if len(block) < BLOCK_BYTES:
            raise DataError(f"{place} is truncated: it ends at byte {total} without an end mark; fetch it again")
        if block.count(0) == BLOCK_BYTES:
            return
        name, num_bytes = _name_and_size(block, place, at)
        kind, content = block[156:157], at + BLOCK_BYTES
        if kind in (_PAX, _LONG_NAME):
            said |= _extension(storage.read_at(file, content, num_bytes), kind, place, at)
        elif kind not in (_PAX_GLOBAL, _LONG_LINK):
            name, num_bytes = said.get("path", name), _number(said.get("size"), num_bytes, place, at)
            said = {}
        at = content + -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
        if content + num_bytes > total:
            raise DataError(
                f"{place} is truncated: its member {name} ends at byte {content + num_bytes}, the file at {total}; "
                "fetch it again"
            )
        if kind in _REGULAR:
            yield Member(name, content, num_bytes)
        elif kind not in (_FOLDER, _PAX, _PAX_GLOBAL, _LONG_NAME, _LONG_LINK):
            raise DataError(f"{place} has {name}, a link or a device; images must be regular members: pack it again")


def tar_header(name: str, num_bytes: int) -> bytes:
    """A ustar header without owner or date: the same content gives the same bytes on any machine and day."""
    encoded = name.encode("ascii")
    assert len(encoded) <= 100
    fields = (
        encoded.ljust(100, b"\0"),
        b"0000644\0",
        b"0000000\0" * 2,  # user and group
        f"{num_bytes:011o}\0".encode(),
        b"00000000000\0",  # date
        b" " * 8,  # the sum is taken with blanks in its own place
        b"0",
        b"\0" * 100,
        b"ustar\00000",
    )
    header = b"".join(fields).ljust(BLOCK_BYTES, b"\0")
    return header[:148] + f"{sum(header):06o}\0 ".encode() + header[156:]


def _name_and_size(block: bytes, place: str, at: int) -> tuple[str, int]:
    """What a ustar header says, after checking its sum."""
    try:
        stated = int(block[148:156].strip(b"\0 "), 8)
        num_bytes = int(block[124:136].strip(b"\0 ") or b"0", 8)
    except ValueError:
        raise DataError(f"{place} has no tar header at byte {at}; it is not a tar file or is damaged") from None
    if sum(block) - sum(block[148:156]) + 8 * 32 != stated:
        raise DataError(f"{place} has a damaged tar header at byte {at}: its checksum is wrong; fetch it again")
    name = block[:100].rstrip(b"\0")
    if block[257:262] == b"ustar" and (prefix := block[345:500].rstrip(b"\0")) and block[262:264] != b" \0":
        name = prefix + b"/" + name
    return name.partition(b"\0")[0].decode("utf-8", "replace"), num_bytes


def _extension(content: bytes, kind: bytes, place: str, at: int) -> dict[str, str]:
    """The name and the size that a long-name member or a pax record gives to the next member."""
    if kind == _LONG_NAME:
        return {"path": content.rstrip(b"\0").decode("utf-8", "replace")}
    found = {}
    while content:  # "LENGTH KEY=VALUE\n", the length of the whole record
        length, blank, _ = content.partition(b" ")
        if not blank or not length.isdigit() or not len(length) < int(length) <= len(content):
            raise DataError(f"{place} has a damaged pax record at byte {at}; fetch it again")
        key, _, value = content[len(length) + 1 : int(length) - 1].partition(b"=")
        if key in (b"path", b"size"):
            found[key.decode()] = value.decode("utf-8", "replace")
        content = content[int(length) :]
    return found


def _number(text: str | None, otherwise: int, place: str, at: int) -> int:
    if text is None:
        return otherwise
    if not text.isdigit():
        raise DataError(f"{place} has a damaged pax record at byte {at}; fetch it again")
    return int(text)
