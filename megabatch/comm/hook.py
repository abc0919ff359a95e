"""The DDP hook: gradient buckets are averaged over the grid while backward continues.

    state, hook = gradient_hook(grid, algorithm="torus")
    ddp.register_comm_hook(state, hook)

Why two ranks can never get out of step. DDP builds the same buckets on every rank and hands bucket i to the hook only
after bucket i-1, whatever the order in which gradients become ready. The hook runs in one thread per rank and gives
each bucket the next call number of the grid, so a call number means the same bucket everywhere. On Gloo the number is
part of a long message's tag; a cached buffer for short ones has a tag of its own, and buckets take the reducers in
turn, so its messages match in order. Messages of different buckets cannot be mistaken for one another, however the
phases of several buckets overlap. Nor can ranks wait in a circle: worker threads take buckets oldest first, so the
oldest unfinished bucket is in work on every rank that has reached it, and nothing it waits for is younger than
itself. On CUDA there are no threads: phases are enqueued on one stream in the order of the calls.

Averages by the number of ranks, as plain DDP does. `no_sync`, bucket rebuilding and `find_unused_parameters` are DDP's
own affair: the hook sees only buckets to reduce. A bucket of a kind not seen before is first checked to be the same on
all ranks.

`ExposedTimeHook` wraps a hook to tell how long a worker waits for gradients after its own backward pass is done: the
exposed part of communication. DDP sends a bucket as soon as its gradients are ready, while backward goes on. The last
bucket is ready when this worker's computation ends; what backward takes beyond that moment is communication that
nothing hides.
"""

# No `from __future__ import annotations` here: DDP checks that a hook's annotations are classes, not strings.
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from megabatch.comm.allreduce import message_text
from megabatch.comm.calibration import Calibration
from megabatch.comm.channel import TaskThreads
from megabatch.comm.exact import ExactSums, Pieces
from megabatch.comm.failures import check_consistency
from megabatch.comm.grid import ProcessGrid, Reducer
from megabatch.comm.interpreter_exit import hold_default_group
from megabatch.comm.select import make_reducer
from megabatch.errors import CommunicationError, ConfigError

__all__ = ["ExposedTimeHook", "GradientHook", "gradient_hook"]

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


def gradient_hook(
    grid: ProcessGrid,
    algorithm: str = "torus",
    *,
    grad_dtype: torch.dtype | None = None,
    buckets_in_flight: int = 2,
    calibration: Calibration | str | Path | None = None,
    exact: bool | ExactSums = False,
    say: Callable[[str], None] | None = print,
) -> tuple["GradientHook", Hook]:
    """State and hook for `DistributedDataParallel.register_comm_hook`; every rank must make the same.

    algorithm: one of `phases`, or "auto": raced for each size of message, here and now (see `select`).
    calibration: for "auto", measurements or their file instead of measuring the network again.
    grad_dtype: float16 or bfloat16 on the wire. buckets_in_flight: buckets reduced at the same time on Gloo, so that
    the row phase of one overlaps the column phase of another; the backend's own all-reduce takes one at a time.
    exact: sum in integers, so that bits do not depend on the number of ranks; needs a few more lines, see `exact`. An
    `ExactSums` that is there goes on.
    say: is told on the main rank what "auto" has chosen and why; None to be told nothing.
    """
    if exact and grad_dtype not in (None, torch.float32):
        raise ConfigError(f"exact sums travel as int32, grad_dtype {grad_dtype} was given too; give one of the two")
    hold_default_group()
    make = partial(make_reducer, grid, algorithm, average=not exact, grad_dtype=grad_dtype, calibration=calibration)
    sums = exact if isinstance(exact, ExactSums) else ExactSums() if exact else None
    state = GradientHook(grid, make, buckets_in_flight, sums)
    if say is not None and grid.rank == 0:
        for line in state.explanation:
            say(line)
    return state, reduce_bucket


