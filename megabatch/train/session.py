"""What the phases of a run share, and what happens when one begins or ends."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megabatch.data.loader import GhostLoader
from megabatch.schedule.clock import Clock
from megabatch.schedule.phases import Phase
from megabatch.train.build import Workbench
from megabatch.train.evaluate import Evaluation, evaluate
from megabatch.train.feed import Feeds, image_size_at, largest_image_size
from megabatch.train.members import write_member
from megabatch.train.progress import Progress
from megabatch.train.recorder import Recorder
from megabatch.train.segment import Segment, branch_clock, segment_of
from megabatch.train.snapshot import RunState, TrainingState, capture, load_training_state, save
from megabatch.train.statistics import publish
from megabatch.train.stop import StopRequest

__all__ = ["Session"]


@dataclass
class Session:
    """One run on one worker, from its first phase to its last."""

    bench: Workbench
    run: RunState
    folder: Path
    planned_samples: int  # of all phases together
    progress: Progress
    stop: StopRequest
    recorder: Recorder | None  # on the main rank
    trunk: TrainingState | None  # what the branch that is going on returns to
    began: float = 0.0
    evaluation: Evaluation | None = None  # of the weights as they are now
    published: bool = False  # whether the network has the batch-norm statistics that belong to them

    @cached_property
    def feeds(self) -> Feeds:
        """How images are prepared; broken ones are counted over all phases."""
        bench = self.bench
        return Feeds(bench.config, bench.world, self.folder, bench.train_source, bench.val_source)

    @property
    def overall(self) -> Clock:
        """Images of all phases together, as a clock."""
        return replace(self.run.clock, total_samples=self.planned_samples, samples=self.run.seen_samples)

    def enter(self, phase: Phase) -> Segment:
        """Begin a phase, or find back into it after `restore`."""
        run, bench = self.run, self.bench
        is_new = phase.number != run.phase
        run.phase = phase.number
        if phase.is_branch and run.trunk is None:
            run.trunk, self.trunk = run.clock, capture(bench)
            run.clock = branch_clock(bench.config, run.trunk)
        if is_new and phase.reset_momentum:
            bench.optimizer.state.clear()
        return segment_of(bench.config, phase, run.trunk or run.clock, bench.adaptive)

    def leave(self, segment: Segment) -> None:
        """End a phase that is over: a branch leaves its member behind and the trunk is as it was before."""
        run, bench, phase = self.run, self.bench, segment.phase
        if not phase.is_branch:
            return
        found = self.evaluation or self.evaluate(segment)  # there is none when a run is resumed at this very point
        assert run.trunk is not None
        assert self.trunk is not None
        # Only the main rank's list is ever written down; the others keep theirs for its length.
        member: dict[str, Any] = {
            "member": phase.member,
            "from_epoch": run.trunk.epoch,
            "epochs": run.clock.epoch,
            "top1": found.top1,
            "top5": found.top5,
            "val_loss": found.loss,
        }
        member["file"] = write_member(self.folder, phase.member, bench.network) if bench.world.is_main else ""
        run.members = [*(one for one in run.members if one["member"] != phase.member), member]
        load_training_state(bench, self.trunk)
        run.clock = replace(run.trunk, steps=run.clock.steps)
        run.trunk, self.trunk, run.skipped_in_a_row = None, None, 0
        self.weights_changed()

    def loader(self, segment: Segment) -> GhostLoader:
        bench, config = self.bench, self.bench.config
        size_at, past_epochs = image_size_at(config), self.run.epoch - self.run.clock.epoch
        return GhostLoader(
            bench.train_source,
            segment.augmentation,
            lambda epoch: size_at(past_epochs + epoch),  # a branch does not go back to the small images of the start
            segment.seed,
            segment.steps(config, self.run.clock),
            rank=bench.world.rank,
            world_size=bench.world.size,
            prefetch_ghosts=config.data.prefetch_ghosts,
            pin_for=bench.device if bench.device.type == "cuda" else None,
            feeding=self.feeds.train,
            largest_image_size=largest_image_size(config),
        )

    def evaluate(self, segment: Segment) -> Evaluation:
        """Exact accuracy of the weights as they are now; every worker must call it."""
        bench, config = self.bench, self.bench.config
        self._publish(segment)
        self.evaluation = evaluate(
            bench.network,
            bench.val_source,
            config.data.image_size,
            bench.normalise,
            bench.autocast,
            config.train.evaluation_batch_size,
            bench.device,
            self.feeds.val,
        )
        if not segment.phase.is_branch:
            self.run.trunk_top1 = self.evaluation.top1
        return self.evaluation

    def save(self, segment: Segment, is_best: bool) -> None:
        """Write a checkpoint; every worker must call it."""
        self._publish(segment)
        metrics_bytes = self.recorder.num_bytes if self.recorder else 0
        save(self.bench, self.run, self.trunk, self.folder, metrics_bytes, is_best)

    def weights_changed(self) -> None:
        """Forget what was found out about the weights before."""
        self.evaluation, self.published = None, False

    def _publish(self, segment: Segment) -> None:
        if not self.published:
            publish(self.bench, segment, self.run.clock)
            self.published = True

    def tick(self) -> None:
        """Bring the wall clock up to date."""
        self.run.wall_seconds = time.perf_counter() - self.began
