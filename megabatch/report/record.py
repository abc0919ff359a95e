"""The files of a run folder: names, writers that never leave a half-written file, readers that forgive a torn line.

    config.toml         the resolved settings            summary.json       the result
    environment.json    versions, hosts, grid, commit    checkpoints/       see megabatch.train.checkpoint
    metrics.jsonl       one row per step               model.safetensors  the trained model
    tensorboard/        the same rows for TensorBoard    members/           the models of a collapsed ensemble
    plan.json           what was predicted               ensemble.json      what `evaluate --ensemble` found
    ranks.json          times of every rank              report.html        the run to look at

A row of `metrics.jsonl` describes the run after a step: `step` counts from 1, `samples` are the images seen,
`phase` is "trunk" or "collapse-<member>", `epoch` is how far the weights have come (samples / images in an epoch; a
branch counts on from where it left the trunk, and the trunk goes on from there), `noise_scale` is the smoothed noise
scale of the gradient in images where it is measured, `wall_seconds` is the time since the first step, evaluations
and checkpoints included. Rows of steps after which the model was evaluated also carry `val_*`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megabatch.errors import CheckpointError, DataError

__all__ = ["MetricsLog", "read_json", "read_metrics"]


def read_json(path: Path) -> dict[str, Any]:
    """Read what `files.write_json` wrote."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"'{path}' does not exist; give the folder of a finished run") from None
    except (OSError, ValueError) as error:
        raise DataError(f"'{path}' cannot be read: {error}; the run folder is damaged") from None
    if not isinstance(value, dict):
        raise DataError(f"'{path}' holds {type(value).__name__}, a table is needed; the run folder is damaged")
    return value


class MetricsLog:
    """Appends rows to `metrics.jsonl`; a resumed run first cuts off the rows written after its checkpoint."""

    def __init__(self, path: Path, keep_bytes: int = 0) -> None:
        path.touch()
        self._file = open(path, "r+b")  # noqa: SIM115 - held open for the whole run, closed by `close`
        kept = self._file.read(keep_bytes)
        # After a power failure the file may be shorter than the cursor and end in half a row.
        self._file.truncate(kept.rfind(b"\n") + 1)
        self._file.seek(0, os.SEEK_END)

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
            raise CheckpointError(
                f"'{self._file.name}' cannot be written: {error.strerror}; make room there, then --resume"
            ) from None

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows in order; a torn last line, left by a killed run, is passed over.

    Raises:
        DataError: no such file, or a damaged line in its midst.
    """
    number = 0
    try:
        with open(path, "rb") as file:
            for line in file:
                number += 1
                if not line.endswith(b"\n"):
                    return
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError(f"{type(row).__name__} in place of a table")
                yield row
    except FileNotFoundError:
        raise DataError(f"'{path}' does not exist; give the folder of a run that has made steps") from None
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror}; give the folder of a run") from None
    except (ValueError, RecursionError):
        raise DataError(f"'{path}' is damaged in line {number}; fix or remove that line") from None