def reduce_bucket(state: "GradientHook", bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average one bucket over the grid of `state`: the function DDP calls."""
    pieces = None
    if state.exact is not None:
        state.exact.send()
        pieces = Pieces(bucket.parameters(), [gradient.view(-1) for gradient in bucket.gradients()])
    try:
        return state.reduce_buffer(bucket.buffer(), bucket.index(), last=bucket.is_last(), pieces=pieces)
    except CommunicationError as error:
        # Raised here it would leave DDP in the middle of a pass, unable to begin another one.
        failed: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        _set_failure(failed, error)
        return failed


class GradientHook:
    """Averages buckets in the background; makes its threads with the first bucket and ends them with `close`.

    make: builds a reducer, one for each bucket in flight. explanation: for "auto", one line per size of message saying
    what was chosen and why. A hook is a context manager: leaving it closes it. The grid stays its caller's.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        make: Callable[[], Reducer],
        buckets_in_flight: int,
        exact: ExactSums | None = None,
    ) -> None:
        if buckets_in_flight < 1:
            raise ConfigError(f"{buckets_in_flight} buckets in flight; at least 1 is needed, 2 is the default")
        self.grid = grid
        self.exact = exact
        first = make()
        self.algorithm = first.algorithm
        # The backend matches collectives by the order in which a rank issues them: one thread keeps it.
        self._count = 1 if "backend" in first.algorithms else buckets_in_flight
        self.explanation = first.explanation
        self._reducers = [first, *(make() for _ in range(self._count - 1))]
        self._done: list[threading.Event | None] = [None] * self._count
        self._num_buckets = 0
        self._threads: TaskThreads | None = None
        self._stream: Any = None
        self._checked: set[str] = set()
        self._closed = False

    def __enter__(self) -> "GradientHook":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reduce_buffer(
        self, buffer: torch.Tensor, index: int, *, last: bool = False, pieces: Pieces | None = None
    ) -> torch.futures.Future[torch.Tensor]:
        """Queue the buffer of bucket `index`; the future holds it once averaged, or raises `CommunicationError`.

        pieces: what lies in the buffer, for exact sums.
        """
        if self._closed:
            raise CommunicationError(f"bucket {index} comes after the hook was closed; make another hook for it")
        call = self.grid.next_call()
        kind = f"{index} {message_text(buffer)} {self.algorithm} {last}"
        is_new = kind not in self._checked
        self._checked.add(kind)
        # Buckets take the reducers in turn, so that each sees the same messages in the same order on every rank, as
        # receives posted ahead need. A bucket waits for an older one alone, which ends in bounded time.
        turn = self._num_buckets % self._count
        self._num_buckets += 1
        done = threading.Event()
        before, self._done[turn] = self._done[turn], done

        def work() -> None:
            task = f"bucket {index}"
            try:
                if is_new:
                    check_consistency(
                        self.grid,
                        call=call,
                        task=task,
                        message=message_text(buffer),
                        digest_of=kind,
                        device=buffer.device,
                    )
                if before is not None:
                    before.wait()
                if self.exact is None or pieces is None:
                    self._reducers[turn].run(buffer, task=task, call=call)
                else:
                    self.exact.to_integers(pieces)
                    self._reducers[turn].run(buffer.view(torch.int32), task=task, call=call)
                    self.exact.to_floats(pieces)
            finally:
                done.set()

        if buffer.device.type == "cpu":
            return self._in_thread(work, buffer)
        return self._on_stream(work, buffer, buffer.device)

    def close(self) -> None:
        """End the threads after what is queued and release the buffers; a second call does nothing.

        DDP holds its hook for ever, but a closed one refuses further buckets and holds nothing.
        """
        self._closed = True
        if self._threads is not None:
            self._threads.stop(self.grid.timeout_seconds)
        for reducer in self._reducers:
            reducer.close()
        self._threads = self._stream = None
        self._reducers.clear()
        self._done.clear()

    def _in_thread(self, work: Callable[[], None], buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        if self._threads is None:
            self._threads = TaskThreads("megabatch-bucket", self._count)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

        def job() -> None:
            try:
                work()
            except Exception as error:
                _set_failure(future, error)
            else:
                future.set_result(buffer)

        self._threads.submit(job)
        return future

    def _on_stream(
        self, work: Callable[[], None], buffer: torch.Tensor, device: torch.device
    ) -> torch.futures.Future[torch.Tensor]:
        """Enqueue behind the gradients on a stream of our own; the future makes its reader's stream wait."""
        if self._stream is None:
            # Urgent: a reduced bucket is waited for by all ranks, the kernels of backward by this one alone.
            self._stream = torch.cuda.Stream(device, priority=-1)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[device])
        with torch.cuda.stream(self._stream):
            work()
            future.set_result(buffer)
        return future


class ExposedTimeHook:
    """Wraps a gradient hook (the backend's averaging all-reduce by default); register its method `hook` with DDP."""

    def __init__(self, device: torch.device, hook: Hook = allreduce_hook, state: Any = None) -> None:
        self._hook = hook
        self._state = state
        self.is_captured = False  # in a graph, where no event can be read: exposed seconds are NaN
        self._on_cuda = device.type == "cuda"
        self._last_bucket_at = 0.0  # by the host's clock
        self._exposed_seconds = 0.0
        self._last_bucket_event: torch.cuda.Event | None = None
        self._end_event: torch.cuda.Event | None = None

    def use(self, hook: Hook, state: Any) -> None:
        """Send buckets by another hook from now on; DDP itself takes one hook for ever."""
        self._hook, self._state = hook, state

    def hook(self, _state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.is_last() and not self.is_captured:
            if self._on_cuda:
                self._last_bucket_event = torch.cuda.Event(enable_timing=True)
                self._last_bucket_event.record()
            else:
                self._last_bucket_at = time.perf_counter()
        return self._hook(self._state, bucket)

    def backward_ended(self) -> None:
        """Call right after the backward pass that synchronised."""
        if self.is_captured:
            self._exposed_seconds, self._last_bucket_event = math.nan, None
        elif self._on_cuda:
            # DDP has made the current stream wait for the reduced buckets, so this event stands behind them.
            self._end_event = torch.cuda.Event(enable_timing=True)
            self._end_event.record()
        else:
            self._exposed_seconds = time.perf_counter() - self._last_bucket_at

    def reader(self) -> Callable[[], float]:
        """What gives the exposed seconds of the last synchronised backward pass, later, without a wait.

        On CUDA it may be called when the device is known to have passed the end of that backward pass.
        """
        if self.is_captured:
            return lambda: math.nan
        begin, end, seconds = self._last_bucket_event, self._end_event, self._exposed_seconds
        if begin is None or end is None:
            return lambda: seconds
        return lambda: float(begin.elapsed_time(end)) / 1000.0


class _Failure:
    """What the future of a failed bucket holds.

    DDP reads the future in C++, finds no tensor, and asks for `str` of what it found to build a message of its own.
    Raising there makes backward raise our error instead of "Unable to cast ... to Tensor" around it.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __str__(self) -> NoReturn:
        raise self._error


def _set_failure(future: torch.futures.Future[Any], error: Exception) -> None:
    """Complete the future so that reading it raises `error`, in Python as well as inside DDP."""

    def raise_error(_: object) -> NoReturn:
        raise error

    future._set_unwrap_func(raise_error)
    future.set_result(_Failure(error))
