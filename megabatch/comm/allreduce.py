"""All-reduce of any contiguous float or int32 tensor over a process grid, by any algorithm of `phases`.

    reducer = AllReducer(ProcessGrid.build("2x4"), algorithm="torus", average=True)
    reducer.run(tensor)

Every element of the result is computed by one rank and copied to the others (`exchange`: computed by all in
the same order), so all ranks agree bit for bit, and a repetition gives the same bits. Against another
algorithm the result may differ in rounding, because the order of summation differs.

Lengths need not divide by anything: on Gloo chunks differ by one element; the backend's own collectives scatter
equal chunks, so there a length that does not divide passes through a padded buffer that is cached for the next call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megabatch.comm.channel import Channel, Passage, TaskThreads, Turn
from megabatch.comm.failures import report_lost_peer
from megabatch.comm.grid import ProcessGrid
from megabatch.comm.p2p import PeerLostError, cached_tag, message_tag
from megabatch.comm.phases import (
    MAX_TORUS_CHANNELS,
    Division,
    divisions,
    equal_parts,
    num_channels,
    phases,
    staggered,
    torus_form,
)
from megabatch.comm.price import DEFAULT_SEGMENT_BYTES, UNCUT_BYTES
from megabatch.comm.primitives import split
from megabatch.comm.shared_memory import serves
from megabatch.errors import ConfigError

CACHED_BYTES = 256 * 1024
"""Shorter messages pass through a cached buffer whose receives are posted before the next call begins."""

_MAX_CACHED = 16
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HALVES = (torch.float16, torch.bfloat16)


class AllReducer:
    """Runs one algorithm on a grid again and again, with cached buffers. Used by one thread at a time.

    average: divide by the number of ranks (see `divisions` for where).
    grad_dtype: send float16 or bfloat16 instead of the tensor's own type. The tensor is rounded to it once,
        sums are rounded as `primitives` says, and the result is widened again: every rank holds equal values.
    segment_bytes: larger chunks travel in pieces of about this size, so a hop begins before the last ends.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        algorithm: str = "torus",
        *,
        average: bool = False,
        grad_dtype: torch.dtype | None = None,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
    ) -> None:
        if segment_bytes < 1:
            raise ConfigError(f"segment of {segment_bytes} bytes; give at least 1, or leave it at the default")
        if grad_dtype not in (None, *_FLOATS):
            raise ConfigError(f"grad_dtype {grad_dtype}; choose float16, bfloat16 or none for the tensor's own")
        self.grid = grid
        self.algorithm = algorithm
        self.algorithms = frozenset([algorithm])  # as `AutoReducer` tells which of them it uses
        self.explanation: list[str] = []
        self.phases = phases(algorithm, grid.shape)
        self.average = average
        self.grad_dtype = grad_dtype
        self._segment_bytes = segment_bytes
        self._channels: dict[tuple[object, ...], list[Channel]] = {}
        self._cached: dict[tuple[int, torch.dtype], _Cached] = {}
        self._threads: TaskThreads | None = None
        self._staging: torch.Tensor | None = None
        self._separate_links = grid.separate_links
        self._on_gloo = grid.on_gloo(phase.axis for phase in self.phases)
        if num_channels(self.phases) > 1 and not self._on_gloo:
            raise ConfigError(
                f"{algorithm} keeps all axes busy at once, but this backend's collectives follow one another; "
                "choose torus, auto or backend"
            )
        most = MAX_TORUS_CHANNELS if self._separate_links else 1
        self._lanes = grid.memory.claim(max(most, num_channels(self.phases)))

    def run(self, tensor: torch.Tensor, *, task: str = "all-reduce", call: int | None = None) -> None:
        """Sum or average `tensor` over the grid in place.

        task names the work in error messages ("bucket 3"). call is `grid.next_call()` taken when the work was
        queued; all ranks must take their calls in the same order.

        Raises:
            CommunicationError: a rank died, did not answer in time, or reduces something else.
            ConfigError: a tensor that cannot be reduced in place.
        """
        flat = _checked(tensor, may_be_integers=not self.average)
        self.grid.check_usable()
        call = self.grid.next_call() if call is None else call
        if not flat.numel() or not self.phases:
            return
        own_primitives = self._on_gloo and flat.device.type == "cpu"
        cached = self._cached_for(flat, call, task) if own_primitives else None
        message = cached.message if cached else self._message(flat, own_primitives)
        channels = cached.channels if cached else self._channels_for(message, own_primitives)
        if message is not flat:
            _fill(message, flat, channels)
        jobs: list[Callable[[], None]] = []
        if cached:
            jobs += [partial(passage.run, divide_first=False) for passage in cached.passages]
        else:
            tag = message_tag(call, self._kind(flat, message.dtype))
            turn: Turn | None = None
            for channel, part in zip(channels, split(message, len(channels)), strict=True):
                turn = Turn(turn) if channel.segment_bytes == UNCUT_BYTES else None
                jobs.append(partial(channel.run, part, tag, divide_first=message is flat, turn=turn))
        explained = [partial(self._explained, job, call, task, flat) for job in jobs]
        if own_primitives:
            self._run_together(explained)
        else:
            for job in explained:
                job()
        if message is not flat:
            flat.copy_(message[: flat.numel()])
        if cached:
            self._post_ahead(cached)

    def close(self) -> None:
        """End the threads and release the buffers and links; a second call does nothing."""
        if self._threads is not None:
            self._threads.stop(self.grid.timeout_seconds)
        self._threads = self._staging = None
        self.grid.memory.release(self._lanes)
        self._lanes = []
        self._channels.clear()
        self._cached.clear()

    def _explained(self, job: Callable[[], None], call: int, task: str, tensor: torch.Tensor) -> None:
        """Run a job; when it breaks, give the grid up and say who is missing."""
        try:
            job()
        except PeerLostError as lost:
            raise report_lost_peer(
                self.grid, lost, task=task, phase=lost.phase, call=call, message=message_text(tensor)
            ) from lost

    def _kind(self, flat: torch.Tensor, dtype: torch.dtype) -> str:
        return f"{flat.numel()} {dtype} {self.algorithm}"

    def _cached_for(self, flat: torch.Tensor, call: int, task: str) -> _Cached | None:
        """The cached passage for messages like this, made on their first call; None for those that are not cached.

        All ranks make and use them in the same order of calls, so they decide alike.
        """
        dtype = self.grad_dtype or flat.dtype
        key = (flat.numel(), dtype)
        if key in self._cached:
            return self._cached[key]
        if (
            flat.numel() * dtype.itemsize > CACHED_BYTES
            or len(self._cached) >= _MAX_CACHED
            or self.algorithm == "backend"
        ):
            return None
        tag = cached_tag(call, self._kind(flat, dtype))
        if not self.grid.claim_tag(tag):  # its owner may still have receives posted
            return None
        message = torch.empty(flat.numel(), dtype=dtype)
        channels = self._new_channels(message, True)
        parts = zip(channels, split(message, len(channels)), strict=True)
        cached = self._cached[key] = _Cached(
            key, message, channels, [Passage(channel, part, tag) for channel, part in parts]
        )
        self._explained(cached.post, call, task, flat)
        return cached

    def _post_ahead(self, cached: _Cached) -> None:
        """Post the receives of the next call. A peer that is gone is the next call's trouble, if there is one."""
        try:
            cached.post()
        except PeerLostError:
            del self._cached[cached.key]

    def _run_together(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Run the first channel here, the others beside it; one that fails hangs up and frees the rest."""
        if len(jobs) > 1 and (self._threads is None or self._threads.count < len(jobs) - 1):
            if self._threads is not None:
                self._threads.stop(0)
            self._threads = TaskThreads("megabatch-channel", len(jobs) - 1)
        others = [self._threads.submit(job) for job in jobs[1:]] if self._threads else []
        jobs[0]()
        for other in others:
            other.result()

    def _message(self, flat: torch.Tensor, own_primitives: bool) -> torch.Tensor:
        """The tensor itself, or a cached buffer of `grad_dtype`, padded where chunks must be equal."""
        dtype = self.grad_dtype or flat.dtype
        numel = flat.numel()
        if not own_primitives:
            parts = equal_parts(self.phases)
            numel = -(-numel // parts) * parts
        if dtype == flat.dtype and numel == flat.numel():
            return flat
        buffer = self._staging
        if buffer is None or buffer.numel() < numel or buffer.dtype != dtype or buffer.device != flat.device:
            buffer = self._staging = torch.empty(numel, dtype=dtype, device=flat.device)
        return buffer[:numel]

    def _channels_for(self, message: torch.Tensor, own_primitives: bool) -> list[Channel]:
        form = torus_form(message.nbytes, separate_links=self._separate_links) if own_primitives else ()
        key = (message.dtype, own_primitives, form)
        if key not in self._channels:
            self._channels[key] = self._new_channels(message, own_primitives)
        return self._channels[key]

    def _new_channels(self, message: torch.Tensor, own_primitives: bool) -> list[Channel]:
        phase_list = self.phases
        if own_primitives:
            phase_list = phases(self.algorithm, self.grid.shape, message.nbytes, separate_links=self._separate_links)
        # Staggered channels fill each other's gaps; smaller pieces would only be more messages.
        segment_bytes = UNCUT_BYTES if staggered(phase_list) else self._segment_bytes
        divided: Sequence[Division] = [Division()] * len(phase_list)
        if self.average:
            divided = divisions(phase_list, half_precision=message.dtype in _HALVES)
        lanes = self._lanes if own_primitives and self._lanes and serves(message.dtype) else None
        channels: list[Channel] = []
        first = 0
        for number in range(num_channels(phase_list)):
            chosen = [pair for pair in zip(phase_list, divided, strict=True) if pair[0].channel == number]
            channel = Channel(
                self.grid,
                chosen,
                segment_bytes,
                own_primitives=own_primitives,
                first_action=first,
                lane=lanes[number] if lanes else None,
            )
            channels.append(channel)
            first = channel.end_action
        return channels


@dataclass(frozen=True, slots=True)
class _Cached:
    """Messages of one length and type: the buffer they pass through, and their way through each channel."""

    key: tuple[int, torch.dtype]
    message: torch.Tensor
    channels: list[Channel]
    passages: list[Passage]

    def post(self) -> None:
        for passage in self.passages:
            passage.post()


def message_text(tensor: torch.Tensor) -> str:
    """What is reduced, for people: "1000 float32"."""
    return f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"


def _checked(tensor: torch.Tensor, may_be_integers: bool) -> torch.Tensor:
    """The tensor as one dimension sharing its memory."""
    if tensor.dtype not in _FLOATS and not (may_be_integers and tensor.dtype == torch.int32):
        raise ConfigError(
            f"a tensor of {tensor.dtype} cannot be {'summed' if may_be_integers else 'averaged'}; "
            f"give float16, bfloat16, float32 or float64{' or int32' if may_be_integers else ''}"
        )
    if not tensor.is_contiguous():
        raise ConfigError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous, "
            "and the sum is made in place; reduce tensor.contiguous() and copy it back"
        )
    return tensor.detach().view(-1)


def _fill(message: torch.Tensor, flat: torch.Tensor, channels: Sequence[Channel]) -> None:
    """Copy into the buffer, dividing before rounding to `grad_dtype`: what is too large may fit after."""
    message[flat.numel() :].zero_()
    for channel, part in zip(channels, split(message, len(channels)), strict=True):
        start = part.storage_offset() - message.storage_offset()
        source = flat[start : start + part.numel()]
        filled = part[: source.numel()]
        if channel.first_divisor == 1:
            filled.copy_(source)
        else:
            torch.div(source, channel.first_divisor, out=filled)
