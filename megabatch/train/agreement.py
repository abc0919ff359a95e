"""What the workers of an elastic run must have in common, as short texts by name.

A worker that differs would send messages of other sizes, which ends the others too, or would compute other bits. So
this holds every setting that decides what is computed or what is sent, the grid and the bounds that were asked for, the
images, the network, the code, and all that `environment.json` records of where bits come from; elastic runs compute on
CPUs, so devices are left out. Other settings may differ: paths, patience, read-ahead, logs.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

import torch

import megabatch
from megabatch.comm.shape import parse_grid
from megabatch.config import Config
from megabatch.data.sources import Source, digest_of_set
from megabatch.files import flatten
from megabatch.train.audit import weights_digest
from megabatch.train.components import Components
from megabatch.train.describe import describe_arithmetic, installed_version

# A worker's own affair. Threads are compared as they came to be.
_FREE = (
    "train.threads_per_worker",
    "checkpoint.keep",
    *("comm.backend", "comm.hang_seconds", "comm.max_restarts", "comm.timeout_seconds", "comm.wait_seconds"),
    *("data.path", "data.prefetch_ghosts", "data.loader_threads", "data.loader_processes"),
    *("reference.", "log."),
)
# These decide about messages alone, so a run folder does not ask for them: they are told by their values.
_TOLD = (
    *("checkpoint.every_epochs", "checkpoint.every_steps", "comm.algorithm", "comm.bucket_mb", "comm.shared_memory"),
    *("train.audit_every_steps", "train.digest_every_steps", "train.evaluation_batch_size", "train.max_steps"),
)


def agreement_of(components: Components, grid: str | None, min_workers: int, max_workers: int) -> dict[str, str]:
    """What this worker has, by name; see `workers.roster.agreement_text`."""
    return {
        **_settings(components.config),
        "--grid": parse_grid(grid).text if grid else "automatic",
        "workers": f"{min_workers} to {max_workers or 'any number'}",
        "threads": str(torch.get_num_threads()),
        "training images": _set(components.train_source),
        "validation images": _set(components.val_source),
        "network": weights_digest(components.network.state_dict(), components.statistics.state_dict())[:8],
        "code": code_digest(),
        **{name: str(installed_version(name)) for name in ("megabatch", "numpy", "pillow", "torch")},
        **{name: str(value) for name, value in describe_arithmetic(on_cpu=True).items()},
    }


@cache
def code_digest() -> str:
    """A short digest of the package's own source files."""
    root, digest = Path(megabatch.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".c"):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def _settings(config: Config) -> dict[str, str]:
    """Settings by value where that tells more, else a short digest for each section."""
    told: dict[str, str] = {}
    sections: dict[str, list[tuple[str, object]]] = {}
    for name, value in flatten(config.model_dump(mode="json")):
        if name in _TOLD:
            told[name] = str(value)
        elif not name.startswith(_FREE):
            sections.setdefault(f"[{name.partition('.')[0]}]", []).append((name, value))
    digests = {name: json.dumps(sorted(values, key=lambda pair: pair[0])) for name, values in sections.items()}
    return told | {name: hashlib.sha256(text.encode()).hexdigest()[:8] for name, text in digests.items()}


def _set(source: Source) -> str:
    return f"{len(source):,} of {source.num_classes:,} classes, {digest_of_set(source)}"
