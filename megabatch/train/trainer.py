"""The trainer: a run on one rank, from an opened world to a finished model.

`Trainer.run`, `_run_phase` and `_train_steps` are the training loop, top to bottom. All ranks walk through it alike;
only the main rank writes files and prints. A phase is a value (`phases.py`), a step is a function (`step.py`), and the
run's state is written by `state.py` alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from megabatch.comm.shape import GridShape
from megabatch.config import Config
from megabatch.data.augment import Augmentation
from megabatch.data.loader import GhostLoader
from megabatch.errors import MegabatchError, TrainingError
from megabatch.files import write_atomically, write_json
from megabatch.optim.build import schedule_optimizer
from megabatch.schedule.clock import Clock
from megabatch.schedule.control import BatchControl
from megabatch.train.branch import TrainingState, branch
from megabatch.train.components import Feeds, build_components, image_size_at, largest_image_size
from megabatch.train.describe import derived_lines, describe_environment, describe_gradients
from megabatch.train.ensemble import weights_bytes, write_member
from megabatch.train.evaluate import Evaluation, evaluate, measure_statistics
from megabatch.train.metrics import Recorder, Stopwatch, gather_ranks, row_of, summary_of, write_page
from megabatch.train.phases import TrainingPhase, control_of, phases_of, planned_samples, resolved, start_clock
from megabatch.train.progress import Progress
from megabatch.train.run_dir import changes_on_resume, hold
from megabatch.train.state import RunState, restore, save
from megabatch.train.step import train_step, warm_up_pass
from megabatch.train.stop import StopRequest
from megabatch.train.world import World, raise_everywhere

__all__ = ["Ending", "Trainer"]


class Ending(Enum):
    """How a phase came to its end."""

    OVER = "over"  # the next phase can begin
    LIMIT = "limit"  # train.max_steps
    STOPPED = "stopped"  # a signal


class Trainer:
    """Trains to the end of the recipe, to `train.max_steps` or to a stop signal.

    plan: the text of the plan the run follows, saved with it.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        device: torch.device,
        folder: Path,
        grid: GridShape,
        stop: StopRequest,
        *,
        resume: bool = False,
        plan: str = "",
    ) -> None:
        self.config, self.world, self.device, self.folder = config, world, device, folder
        self.grid, self.stop, self.resume, self.plan = grid, stop, resume, plan
        self.progress = Progress(is_main=world.is_main)
        self.parts = build_components(config, world, grid, device)
        self.feeds = Feeds(config, world, folder, self.parts.train_source, self.parts.val_source)
        self.watch = Stopwatch(host_clock_tells=device.type == "cpu")
        num_images = len(self.parts.train_source)
        self.phases = phases_of(config)
        self.state = RunState(start_clock(config, self.phases[0], num_images))
        self.planned_samples = planned_samples(config, num_images)
        self.recorder: Recorder | None = None  # on the main rank
        self.trunk_state: TrainingState | None = None  # what the branch that is going on returns to
        self._evaluation: Evaluation | None = None  # of the weights as they are now
        self._published = False  # whether the network has the batch-norm statistics that belong to them
        self._result: Evaluation | None = None  # of the model that the run leaves behind
        self._weights = b""  # of that model, on the main rank
        self._began = 0.0

    def run(self) -> dict[str, Any]:
        """Train, and return the summary of the run."""
        with ExitStack() as stack:
            environment = self._open(stack)
            warm_up_pass(self.parts)
            stack.enter_context(self.progress.showing(self._overall(), self.planned_samples))
            self._began = time.perf_counter() - self.state.wall_seconds

            for phase in self.phases[self.state.phase :]:
                ending = self._run_phase(phase)
                if ending != Ending.OVER:
                    break

            stopped_by = (self.stop.signal_name or "a signal to another rank") if ending == Ending.STOPPED else ""
            summary = summary_of(self.state, self.config, self.world.size, self._result, stopped_by)
            summary["broken_images"] = self.feeds.total_broken(self.device)
            ranks = gather_ranks(self.watch, environment["hosts"])
            if self.recorder is not None:
                if self._weights:
                    write_atomically(self.folder / "model.safetensors", self._weights)
                write_json(self.folder / "ranks.json", ranks)
                write_json(self.folder / "summary.json", summary)
                self.recorder.end(summary)
        if self.world.is_main:
            write_page(self.folder, self.progress.say)
        return summary

    def _run_phase(self, planned: TrainingPhase) -> Ending:
        """Train a phase; a branch leaves its member behind, the last phase the model of the run."""
        with self._entered(planned) as phase:
            ending = self._train_steps(phase)
            if ending == Ending.OVER and phase.is_branch:
                self._finish_member(phase)
            if ending != Ending.OVER or phase.number == len(self.phases) - 1:
                self._finish_model(phase, ending)
        return ending

    def _train_steps(self, phase: TrainingPhase) -> Ending:
        """Make the steps that are left of a phase: step, evaluate, log, checkpoint."""
        config, parts, state = self.config, self.parts, self.state
        control = control_of(config, phase, state.clock, self.world.rank, self.world.size, parts.adaptive)
        # The control closes before the loader, whose thread may wait for it.
        with closing(self._loader(phase, control)) as loader, closing(control):
            for step, ghosts in loader:
                scheduled = schedule_optimizer(
                    parts.optimizer, phase.optimizer, step.epoch, step=step, past_epochs=state.past_epochs
                )
                result = train_step(
                    parts,
                    step,
                    ghosts,
                    phase.seed,
                    self.watch,
                    stop_wanted=self.stop.wanted,
                    measure_noise=not phase.is_branch,
                )
                before = state.clock
                state.count_step(step, result.step_seconds, result.applied)
                self._weights_changed()
                if parts.adaptive and not phase.is_branch:
                    parts.adaptive.observe(state.clock.epoch, result.noise)

                is_best = False
                evaluate_now = step.is_last or state.clock.crosses(before, config.train.evaluate_every_epochs)
                if evaluate_now and not result.stop_wanted:
                    is_best = state.count_evaluation(self._evaluate(phase).top1)

                state.note_wall_seconds(time.perf_counter() - self._began)
                row = row_of(state, phase.name, scheduled, result, self._evaluation)
                self.progress.show(self._overall(), row)
                if self.recorder is not None:
                    self.recorder.append(row)
                self._refuse_to_diverge(scheduled["lr"])

                save_now = result.stop_wanted or step.is_last or is_best or self._checkpoint_is_due(before)
                # A run whose gradients are not finite may be lost: its last good checkpoints must not make way for it.
                # The best weights so far are good ones, and `best` must not name a file that is not there.
                if save_now and (result.applied or result.stop_wanted or is_best):
                    self._save(phase, is_best)
                if result.stop_wanted:
                    return Ending.STOPPED
        return Ending.OVER if control.is_over(state.clock.samples) else Ending.LIMIT

    def _open(self, stack: ExitStack) -> dict[str, Any]:
        """Take the run folder, say what will be done, and restore the newest checkpoint of a run that is resumed."""
        parts, say = self.parts, self.progress.say
        environment = describe_environment(self.world, self.grid, self.device)
        problem: MegabatchError | None = None
        if self.world.is_main:
            source = parts.train_source
            environment |= describe_gradients(parts.network, source.channels, self.config.data.image_size)
            try:
                self._take_folder(stack, environment)
            except MegabatchError as error:
                problem = error
        raise_everywhere(problem)
        lines = derived_lines(self.config, self.state.clock, self.world.size, self.grid, parts.network)
        for line in [*lines, *parts.choices]:
            say(line)
        metrics_bytes = 0
        if self.resume:
            metrics_bytes, self.trunk_state = restore(parts, self.state, self.folder, say)
        if self.world.is_main:
            recorder = Recorder(self.folder, metrics_bytes, self.state.clock.steps, self.config, say)
            self.recorder = stack.enter_context(closing(recorder))
        return environment

    def _take_folder(self, stack: ExitStack, environment: dict[str, Any]) -> None:
        for line in changes_on_resume(self.folder, self.config) if self.resume else []:
            self.progress.say(line)
        stack.enter_context(hold(self.folder, self.config, self.resume))
        write_json(self.folder / "environment.json", environment)
        if self.plan:
            write_atomically(self.folder / "plan.json", self.plan)

    @contextmanager
    def _entered(self, phase: TrainingPhase) -> Iterator[TrainingPhase]:
        """Begin a phase, or continue the one that `restore` found; after a branch the trunk is as it was before."""
        parts, state = self.parts, self.state
        is_new = state.enter_phase(phase.number)
        if not phase.is_branch:
            if is_new and phase.reset_momentum:
                parts.optimizer.state.clear()
            yield phase
            return
        with branch(
            parts.network,
            parts.optimizer,
            parts.statistics,
            parts.scaler,
            reset_momentum=phase.reset_momentum,
            trunk=self.trunk_state,
        ) as trunk_state:
            self.trunk_state = trunk_state
            if state.trunk_clock is None:
                state.leave_trunk(start_clock(self.config, phase, len(parts.train_source), state.clock.steps))
            assert state.trunk_clock is not None
            measured = parts.adaptive.at(parts.adaptive.observed) if parts.adaptive else None
            yield resolved(phase, self.config, state.trunk_clock, measured)
        self.trunk_state = None
        self._weights_changed()

    def _finish_member(self, phase: TrainingPhase) -> None:
        """Write the member that a branch has become."""
        found = self._evaluation or self._evaluate(phase)  # there is none when a run is resumed at this very point
        state = self.state
        assert state.trunk_clock is not None
        # Only the main rank writes the list of members down; the others need just its length.
        file = write_member(self.folder, phase.member, self.parts.network) if self.world.is_main else ""
        state.return_to_trunk(
            {
                "member": phase.member,
                "from_epoch": state.trunk_clock.epoch,
                "epochs": state.clock.epoch,
                "top1": found.top1,
                "top5": found.top5,
                "val_loss": found.loss,
                "file": file,
            }
        )

    def _finish_model(self, phase: TrainingPhase, ending: Ending) -> None:
        """Take what the run leaves behind: the last collapsed member, or the network as it is; nothing when stopped."""
        if ending == Ending.STOPPED:
            return
        if ending == Ending.OVER and self.state.members:
            member = self.state.members[-1]
            self._result = Evaluation(member["top1"], member["top5"], member["val_loss"], len(self.parts.val_source))
            self._weights = (self.folder / member["file"]).read_bytes() if self.world.is_main else b""
            return
        # There is no evaluation when nothing was left to train: a finished run was resumed.
        self._result = self._evaluation or self._evaluate(phase)
        self._weights = weights_bytes(self.parts.network) if self.world.is_main else b""

    def _loader(self, phase: TrainingPhase, control: BatchControl) -> GhostLoader:
        config, size_at, past_epochs = self.config, image_size_at(self.config), self.state.past_epochs
        return GhostLoader(
            self.parts.train_source,
            Augmentation(**phase.augment.model_dump()),
            lambda epoch: size_at(past_epochs + epoch),  # a branch does not go back to the small images of the start
            phase.seed,
            iter(control),
            rank=self.world.rank,
            world_size=self.world.size,
            prefetch_ghosts=config.data.prefetch_ghosts,
            pin_for=self.device if self.device.type == "cuda" else None,
            feeding=self.feeds.train,
            largest_image_size=largest_image_size(config),
        )

    def _evaluate(self, phase: TrainingPhase) -> Evaluation:
        """Exact accuracy of the weights as they are now; every rank must call it."""
        parts, config = self.parts, self.config
        self._publish(phase)
        [self._evaluation] = evaluate(
            [parts.network],
            parts.val_source,
            config.data.image_size,
            parts.normalise,
            parts.autocast,
            config.train.evaluation_batch_size,
            self.device,
            self.feeds.val,
        )
        if not phase.is_branch:
            self.state.note_trunk_top1(self._evaluation.top1)
        return self._evaluation

    def _publish(self, phase: TrainingPhase) -> None:
        """Give the network the batch-norm statistics it is to be evaluated and saved with; every rank must call it."""
        if self._published:
            return
        parts = self.parts
        parts.statistics.publish()
        if num_ghosts := self.config.norm.exact_batches:
            with parts.autocast():
                measure_statistics(
                    parts.network,
                    self.config,
                    parts.train_source,
                    parts.normalise,
                    num_ghosts=num_ghosts,
                    augment=phase.augment,
                    seed=phase.seed,
                    start_samples=self.state.clock.samples,
                )
        self._published = True

    def _weights_changed(self) -> None:
        """Forget what was found out about the weights before."""
        self._evaluation, self._published = None, False

    def _save(self, phase: TrainingPhase, is_best: bool) -> None:
        """Write a checkpoint; every rank must call it."""
        self._publish(phase)
        metrics_bytes = self.recorder.num_bytes if self.recorder else 0
        save(self.parts, self.state, self.trunk_state, self.folder, metrics_bytes, is_best)

    def _checkpoint_is_due(self, before: Clock) -> bool:
        settings, clock = self.config.checkpoint, self.state.clock
        by_steps = bool(settings.every_steps) and clock.steps % settings.every_steps == 0
        return by_steps or clock.crosses(before, settings.every_epochs)

    def _refuse_to_diverge(self, lr: float) -> None:
        state, limit = self.state, self.config.train.max_skipped_steps
        if state.skipped_in_a_row > limit:
            raise TrainingError(
                f"{state.skipped_in_a_row} steps in a row had gradients that are not finite (the last at step "
                f"{state.clock.steps}, epoch {state.epoch:.3f}, lr {lr:g}; at most {limit} are skipped); "
                "lower optimizer.lr or lengthen its warm-up, then --resume"
            )

    def _overall(self) -> Clock:
        """Images of all phases together, as a clock."""
        return replace(self.state.clock, total_samples=self.planned_samples, samples=self.state.seen_samples)
