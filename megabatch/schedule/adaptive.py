"""Batch-size control by measurement: the global batch grows when the gradient's noise scale says it may.

McCandlish 2018, section 2.2: a batch far below the noise scale loses nothing by growing, a batch far above it wastes
images. The batch is multiplied by `growth` when the smoothed noise scale has been at least `threshold` times the
grown batch at `patience` measurements in a row, never before `from_epoch` (warm-up), never above
`max_global_batch_size`, and never down again. The comparison is made without dividing,
noise >= threshold * grown batch * signal: it is linear in two unbiased estimates, and holds where so little signal is
left that its estimate falls below zero.

Images are prepared ahead of the step that needs them, so a decision cannot take effect at once. The batch of step
i depends on measurements of the steps before i - `lead_steps` only: what lies within the lead is settled, and
may be prepared by any number of threads. Whoever asks for a later step waits until its measurements are in. Decisions
follow from numbers that are the same on every worker, and are stored as a list of changes by step number, so
that a resumed run makes the same steps.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from megabatch.schedule.noise import NoiseSample


@dataclass
class AdaptiveBatch:
    """Grows the batch of the steps numbered 0, 1, 2, ...; `observe` is called after each of them."""

    first_global_batch_size: int
    max_global_batch_size: int
    ghost_batch_size: int
    growth: float = 2.0
    threshold: float = 1.0
    patience: int = 10
    from_epoch: float = 0.0
    lead_steps: int = 8
    changes: list[tuple[int, int]] = field(default_factory=list)  # (number of the first step, global_batch_size)
    observed: int = 0
    in_favour: int = 0

    def __post_init__(self) -> None:
        self._condition = threading.Condition()
        self._closed = False

    @property
    def global_batch_size(self) -> int:
        """The newest decision, even if it has not taken effect yet."""
        return self.changes[-1][1] if self.changes else self.first_global_batch_size

    def at(self, number: int) -> int:
        """The global batch of a step: settled as soon as `number - lead_steps` steps have been observed."""
        return next((total for start, total in reversed(self.changes) if start <= number), self.first_global_batch_size)

    def wait_for(self, number: int) -> int:
        """Like `at`, after waiting until it is settled; 0 when `close` came first."""
        with self._condition:
            self._condition.wait_for(lambda: self._closed or self.observed >= number - self.lead_steps)
            return 0 if self._closed else self.at(number)

    def observe(self, epoch: float, average: NoiseSample | None) -> None:
        """Take in a step that ended at `epoch`; `average` is the smoothed one, None if it was not measured."""
        with self._condition:
            self.observed += 1
            if average is not None:
                self._decide(epoch, average)
            self._condition.notify_all()

    def _decide(self, epoch: float, average: NoiseSample) -> None:
        grown = self._grown()
        pending = bool(self.changes) and self.changes[-1][0] >= self.observed
        wanted = average.noise > 0.0 and average.noise >= self.threshold * grown * average.signal
        if pending or epoch < self.from_epoch or grown <= self.global_batch_size or not wanted:
            self.in_favour = 0
            return
        self.in_favour += 1
        if self.in_favour >= self.patience:
            self.in_favour = 0
            self.changes.append((self.observed + self.lead_steps, grown))

    def _grown(self) -> int:
        ghosts = round(min(self.global_batch_size * self.growth, self.max_global_batch_size) / self.ghost_batch_size)
        return min(
            ghosts * self.ghost_batch_size, self.max_global_batch_size // self.ghost_batch_size * self.ghost_batch_size
        )

    def reopen(self) -> None:
        """Let `wait_for` wait again after `close`."""
        with self._condition:
            self._closed = False

    def close(self) -> None:
        """Let nobody wait any longer."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: plain numbers."""
        changes = [[start, total] for start, total in self.changes]
        return {"changes": changes, "observed": self.observed, "in_favour": self.in_favour}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.changes = [(int(start), int(total)) for start, total in state["changes"]]
        self.observed, self.in_favour = state["observed"], state["in_favour"]
