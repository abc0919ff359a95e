"""Notes what a real CUDA device would make of the operations that pass by: waits, mixes of devices, kernels.

Tensors are fake, so nothing is computed; whoever reads one gets ones, and zeros of integers. A wait is a moment at
which the host can go on only when the device has done all that was queued before: reading a number, a copy that blocks
or whose host memory is not pinned, an event that is waited for, an operation whose shape depends on data. A kernel is
one operation that writes memory of the device; an operation over a list of tensors counts as often as torch launches
it.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PACKAGE = "megabatch"
aten = torch.ops.aten

_READS_SHAPE = {aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.equal}
_INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._unsafe_index, aten._unsafe_index_put}
_ONLY_MEMORY = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
_NOTHING = {
    aten.detach,
    aten.lift_fresh,
    aten.record_stream,
    aten.is_pinned,
    aten.set_,
    aten.resize_,
    aten.is_same_size,
}

# `multi_tensor_apply` of torch: at most so many tensors by lists of tensors, blocks a launch, and elements a block.
_MOST_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
_MOST_BLOCKS, _BLOCK = 320, 65536


class DeviceMixError(RuntimeError):
    """An operation that a real device refuses, or NCCL: some of its tensors lie elsewhere."""


@dataclass
class Notes:
    """What has been noted: how often, by kind and place in the package. What concerns graphs is kept over steps."""

    waits: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    lags: list[int] = field(default_factory=list)  # kernels that were queued behind an event when it was waited for
    captured: Counter[str] = field(default_factory=Counter)  # kernels that a graph holds
    forbidden: Counter[str] = field(default_factory=Counter)  # what a capture refuses, or a replay gets wrong

    @property
    def num_kernels(self) -> int:
        return sum(self.kernels.values())

    is_capturing: bool = False

    def wait(self, kind: str) -> None:
        (self.forbidden if self.is_capturing else self.waits)[f"{kind} {place()}"] += 1

    def forbid(self, kind: str) -> None:
        """Note what is harmless but for a graph."""
        if self.is_capturing:
            self.forbidden[f"{kind} {place()}"] += 1

    def launched(self, name: str, launches: int) -> None:
        (self.captured if self.is_capturing else self.kernels)[f"{name} {place()}"] += launches

    def clear(self) -> None:
        self.waits.clear()
        self.kernels.clear()
        self.lags.clear()


def place() -> str:
    """File and line of the innermost caller in the package; in a backward pass there may be none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        parts = Path(frame.f_code.co_filename).parts
        if PACKAGE in parts[:-1] and "tests" not in parts:
            inside = parts[len(parts) - 1 - parts[::-1].index(PACKAGE) + 1 :]
            return f"{'/'.join(inside)}:{frame.f_lineno}"
        frame = frame.f_back
    return "backward"


