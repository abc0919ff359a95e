"""`metrics.jsonl`, one row per step: written at once, and read strictly.

A row of `metrics.jsonl` describes the run after a step: `step` counts from 1, `samples` are the images seen,
`phase` is "trunk" or "collapse-<member>", `epoch` is how far the weights have come (samples / images in an epoch; a
branch counts on from where it left the trunk, and the trunk goes on from there), `noise_scale` is the smoothed noise
scale of the gradient in images where it is measured, `wall_seconds` is the time since the first step, evaluations
and checkpoints included. Rows of steps after which the model was evaluated also carry `val_*`, rows of some steps
`weights_digest`: the SHA-256 of weights and batch-norm statistics, a text.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megabatch.errors import DataError, WriteError
from megabatch.files import open_regular, parse_json, write_atomically
from megabatch.report.metrics import MAX_LINE_BYTES
from megabatch.report.untrusted import bounded_lines


class MetricsLog:
    """Appends rows to `metrics.jsonl`; a resumed run first cuts off the rows written after its checkpoint.

    What stays is copied into a new file of that name. A process that was held up and still has the old file open
    writes into something that nobody reads any more.
    """

    def __init__(self, path: Path, keep_bytes: int = 0) -> None:
        kept = b""
        if keep_bytes and path.is_file():
            with open_regular(path) as old:
                kept = old.read(keep_bytes)
        # After a power failure the file may be shorter than the cursor and end in half a row.
        write_atomically(path, kept[: kept.rfind(b"\n") + 1])
        self._file = open(path, "ab")  # noqa: SIM115 - held open for the whole run, closed by `close`

    @property
    def num_bytes(self) -> int:
        """How long the file is: the cursor a checkpoint stores."""
        return self._file.tell()

    def append(self, row: dict[str, Any]) -> None:
        """Write one row and hand it to the operating system at once."""
        plain = {k: (None if isinstance(v, float) and not math.isfinite(v) else v) for k, v in row.items()}
        try:
            self._file.write(json.dumps(plain).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise WriteError(
                f"'{self._file.name}' cannot be written: {error.strerror}; make room there, then --resume"
            ) from None

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a row that the disk did not take: `append` has said so
            self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows in order; a torn last line, left by a killed run, is passed over. DataError for other damage."""
    line_number = 0
    try:
        with open_regular(path) as file:
            for line in bounded_lines(file, MAX_LINE_BYTES):
                line_number += 1
                row = parse_json(line or b"")
                if not isinstance(row, dict):
                    raise ValueError(f"{type(row).__name__} in place of a table")
                yield row
    except FileNotFoundError:
        raise DataError(f"'{path}' does not exist; give the folder of a run that has made steps") from None
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror}; give the folder of a run") from None
    except ValueError:
        raise DataError(f"'{path}' is damaged in line {line_number}; fix or remove that line") from None
