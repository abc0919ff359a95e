"""Checkpoints: whole, checksummed, never the only copy while being replaced.

`checkpoints/step-00000120.pt` is a `torch.save` file that loads with `weights_only=True`; its SHA-256 stands beside it
in `step-00000120.pt.sha256`. The checksum is put in place first, then the data is renamed into place: a checkpoint
without its checksum, or with another content, was never finished and is passed over. `last` and `best` are links.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megabatch.errors import CheckpointError
from megabatch.files import link_atomically, write_atomically

__all__ = ["FORMAT", "check_fits", "decode", "link_best", "newest_whole", "read_checkpoint", "save_checkpoint"]

FORMAT = 3

State = dict[str, Any]


def save_checkpoint(folder: Path, state: State, step: int, keep: int, *, best: bool = False) -> Path:
    """Write the state after `step`, point `last` (and `best`) at it, drop all but the `keep` newest and the best."""
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **state}, buffer)
    data = buffer.getvalue()
    path = _path(folder, step)
    write_atomically(_checksum_path(path), hashlib.sha256(data).hexdigest() + "\n")
    write_atomically(path, data)
    link_atomically(folder / "last", path.name)
    if best:
        link_atomically(folder / "best", path.name)
    _drop_old(folder, keep, path)
    return path


def read_checkpoint(path: Path) -> State:
    """Load one checkpoint.

    Raises:
        CheckpointError: when it is missing, unfinished, damaged or of another format.
    """
    return decode(_read_whole(path), str(path))


def newest_whole(folder: Path, say: Callable[[str], None]) -> bytes | None:
    """The bytes of the newest checkpoint that is whole, or None when there is none; damaged ones are named by `say`."""
    paths = sorted(folder.glob("step-*.pt"), reverse=True)
    for path in paths:
        try:
            return _read_whole(path)
        except CheckpointError as error:
            say(str(error))
    if paths:
        raise CheckpointError(
            f"none of the {len(paths)} checkpoints in '{folder}' is whole; start a new run with another --output"
        )
    return None


def decode(data: bytes, where: str) -> State:
    """The state in the bytes of a checkpoint; nothing but tensors and plain values is ever unpickled."""
    try:
        state: State = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"the checkpoint in '{where}' is not one of megabatch's ({reason}); give another"
        ) from None
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"the checkpoint in '{where}' has format {state.get('format')}, this version reads {FORMAT}; "
            "resume it with the version that wrote it"
        )
    return state


def _read_whole(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        expected = _checksum_path(path.resolve()).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"checkpoint '{path}' cannot be read ({error}); passing over it") from None
    if hashlib.sha256(data).hexdigest() != expected:
        raise CheckpointError(f"checkpoint '{path}' is damaged (its SHA-256 is not the recorded one); passing over it")
    return data


def check_fits(state: State, model_state: dict[str, torch.Tensor], where: str) -> None:
    """Refuse a checkpoint of another model with one line instead of a page of key names."""
    saved = state["model"]
    for name in [*model_state, *saved]:
        ours, theirs = model_state.get(name), saved.get(name)
        if ours is None or theirs is None or ours.shape != theirs.shape:
            given = "nothing" if theirs is None else f"shape {tuple(theirs.shape)}"
            needed = "nothing" if ours is None else f"shape {tuple(ours.shape)}"
            raise CheckpointError(
                f"{where} holds another model: for '{name}' it has {given}, this model needs {needed}; "
                "resume with the recipe of that run, or choose another --output"
            )


def link_best(folder: Path, step: int) -> None:
    """Point `best` at the checkpoint of this step, if it is there: a kill may have come before the link was moved."""
    path = _path(folder, step)
    if path.is_file():
        link_atomically(folder / "best", path.name)


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.pt"


def _checksum_path(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _drop_old(folder: Path, keep: int, newest: Path) -> None:
    best = (folder / "best").resolve() if (folder / "best").exists() else None
    paths = sorted(folder.glob("step-*.pt"))
    # What is newer than the checkpoint just written was passed over as damaged when the run was resumed.
    current = [path for path in paths if path <= newest]
    for path in [*current[:-keep], *paths[len(current) :]]:
        if path.resolve() != best:
            path.unlink()
            _checksum_path(path).unlink(missing_ok=True)
    # What a killed writer left: parts, and checksums whose data never arrived.
    for part in folder.glob(".step-*.part"):
        part.unlink(missing_ok=True)
    for checksum in folder.glob("step-*.sha256"):
        if not checksum.with_suffix("").exists():
            checksum.unlink(missing_ok=True)
