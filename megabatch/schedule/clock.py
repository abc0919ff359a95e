"""The one clock of a run: samples seen, shown as a fractional epoch.

Every scheduled value is a pure function of it. Steps are only counted for the logs, because batch-size control
changes how many of them make an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Clock:
    """How far a run is."""

    samples_per_epoch: int
    total_samples: int
    samples: int = 0
    steps: int = 0

    @property
    def epoch(self) -> float:
        return self.samples / self.samples_per_epoch

    @property
    def total_epochs(self) -> float:
        return self.total_samples / self.samples_per_epoch

    def after(self, num_samples: int) -> Clock:
        """The clock once one more step of `num_samples` images is made."""
        return replace(self, samples=self.samples + num_samples, steps=self.steps + 1)

    def crosses(self, earlier: Clock, every_epochs: float) -> bool:
        """Whether a multiple of `every_epochs` was reached between `earlier` and now; never when it is 0."""
        if every_epochs <= 0:
            return False
        # The tiny shift keeps 3 * 0.1 from counting as short of 0.3.
        return int(self.epoch / every_epochs + 1e-9) > int(earlier.epoch / every_epochs + 1e-9)