class Watch(TorchDispatchMode):
    """Enter it after a FakeTensorMode."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.notes = Notes()
        self._pinned: list[Tensor] = []  # held, so that no other memory gets the same address

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        op = func.overloadpacket
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if func.namespace == "c10d" and any(not tensor.is_cuda for tensor in given):
            raise DeviceMixError(f"{func} got tensors of the host at {place()}: NCCL refuses them")
        if op is aten._local_scalar_dense:
            return self._read(given[0])
        if op is aten._pin_memory:
            return self._pin(args[0].clone())
        if op is aten.is_pinned:
            return self._is_pinned(args[0])
        if wants_pinned := bool(kwargs.pop("pin_memory", False)):
            assert torch.device(kwargs.get("device") or "cpu").type == "cpu"
        if op in _READS_SHAPE and given[0].is_cuda:
            self.notes.wait("shape from data")
            if op is aten.equal:
                return True
        self._check_devices(func, given, args, kwargs)
        # It works in place and has no kernel for fake tensors.
        result: Any = None if op is aten._fused_sgd_ else func(*args, **kwargs)
        self._count(func, args, kwargs, result, given)
        return self._pin(result) if wants_pinned else result

    def _read(self, tensor: Tensor) -> float | int:
        if tensor.is_cuda:
            self.notes.wait("read")
        return 1.0 if tensor.is_floating_point() else 0

    def _pin(self, tensor: Tensor) -> Tensor:
        self._pinned.append(tensor)
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        address = tensor.untyped_storage()._cdata
        return any(pinned.untyped_storage()._cdata == address for pinned in self._pinned)

    def _check_devices(self, func: Any, given: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        op = func.overloadpacket
        if op in (aten.copy_, aten._to_copy):
            target = args[0].device if op is aten.copy_ else torch.device(kwargs.get("device") or args[0].device)
            source = args[1] if op is aten.copy_ else args[0]
            blocks = not (kwargs.get("non_blocking") or args[2:3] == (True,))
            if target.type != source.device.type:
                host = source if source.device.type == "cpu" else args[0] if op is aten.copy_ else None
                direction = f"copy {source.device.type} to {target.type}"
                self.notes.forbid(direction)  # the host's memory will hold something else by then
                if blocks:
                    self.notes.wait(direction)
                elif host is None or not self._is_pinned(host):
                    self.notes.wait(f"{direction}, not pinned")
            return
        elsewhere = [tensor for tensor in given if not tensor.is_cuda]
        if len(elsewhere) in (0, len(given)):
            return
        if op in _INDEXED and given[0].is_cuda:
            self.notes.wait("upload of an index")
        elif any(tensor.dim() for tensor in elsewhere) or torch.Tag.pointwise not in func.tags:
            # A pointwise kernel takes a number from the host along; others refuse it.
            raise DeviceMixError(f"{func} got tensors of cpu and cuda at {place()}")

    def _count(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, given: list[Tensor]
    ) -> None:
        op = func.overloadpacket
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not any(tensor.is_cuda for tensor in (*made, *given)) or func.is_view or op in _ONLY_MEMORY | _NOTHING:
            return
        if made and not any(tensor.numel() for tensor in made):
            return  # nothing is launched for no elements
        name = func.name().partition("::")[2].partition(".")[0]
        lists = [list(arg) for arg in args if isinstance(arg, list | tuple) and arg and isinstance(arg[0], Tensor)]
        if name.startswith(("_foreach_", "_amp_foreach", "_fused_")) and lists:
            launches = launches_of(name, lists)
        elif op is aten.convolution_backward:
            launches = sum(args[-1])  # of the input, of the weights, of the bias
        else:
            launches = 1
        self.notes.launched(name, launches)


def launches_of(name: str, lists: list[list[Tensor]]) -> int:
    """Kernels of an operation over lists of tensors: batched where torch can, else one by one."""
    alike = all(
        tensor.shape == first.shape and tensor.stride() == first.stride() and tensor.is_cuda
        for others in lists
        for first, tensor in zip(lists[0], others, strict=True)
    )
    if not alike:
        return len(lists[0])
    launches, tensors, blocks = 0, 0, 0
    # What has no result in place writes to one more list.
    depth = len(lists) + (name.startswith("_foreach_") and not name.endswith("_") and name != "_foreach_norm")
    for tensor in lists[0]:
        tensors += 1
        for _ in range(max(1, math.ceil(tensor.numel() / _BLOCK))):
            blocks += 1
            if blocks == _MOST_BLOCKS:
                launches, tensors, blocks = launches + 1, 1, 0
        if tensors == _MOST_TENSORS[depth]:
            launches, tensors, blocks = launches + 1, 0, 0
    launches += blocks > 0
    return launches + 1 if name == "_foreach_norm" else launches


class Event:
    """In the place of `torch.cuda.Event`: waiting for it is noted, with what has been queued behind it."""

    watch: Watch  # set by `fake_cuda`

    def __init__(self, enable_timing: bool = False, **_: object) -> None:
        self._timed, self._at = enable_timing, -1

    def record(self, _stream: object = None) -> None:
        self._at = _queued()

    def query(self) -> bool:
        Event.watch.notes.forbid("event queried")
        return True

    def wait(self, _stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        assert self._at >= 0, "an event was waited for that had not been recorded"
        Event.watch.notes.lags.append(_queued() - self._at)
        Event.watch.notes.wait("event")

    def elapsed_time(self, other: Event) -> float:
        Event.watch.notes.forbid("event read")
        assert self._timed
        assert other._timed
        return 1.0


class Stream:
    """In the place of `torch.cuda.Stream`: work that is queued without waiting for what it reads is noted."""

    watch: Watch  # set by `fake_cuda`
    present: Stream

    def __init__(self, _device: object = None, priority: int = 0) -> None:
        self._waits_for: Stream | None = None  # for all that was queued there until now

    def wait_stream(self, other: Stream) -> None:
        self._waits_for = other

    def synchronize(self) -> None:
        Stream.watch.notes.wait("stream")

    @contextmanager
    def entered(self) -> Iterator[None]:
        before = Stream.present
        if self is not before and self._waits_for is not before:
            Stream.watch.notes.wait("a stream entered that has not waited for the one of before,")
        Stream.present = self
        try:
            yield
        finally:
            Stream.present, self._waits_for = before, None


class Graph:
    """In the place of `torch.cuda.CUDAGraph`."""

    watch: Watch  # set by `fake_cuda`

    def replay(self) -> None:
        Graph.watch.notes.launched("graph", 1)


@contextmanager
def capture(_graph: Graph, *_: object, **__: object) -> Iterator[None]:
    """In the place of `torch.cuda.graph`: within the block nothing is launched, and some things are forbidden."""
    notes = Graph.watch.notes
    notes.is_capturing = True
    try:
        yield
    finally:
        notes.is_capturing = False


_cleared = 0


def _queued() -> int:
    return _cleared + Event.watch.notes.num_kernels


@contextmanager
def fresh_notes(watch: Watch) -> Iterator[Notes]:
    """Within the block notes begin from nothing; events remember what was queued before."""
    global _cleared
    _cleared += watch.notes.num_kernels
    watch.notes = Notes(captured=watch.notes.captured, forbidden=watch.notes.forbidden)
    yield watch.notes
