"""A block in which torch, built for CPUs, believes in one CUDA device and in any number of ranks.

Fake tensors have shapes, devices and strides but no memory, so what reads memory in C++ is replaced: DDP's comparison
of parameters between ranks, its rebuilding of buckets, its logger. Buckets are those that DDP would have rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import distributed as ddp_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from megabatch.comm import grid as grid_module
from megabatch.comm import hook as hook_module
from megabatch.comm.grid import Layout
from megabatch.comm.shape import GridShape
from tests.accelerator.watch import Event, Graph, Stream, Watch, capture

CUDA = torch.device("cuda", 0)
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20


@contextmanager
def fake_cuda(world_size: int = 1) -> Iterator[Watch]:
    """Within the block "cuda" is a device, and this process is rank 0 of `world_size`, four to a host."""
    watch = Watch()
    with ExitStack() as stack:
        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        stack.enter_context(_patched(watch))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))  # arrays of numpy are real
        stack.enter_context(watch)
        yield watch


@contextmanager
def _patched(watch: Watch) -> Iterator[None]:
    new_future, assign = torch.futures.Future.__init__, _compute_bucket_assignment_by_size
    Event.watch = Graph.watch = Stream.watch = watch
    Stream.present = Stream()

    def future_without_devices(self: Any, *, devices: object = None) -> None:
        new_future(self)

    def buckets(tensors: Any, _limits: object, *rest: Any) -> Any:
        return assign(tensors, [FIRST_BUCKET, BUCKET], *rest)

    def layout(_store: object, _rank: int, world_size: int, wanted: GridShape | None, *_: object) -> Layout:
        assert wanted is not None
        return Layout(wanted, tuple(f"host{rank // 4}" for rank in range(world_size)))

    def to_list(tensor: Tensor) -> Any:
        if tensor.is_cuda:
            watch.notes.wait("read")
        numbers: Any = 1.0 if tensor.is_floating_point() else 0
        for size in reversed(tensor.shape):
            numbers = [numbers] * size
        return numbers

    with (
        patch.multiple(
            torch.cuda,
            is_available=lambda: True,
            is_initialized=lambda: False,
            current_device=lambda: 0,
            device_count=lambda: 1,
            set_device=lambda _: None,
            manual_seed=lambda _: watch.notes.forbid("seed of the host"),
            CUDAGraph=Graph,
            graph=capture,
            graph_pool_handle=lambda: (0, 0),
            set_stream=lambda _: None,
            is_bf16_supported=lambda *_: True,
            get_device_capability=lambda *_: (9, 0),
            Stream=Stream,
            Event=Event,
            stream=Stream.entered,
            current_stream=lambda *_: Stream.present,
            synchronize=lambda *_: watch.notes.wait("synchronize"),
        ),
        patch.object(FakeTensorMode, "avoid_device_init", True),
        patch.object(FakeTensor, "tolist", to_list),
        patch.object(nn.Module, "_apply", replace_tensors),
        patch.object(torch.futures.Future, "__init__", future_without_devices),
        patch.object(ddp_module, "_verify_param_shape_across_processes", lambda *_, **__: None),
        patch.object(default_hooks, "_allreduce_fut", allreduce_future),
        patch.object(dist, "_compute_bucket_assignment_by_size", buckets),
        patch.object(grid_module, "check_grid_consistency", layout),
        patch.object(hook_module, "check_consistency", lambda *_, **__: None),
    ):
        yield


def allreduce_future(group: dist.ProcessGroup | None, tensor: Tensor) -> torch.futures.Future[Tensor]:
    """What torch's own hook does; futures of a fake process group hold nothing."""
    group = group or dist.group.WORLD
    tensor.div_(dist.get_world_size(group))
    dist.all_reduce(tensor, group=group)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future


def replace_tensors(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """As `Module._apply`, with new tensors: those that are there cannot change their device when they are fake."""
    for one in module.modules():
        for name, parameter in one._parameters.items():
            if parameter is not None:
                one._parameters[name] = nn.Parameter(change(parameter.detach()), parameter.requires_grad)
        for name, buffer in one._buffers.items():
            if buffer is not None:
                one._buffers[name] = change(buffer)
    return module


class SteadyReducer:
    """DDP's reducer, without the rebuilding of buckets."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def steady(ddp: torch.nn.parallel.DistributedDataParallel) -> None:
    """Let a DDP that was built in the block work with fake tensors."""
    ddp.reducer = SteadyReducer(ddp.reducer)  # type: ignore[assignment]
    ddp.logger = MagicMock(name="logger")
