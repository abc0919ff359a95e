"""The trainer: a run on one rank, from an opened world to a finished model.

`Trainer.run`, `_run_phase` and `_train_steps` are the training loop, top to bottom. All ranks walk through it alike;
only the main rank writes files and prints. A phase is a value (`phases.py`), a step is a function (`step.py`), and the
run's state is written by `state.py` alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megabatch.comm.messages import gather
from megabatch.comm.shape import GridShape
from megabatch.config import Config
from megabatch.files import write_atomically, write_json
from megabatch.machine import host_name
from megabatch.model.weights import weights_bytes
from megabatch.optim.build import schedule_optimizer
from megabatch.optim.groups import clear_state
from megabatch.report.run import ENVIRONMENT_FILE, PLAN_FILE, RANKS_FILE, SUMMARY_FILE
from megabatch.schedule.batch import Step
from megabatch.schedule.clock import Clock
from megabatch.train.audit import weights_digest
from megabatch.train.branch import copied
from megabatch.train.card import card_of, write_model
from megabatch.train.components import build_components
from megabatch.train.describe import (
    derived_lines,
    describe_data,
    describe_environment,
    describe_gradients,
    image_line,
)
from megabatch.train.elastic import ElasticRun, FixedWorkers, Start
from megabatch.train.evaluate import Evaluation, Evaluator
from megabatch.train.feed import Feeds
from megabatch.train.metrics import Stopwatch, gather_ranks, row_of, summary_of, write_page
from megabatch.train.passes import warm_up_pass
from megabatch.train.phases import (
    Ending,
    TrainingPhase,
    audit_is_due,
    checkpoint_is_due,
    control_of,
    digest_is_due,
    evaluation_is_due,
    phases_of,
    planned_samples,
    resolved,
    start_clock,
    weights_are_needed,
)
from megabatch.train.progress import Progress
from megabatch.train.run_dir import changes_on_resume, hold, member_file, write_member
from megabatch.train.run_writer import RunWriter
from megabatch.train.state import MadeStep, Member, RunEnd, RunState, restore
from megabatch.train.step import StartedStep, StepResult, start_step
from megabatch.workers.stop import StopRequest
from megabatch.workers.world import World, on_main_rank

Started = tuple[Step, dict[str, float], StartedStep]  # with what was scheduled for it


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
        elastic: ElasticRun | None = None,
    ) -> None:
        self.config, self.folder, self.stop, self.resume, self.plan = config, folder, stop, resume, plan
        self.workers = elastic or FixedWorkers(world.rank)
        self.components = build_components(config, world, grid, device, is_elastic=elastic is not None)
        self.progress = Progress(lambda: self.world.is_main)
        sources = self.components.train_source, self.components.val_source
        self.feeds = Feeds(config, world.local_size, folder / f"broken.{self.workers.name}.jsonl", *sources)
        self.evaluator = Evaluator(self.components, self.feeds.val)
        self.watch = Stopwatch(host_clock_tells=device.type == "cpu")
        num_images = len(self.components.train_source)
        self.phases = phases_of(config)
        self.state = RunState(start_clock(config, self.phases[0], num_images))
        self.planned_samples = planned_samples(config, num_images)
        self.writer = RunWriter(folder, self.components, self.state, self.progress.say)
        self._began = 0.0
        warm_up_pass(self.components)

    @property
    def world(self) -> World:
        """The workers that take part now."""
        return self.components.world

    def run(self) -> dict[str, Any]:
        """Train, and return the summary of the run."""
        with ExitStack() as stack:
            stack.enter_context(self.components)
            start = self.workers.begin(self, stack, resume=self.resume)
            if start != Start.JOINED:
                self._open(stack, resume=start == Start.RESUMED)
            stack.enter_context(self.writer)
            stack.enter_context(self.progress.showing(self._overall(), self.planned_samples))
            self._began = time.perf_counter() - self.state.wall_seconds

            number = self.state.phase
            while self.state.outcome is None:
                self._run_phase(self.phases[number])
                number = self.state.phase if self.state.has_left(number) else number + 1

            summary = self.workers.together(self._conclude)
        if self.world.is_main:
            write_page(self.folder, self.progress.say)
        return summary

    def _run_phase(self, planned: TrainingPhase) -> None:
        """Train a phase; a branch leaves its member behind, the last phase the model of the run."""
        with self._entered(planned) as phase:
            while (ending := self.workers.together(lambda: self._train_steps(phase))) == Ending.RESTART:
                pass
            if ending == Ending.OVER and phase.is_branch:
                self.workers.together(lambda: self._finish_member(phase))
        # A run that ends inside a branch leaves the trunk behind.
        if ending != Ending.OVER or planned.number == len(self.phases) - 1:
            self.workers.together(lambda: self._finish_model(planned, ending))

    def _train_steps(self, phase: TrainingPhase) -> Ending:
        """Make the steps that are left of a phase, as long as the same ranks take part."""
        config, components, state = self.config, self.components, self.state
        if state.has_left(phase.number):
            return Ending.OVER
        if state.made is not None:  # with others than those who are there now
            self._finish_step(phase, state.made)
        if state.stop_wanted:  # as a rank that was further has shared
            return Ending.STOPPED
        control = control_of(config, phase, state.clock, self.world.rank, self.world.size, components.adaptive)
        loader = self.feeds.open_loader(phase, control, state.past_epochs, components.device)
        steps: deque[Started] = deque()  # not yet read
        # The control closes before the loader, whose thread may wait for it.
        with closing(loader), closing(control):
            for step, ghosts in loader:
                if audit_is_due(config, step) and (ending := self._read_results(phase, steps, but=0)):
                    return ending  # an audit looks at the step before the device has taken it
                scheduled = schedule_optimizer(
                    components.optimizer, phase.optimizer, step.epoch, step=step, past_epochs=state.past_epochs
                )
                votes = self.workers.votes(self.stop)
                started = start_step(
                    components, step, ghosts, phase.seed, self.watch, votes, measure_noise=not phase.is_branch
                )
                if started is None:
                    return Ending.RESTART
                steps.append((step, scheduled, started))
                # Where the device decides, a step is read when the next one has been started, so that nobody waits.
                reads_late = components.decides_on_device and not weights_are_needed(config, state.clock, step)
                if ending := self._read_results(phase, steps, but=int(reads_late)):
                    return ending
        return Ending.OVER if control.is_over(state.clock.samples) else Ending.LIMIT

    def _read_results(self, phase: TrainingPhase, steps: deque[Started], but: int) -> Ending | None:
        """Read the results of steps, oldest first, but of the newest ones; how the phase ends when it does."""
        while len(steps) > but:
            step, scheduled, started = steps.popleft()
            result = started.result()
            if result is None:  # nor have those that were started since left a trace
                for _, _, later in steps:
                    later.drop()
                return Ending.RESTART
            if ending := self._count_step(phase, step, scheduled, result, is_newest=not steps):
                return ending
        return None

    def _count_step(
        self, phase: TrainingPhase, step: Step, scheduled: dict[str, float], result: StepResult, *, is_newest: bool
    ) -> Ending | None:
        """Count a step that has been made, and finish it; how the phase ends when it does."""
        state, adaptive = self.state, self.components.adaptive
        stop_now = result.stop_wanted and is_newest  # else after the step that has been started: it says so too
        made = MadeStep(
            before=state.clock,
            scheduled=scheduled,
            columns=result.columns,
            applied=result.applied,
            step_seconds=result.step_seconds,
            is_last=step.is_last,
            stop_wanted=stop_now,
        )
        state.count_step(made, step.num_samples)
        if adaptive and not phase.is_branch:
            adaptive.observe(state.clock.epoch, result.noise_average)
        self.evaluator.weights_changed()
        self._finish_step(phase, made)
        if stop_now:
            return Ending.STOPPED
        return Ending.RESTART if self.workers.have_changed(result.ask_wanted) else None

    def _finish_step(self, phase: TrainingPhase, made: MadeStep) -> None:
        """Evaluate, log and save after a step that counts already; every rank must call it."""
        config, state = self.config, self.state
        is_best = False
        evaluate_now = made.is_last or evaluation_is_due(config, made.before, state.clock)
        if evaluate_now and not made.stop_wanted:
            is_best = state.count_evaluation(self._evaluate(phase).top1)

        save_now = made.stop_wanted or made.is_last or is_best or checkpoint_is_due(config, made.before, state.clock)
        state.note_wall_seconds(time.perf_counter() - self._began)
        row = row_of(state, phase.name, made.scheduled, made.columns, self.evaluator.found)
        if (save_now or digest_is_due(config, state.clock)) and (self.world.is_main or self.components.is_elastic):
            weights, statistics = self.components.network.state_dict(), self.components.statistics.state_dict()
            row["weights_digest"] = weights_digest(weights, statistics)
        self.progress.show(self._overall(), row)
        self.writer.append(row)
        state.refuse_to_diverge(config.train.max_skipped_steps, made.scheduled["lr"])

        # A run whose gradients are not finite may be lost: its last good checkpoints must not make way for it.
        # The best weights so far are good ones, and `best` must not name a file that is not there.
        if save_now and (made.applied or made.stop_wanted or is_best):
            self.evaluator.publish(phase, self.state.clock.samples)
            self.writer.save()
        state.finish_step()

    def _open(self, stack: ExitStack, *, resume: bool) -> None:
        """Take the run folder, say what will be done, and restore a run that is resumed; every rank must call it."""
        config, components, say = self.config, self.components, self.progress.say
        environment = describe_environment(self.world, components.shape, components.device)
        on_main_rank(self.world.is_main, lambda: self._take_folder(stack, environment, resume))
        lines = derived_lines(config, self.state.clock, self.world.size, components.shape, components.network)
        lines = [image_line(config, components.train_source, components.val_source), *lines]
        for line in [*lines, *components.notes, *(components.hook.explanation if components.hook else [])]:
            say(line)
        metrics_bytes = restore(components, self.state, self.folder, say) if resume else 0
        if self.world.is_main:
            self.writer.open(stack, metrics_bytes)

    def _take_folder(self, stack: ExitStack, environment: dict[str, Any], resume: bool) -> None:
        """Hold the run folder, on the main rank, and write down there what is trained, and where."""
        config, components = self.config, self.components
        channels, image_size = components.train_source.channels, config.data.image_size
        environment = environment | describe_gradients(components.network, channels, image_size)
        environment["data"] = describe_data(components.train_source, components.val_source)
        for line in changes_on_resume(self.folder, config, environment) if resume else []:
            self.progress.say(line)
        stack.enter_context(hold(self.folder, config, resume))
        write_json(self.folder / ENVIRONMENT_FILE, environment)
        if self.plan:
            write_atomically(self.folder / PLAN_FILE, self.plan)

    def _conclude(self) -> dict[str, Any]:
        """Write what the run leaves behind, and return its summary; every rank must call it."""
        self.writer.flush()
        assert self.state.outcome is not None
        ending, result = self.state.outcome.ending, self.state.outcome.result
        phase, is_member = self.phases[self.state.phase], ending == Ending.OVER and bool(self.state.members)
        with self.workers.concluding():
            if ending != Ending.STOPPED and not is_member:
                self.evaluator.publish(phase, self.state.clock.samples)  # others may have been met since the evaluation
            stopped_by = (self.stop.signal_name or "a signal to another rank") if ending == Ending.STOPPED else ""
            summary = summary_of(self.state, self.config, self.world.size, result, stopped_by)
            summary["broken_images"] = self.feeds.total_broken(self.components.device)
            ranks = gather_ranks(self.watch, gather(host_name(), str))
            if self.world.is_main:
                if ending != Ending.STOPPED:
                    self._write_model(result, is_member=is_member)
                write_json(self.folder / RANKS_FILE, ranks)
                write_json(self.folder / SUMMARY_FILE, summary)
                self.writer.end(summary)
        return summary

    def _write_model(self, result: Evaluation | None, *, is_member: bool) -> None:
        """Write the model of the run: the network, or the last member of its ensemble."""
        weights = self.folder / self.state.members[-1].file if is_member else self.components.model
        write_model(self.folder, weights, card_of(self.config, self.components.train_source, result))

    @contextmanager
    def _entered(self, phase: TrainingPhase) -> Iterator[TrainingPhase]:
        """Begin a phase, or continue the one that `restore` found; after a branch the trunk is as it was before."""
        components, state = self.components, self.state
        is_new = state.enter_phase(phase.number)
        if not phase.is_branch:
            if is_new and phase.reset_momentum:
                clear_state(components.optimizer)
            yield phase
            return
        with components.trained.branch(reset_momentum=phase.reset_momentum, trunk=state.trunk) as trunk:
            if state.trunk_clock is None:
                clock = start_clock(self.config, phase, len(components.train_source), state.clock.steps)
                state.leave_trunk(clock, trunk)
            assert state.trunk_clock is not None
            measured = components.adaptive.at(components.adaptive.observed) if components.adaptive else None
            yield resolved(phase, self.config, state.trunk_clock, measured)
            if state.has_left(phase.number):
                trunk.update(copied(components.trained.state_dict()))  # return to the state that was taken
        if not state.has_left(phase.number):
            state.forget_trunk()
        self.evaluator.weights_changed()

    def _finish_member(self, phase: TrainingPhase) -> None:
        """Write the member that a branch has become."""
        state = self.state
        if state.has_left(phase.number) or state.trunk_clock is None:
            return
        found = self._evaluate(phase)
        if self.world.is_main:
            write_member(self.folder, phase.member, weights_bytes(self.components.model))
        start, length = state.trunk_clock.epoch, state.clock.epoch
        state.return_to_trunk(
            Member(phase.member, start, length, found.top1, found.top5, found.loss, member_file(phase.member))
        )

    def _finish_model(self, phase: TrainingPhase, ending: Ending) -> None:
        """Find out how good the model is that the run leaves behind; nothing when it was stopped."""
        if self.state.outcome is not None:  # a rank that was further has shared its state
            return
        result = None
        if ending == Ending.OVER and self.state.members:
            member = self.state.members[-1]
            result = Evaluation(member.top1, member.top5, member.val_loss, len(self.components.val_source))
        elif ending != Ending.STOPPED:
            result = self._evaluate(phase)
        self.state.end(RunEnd(ending, result))

    def _evaluate(self, phase: TrainingPhase) -> Evaluation:
        """Exact accuracy of the weights as they are now; every rank must call it."""
        found = self.evaluator.evaluate(phase, self.state.clock.samples)
        if not phase.is_branch:
            self.state.note_trunk_top1(found.top1)
        return found

    def _overall(self) -> Clock:
        """Images of all phases together, as a clock."""
        return replace(self.state.clock, total_samples=self.planned_samples, samples=self.state.seen_samples)
