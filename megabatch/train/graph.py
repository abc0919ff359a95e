"""Passes of ghost batches as CUDA graphs: captured once for each kind of pass, then launched as one piece.

A pass launches hundreds of small kernels, and with few images a device is done with each before the host has launched
the next. A graph holds them all: forward, backward, the travel of gradients, batch-norm statistics, exact sums. All
that changes from pass to pass lies in memory of the device that the host fills before: images, labels, the weight of
the loss, shifts of exact sums, the loss scale. torch itself puts the seed of random numbers there before every launch.
The optimizer stays outside: it is some forty kernels, and its rates are numbers of the host.

The first steps run without graphs: libraries choose kernels, DDP arranges its buckets and measures itself in its first
ten passes, communicators come about. So do the first steps with passes of a new kind, when the batch or the images have
grown: what is done once, such as sending a list of numbers to the device, must not become part of a graph, which would
do it again, from memory that holds something else by then.

Everything runs on one stream that was made before DDP (`own_stream`), because autograd goes back to the stream on which
a parameter was first used, and a capture may not leave its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.errors import ConfigError, first_line

EAGER_STEPS = 12
EAGER_STEPS_OF_A_KIND = 3

Body = Callable[[Tensor, Tensor, Tensor], Tensor]


class PassKind(NamedTuple):
    """Passes of one kind launch the same kernels over the same memory."""

    images: torch.Size
    is_first: bool  # of the step: the others add to what it leaves
    is_sent: bool
    is_idle: bool


def kinds_of(num_passes: int, images: torch.Size, is_idle: bool) -> list[PassKind]:
    """The kinds of the passes of a rank in a step."""
    last = num_passes - 1
    return [PassKind(images, number == 0, number == last, is_idle) for number in range(num_passes)]


class Recorder(Protocol):
    """What records kernels and launches them again: a `torch.cuda.CUDAGraph`, or what a test puts in its place."""

    def capture(self, action: Callable[[], Tensor]) -> Tensor:
        """Do the action without computing anything; its kernels are recorded."""

    def replay(self) -> None:
        """Launch what was recorded."""


class CudaRecorder:
    """A CUDA graph; all share one pool of memory, for they are launched one after the other."""

    pool: Any = None

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, action: Callable[[], Tensor]) -> Tensor:
        if CudaRecorder.pool is None:
            CudaRecorder.pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.current_stream()
        # Other threads load images meanwhile: what they do is no part of the capture.
        with torch.cuda.graph(self._graph, CudaRecorder.pool, stream, capture_error_mode="thread_local"):
            return action()

    def replay(self) -> None:
        self._graph.replay()


@dataclass(frozen=True)
class _Captured:
    recorder: Recorder
    images: Tensor
    labels: Tensor
    weight: Tensor
    result: Tensor
    gradients: list[Tensor | None]  # what parameters hold after the pass


class PassGraphs:
    """The graphs of the passes over `parameters`."""

    def __init__(
        self, parameters: Sequence[Tensor], device: torch.device, recorder: Callable[[], Recorder] = CudaRecorder
    ) -> None:
        self._parameters, self._device, self._recorder = list(parameters), device, recorder
        self._captured: dict[PassKind, _Captured] = {}
        self._num_steps = 0
        self._eager_steps: Counter[PassKind] = Counter()

    def take_step(self, kinds: Sequence[PassKind], is_watched: bool = False) -> bool:
        """Whether the passes of a step that begins run as graphs: all or none, for they add to what the first one left.

        is_watched: something that is no part of a graph looks on.
        """
        self._num_steps += 1
        known = all(self._eager_steps[kind] >= EAGER_STEPS_OF_A_KIND for kind in kinds)
        if self._num_steps > EAGER_STEPS and known and not is_watched:
            return True
        self._eager_steps.update(set(kinds))
        return False

    def run(self, kind: PassKind, images: Tensor, labels: Tensor, weight: float, body: Body) -> Tensor:
        """What `body` returns for these images and labels on the device, and for the loss to count so much.

        The result is overwritten by the next pass of the same kind.
        """
        captured = self._captured.get(kind)
        if captured is None:
            captured = self._captured[kind] = self._capture(images, labels, body)
        captured.images.copy_(images, non_blocking=True)
        captured.labels.copy_(labels, non_blocking=True)
        captured.weight.fill_(weight)
        captured.recorder.replay()
        for parameter, gradient in zip(self._parameters, captured.gradients, strict=True):
            parameter.grad = gradient
        return captured.result

    def _capture(self, images: Tensor, labels: Tensor, body: Body) -> _Captured:
        images, labels = (torch.zeros_like(tensor, device=self._device) for tensor in (images, labels))
        weight = torch.zeros((), device=self._device)
        recorder = self._recorder()
        try:
            result = recorder.capture(lambda: body(images, labels, weight))
        except RuntimeError as error:
            raise ConfigError(
                f"train.cuda_graph: a pass of this model cannot be captured in a CUDA graph: {first_line(error)}; set "
                "train.cuda_graph=false"
            ) from error
        gradients = [parameter.grad for parameter in self._parameters]
        return _Captured(recorder, images, labels, weight, result, gradients)


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Within the block all work is queued on a stream that can be captured; the stream of before waits for it then."""
    before, own = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    own.wait_stream(before)
    with torch.cuda.stream(own):
        yield
    before.wait_stream(own)


def check_can_capture(device: torch.device, world_size: int) -> None:
    """Refuse graphs where there are none."""
    if device.type != "cuda":
        raise ConfigError(f"train.cuda_graph is for CUDA devices, this worker computes on {device.type}; leave it out")
    if world_size > 1 and dist.get_backend() == "gloo":
        raise ConfigError("train.cuda_graph needs NCCL between workers, this run speaks gloo; set comm.backend=nccl")
