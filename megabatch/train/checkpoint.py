"""Checkpoints: whole, checksummed, never the only copy while being replaced.

`checkpoints/step-00000120.pt` is a `torch.save` file that loads with `weights_only=True`; its SHA-256 stands beside it
in `step-00000120.pt.sha256`. The checksum is put in place first, then the data is renamed into place: a checkpoint
without its checksum, or with another content, was never finished and is passed over. `last` and `best` are links.

`CheckpointWriter` writes in the background, so that no step waits for a disk.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch

from megabatch.errors import CheckpointError, first_line
from megabatch.files import link_atomically, open_regular, read_text, write_atomically

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
    # A newer one was passed over as damaged when the run was resumed. If it is whole, this rank was the main one until
    # it hung, comes too late, and must leave alone what the main rank of today writes.
    newer = [other for other in sorted(folder.glob("step-*.pt")) if other > path]
    damaged = [other for other in newer if not _is_whole(other)]
    if newer == damaged:
        link_atomically(folder / "last", path.name)
        if best:
            link_atomically(folder / "best", path.name)
    _drop(folder, damaged, path, keep)
    return path


class CheckpointWriter:
    """Writes checkpoints in a thread, one at a time and in order; leaving it waits until all are on disk.

    At most one is being written. Of those that wait, a newer one replaces the older ones; only the best so far stays,
    until a better one comes. So a slow disk costs checkpoints, not steps, and at most three copies are in memory.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: list[tuple[Future[object], bool]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown(wait=True)
        if kind is None:  # else the error that ends the run is the one to tell
            self.check()

    def submit(self, write: Callable[[], object], *, best: bool) -> None:
        """Call `write` in the background; `best` says that the checkpoint is that of the best weights so far."""
        self.check()
        for waiting, is_best in self._pending:
            if best or not is_best:
                waiting.cancel()  # does nothing to the one that is being written
        self._pending = [one for one in self._pending if not one[0].done()]
        self._pending.append((self._pool.submit(write), best))

    def check(self) -> None:
        """Raise what has gone wrong since the last call."""
        for done in [done for done, _ in self._pending if done.done() and not done.cancelled()]:
            done.result()

    def forget(self) -> None:
        """Drop what waits, and do not ask how the one ends that is being written: another rank writes from now on."""
        for waiting, _ in self._pending:
            waiting.cancel()
        self._pending = []

    def flush(self) -> None:
        """Wait until everything is on disk."""
        wait([waiting for waiting, _ in self._pending])
        self.check()


def newest_whole(folder: Path, say: Callable[[str], None]) -> bytes | None:
    """The bytes of the newest checkpoint that is whole, or None when there is none; damaged ones are named by `say`."""
    paths = sorted(folder.glob("step-*.pt"), reverse=True)
    for path in paths:
        try:
            return read_whole(path)
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
        state: Any = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch have no error in common
        raise CheckpointError(
            f"the checkpoint in '{where}' is not one of megabatch's ({first_line(error)}); give another"
        ) from None
    if not isinstance(state, dict):
        raise CheckpointError(
            f"the checkpoint in '{where}' is not one of megabatch's (it holds {type(state).__name__}); give another"
        )
    found = state.get("format")
    if not isinstance(found, int) or found != FORMAT:
        raise CheckpointError(
            f"the checkpoint in '{where}' has format {found}, this version reads {FORMAT}; "
            "resume it with the version that wrote it"
        )
    return state


@contextmanager
def refusing_damage(where: str) -> Iterator[None]:
    """A part of a checkpoint that is missing or of another kind than it was written becomes one line."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"the checkpoint in '{where}' lacks a part or has a damaged one ({first_line(error)}); give another"
        ) from None


def read_whole(path: Path) -> bytes:
    """The bytes of one checkpoint.

    Raises:
        CheckpointError: when it is missing, unfinished or damaged.
    """
    try:
        real = Path(os.path.realpath(path))  # `resolve` fails in a circle of links
        expected = read_text(_checksum_path(real)).strip()
        with open_regular(path) as file:
            # Only what is whole is held in memory; what is no file of torch's is not even summed.
            if file.peek(2)[:2] == b"PK" and hashlib.file_digest(file, "sha256").hexdigest() == expected:
                file.seek(0)
                return file.read()
    except (OSError, ValueError) as error:  # ValueError: a link to the root has no name to put .sha256 behind
        raise CheckpointError(f"checkpoint '{path}' cannot be read ({error}); passing over it") from None
    raise CheckpointError(f"checkpoint '{path}' is damaged (its SHA-256 is not the recorded one); passing over it")


def check_fits(
    state: State,
    model_state: dict[str, torch.Tensor],
    where: str,
    advice: str = "resume with the recipe of that run, or choose another --output",
) -> None:
    """Refuse a checkpoint of another model with one line instead of a page of key names."""
    saved = state["model"]
    for name in [*model_state, *saved]:
        ours, theirs = model_state.get(name), saved.get(name)
        if not isinstance(theirs, torch.Tensor):
            theirs = None
        if ours is None or theirs is None or ours.shape != theirs.shape:
            given = "nothing" if theirs is None else f"shape {tuple(theirs.shape)}"
            needed = "nothing" if ours is None else f"shape {tuple(ours.shape)}"
            raise CheckpointError(
                f"{where} holds another model: for '{name}' it has {given}, this model needs {needed}; {advice}"
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


def _is_whole(path: Path) -> bool:
    try:
        read_whole(path)
    except CheckpointError:
        return False
    return True


def _drop(folder: Path, damaged: list[Path], written: Path, keep: int) -> None:
    """Remove the damaged ones, all up to `written` but the `keep` newest, and what killed writers left."""
    best = (folder / "best").resolve() if (folder / "best").exists() else None
    older = [path for path in sorted(folder.glob("step-*.pt")) if path <= written]
    for path in [*older[:-keep], *damaged]:
        if path.resolve() != best:
            path.unlink(missing_ok=True)
            _checksum_path(path).unlink(missing_ok=True)
    for part in folder.glob(".step-*.part"):
        if part.name[1:] < f"{written.name}~":
            part.unlink(missing_ok=True)
    for checksum in folder.glob("step-*.sha256"):
        data = checksum.with_suffix("")
        if data < written and not data.exists():
            checksum.unlink(missing_ok=True)
