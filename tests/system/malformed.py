"""Malformed input for the fuzz: values nobody expects, damaged bytes, and things in place of a file. All by seed."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli_w

# As they stand in TOML, JSON and `--set`. Depths are beyond the stack of the parsers, digits beyond what `int` reads.
RAW_VALUES = (
    *("-1", "0", "1", "2", "1099511627776", "9223372036854775808", "-9223372036854775809", "1" + "0" * 29, "9" * 5000),
    *("1e9", "1e300", "-1e300", "1e-300", "1e999", "0.5", "-0.0", "true", "false"),
    *('""', '" "', '"x"', '"a\\nb\\r\\nc"', '"\\u001b[31mred"', '"\\u0000"', '"../../x"', '"/"', '"-"', '"0:1 1:2"'),
    *('"' + "n" * 5000 + '"', '"nan"', '"1e300"', '"0:' + "9" * 5000 + '"', '"\\u202e"', '"1x1"'),
    *("[]", "[1]", "[[1]]", '["x"]', "{}", "[" * 5000 + "]" * 5000, "[" * 200 + "]" * 200, "[" + "1," * 5000 + "1]"),
    *("[1e300]", "[-1]", '[{"x" = 1}]', '{"a": 1}', '{"x" = 1}', '{"x" = ' * 1000 + "1" + "}" * 1000),
    *("nan", "inf", "-inf", "NaN", "Infinity", "null", "None", "1979-05-27", "0x10", '{"a":' * 5000 + "1" + "}" * 5000),
    *('"\\ud800"', "@", "", "'", '"', "=", "\n", "\x00", "\u00e9", "\u2028", "1_000", "1.", "+1", "01"),
)


class Dice(random.Random):
    """Random choices that make one case."""

    def often(self, share: float) -> bool:
        return self.random() < share

    def raw(self) -> str:
        return self.choice(RAW_VALUES)

    def bytes_from(self, good: bytes, other: bytes = b"") -> bytes:
        """The bytes with a few bits flipped, a part cut, doubled, zeroed, or replaced by a part of others."""
        data = bytearray(good)
        for _ in range(self.randint(1, 3)):
            if not data:
                break
            # Headers are at the beginning and at the end.
            edge = min(len(data), 600)
            at = self.choice((self.randrange(len(data)), self.randrange(edge), len(data) - 1 - self.randrange(edge)))
            length = self.choice((1, 4, 16, 512, len(data) // 3 + 1))
            match self.randrange(7):
                case 0 | 1:
                    for _ in range(self.choice((1, 3, 30))):
                        data[self.randrange(at, min(len(data), at + length))] ^= 1 << self.randrange(8)
                case 2:
                    del data[at:]
                case 3:
                    del data[at : at + length]
                case 4:
                    data[at:at] = data[at : at + length]
                case 5:
                    data[at : at + length] = self.choice((b"\0", b"\xff", b"9", b"[")) * length
                case 6:
                    donor = other or self.randbytes(length)
                    start = self.randrange(len(donor) + 1)
                    data[at : at + length] = donor[start : start + length]
        return bytes(data)

    def table_from(self, good: dict[str, Any], suffix: str) -> str:
        """The table as text of a file with that suffix, with some of its values and names made unfit."""
        table, raw = copy.deepcopy(good), list[str]()
        for _ in range(self.choice((1, 1, 1, 2, 4))):
            places = list(_places(table))
            if not places:
                break
            holder, key = self.choice(places)
            mark = f"@{len(raw)}@"
            match self.randrange(8):
                case 0 if isinstance(holder, dict):
                    del holder[key]
                case 1 if isinstance(holder, dict):
                    holder[self.choice(("x", "", "a.b", "n" * 5000, "a\nb", "\x1b[31m", str(key) + "s"))] = holder.pop(
                        key
                    )
                case 2 if isinstance(holder, dict):
                    holder[self.choice(("unknown", str(key)[:-1], "format"))] = mark
                    raw.append(self.raw())
                case _:
                    holder[key] = mark
                    raw.append(self.raw())
        text = tomli_w.dumps(table) if suffix == ".toml" else json.dumps(table)
        for number, value in enumerate(raw):
            text = text.replace(f'"@{number}@"', value)
        return text

    def put(self, path: Path, data: bytes) -> None:
        """Write the file; now and then something else lies in its place."""
        path.unlink(missing_ok=True)
        match self.randrange(40):
            case 0:
                os.mkfifo(path)
            case 1:
                path.mkdir()
            case 2:
                path.symlink_to(self.choice(("nowhere", path.name, "/dev/zero", "/dev/full", "/proc/self/mem", "/")))
            case 3:
                path.write_bytes(b"")
            case 4:
                with open(path, "wb") as file:
                    file.truncate(self.choice((2**20, 2**33)))
            case 5:
                path.write_bytes(self.randbytes(self.choice((1, 100, 100_000))))
            case 6:
                path.write_bytes(b"\xef\xbb\xbf" + data)
            case 7:
                path.write_bytes(data.decode("utf-8", "replace").encode("utf-16"))
            case _:
                path.write_bytes(data)

    def put_table(self, path: Path, good: dict[str, Any]) -> None:
        """Write a table that has become unfit, or its bytes damaged."""
        text = self.table_from(good, path.suffix).encode("utf-8", "surrogatepass")
        self.put(path, self.bytes_from(text) if self.often(0.3) else text)

    def put_bytes(self, path: Path, other: bytes = b"") -> None:
        """Damage a file."""
        self.put(path, self.bytes_from(path.read_bytes(), other))


def _places(table: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(table) if isinstance(table, dict) else range(len(table))
    for key in keys:
        yield table, key
        if isinstance(table[key], dict | list):
            yield from _places(table[key])
