"""How long a worker waits for gradients after its own backward pass is done: the exposed part of communication.

DDP sends a bucket as soon as its gradients are ready, while backward goes on. The last bucket is ready when this
worker's computation ends; what backward takes beyond that moment is communication that nothing hides.
"""

# No `from __future__ import annotations` here: DDP checks that a hook's annotations are classes, not strings.
import time
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

__all__ = ["ExposedTimeHook"]

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


class ExposedTimeHook:
    """Wraps a gradient hook (the backend's averaging all-reduce by default); register its method `hook` with DDP."""

    def __init__(self, device: torch.device, hook: Hook = allreduce_hook, state: Any = None) -> None:
        self._hook = hook
        self._state = state
        self._on_cuda = device.type == "cuda"
        self._last_bucket_seconds = 0.0
        self._last_bucket_event: torch.cuda.Event | None = None
        self._end_event: torch.cuda.Event | None = None

    def hook(self, _state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.is_last():
            if self._on_cuda:
                self._last_bucket_event = torch.cuda.Event(enable_timing=True)
                self._last_bucket_event.record()
            else:
                self._last_bucket_seconds = time.perf_counter()
        return self._hook(self._state, bucket)

    def backward_ended(self) -> None:
        """Call right after the backward pass that synchronised."""
        if self._on_cuda:
            # DDP has made the current stream wait for the reduced buckets, so this event stands behind them.
            self._end_event = torch.cuda.Event(enable_timing=True)
            self._end_event.record()
        else:
            self._last_bucket_seconds = time.perf_counter() - self._last_bucket_seconds

    def seconds(self) -> float:
        """Exposed communication of the last synchronised backward pass; on CUDA this waits for the device."""
        if not self._on_cuda:
            return self._last_bucket_seconds
        if self._last_bucket_event is None or self._end_event is None:
            return 0.0
        self._end_event.synchronize()
        return float(self._last_bucket_event.elapsed_time(self._end_event)) / 1000.0
