"""The trainer: a run on one rank, from an opened world to a finished model.

`Trainer.run`, `_run_phase` and `_train_steps` are the training loop, top to bottom. All ranks walk through it alike;
only the main rank writes files and prints. A phase is a value (`phases.py`), a step is a function (`step.py`), and the
run's state is written by `state.py` alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from megabatch.comm.failures import is_lost_contact
from megabatch.comm.shape import GridShape
from megabatch.config import Config
from megabatch.errors import MegabatchError
from megabatch.files import lock, write_atomically, write_json
from megabatch.optim.build import schedule_optimizer
from megabatch.optim.groups import clear_state
from megabatch.schedule.clock import Clock
from megabatch.train.audit import weights_digest
from megabatch.train.branch import TrainingState, branch, copied, training_state
from megabatch.train.checkpoint import CheckpointWriter
from megabatch.train.components import build_components
from megabatch.train.describe import derived_lines, describe_data, describe_environment, describe_gradients
from megabatch.train.elastic import ElasticRun, LeftRunError
from megabatch.train.ensemble import member_file, weights_bytes, write_member
from megabatch.train.evaluate import Evaluation, Evaluator
from megabatch.train.feed import Feeds
from megabatch.train.metrics import Recorder, Stopwatch, gather_ranks, row_of, summary_of, whole_rows, write_page
from megabatch.train.phases import Ending, TrainingPhase, control_of, phases_of, planned_samples, resolved, start_clock
from megabatch.train.progress import Progress
from megabatch.train.run_dir import changes_on_resume, hold
from megabatch.train.state import MadeStep, Member, RunState, restore, save, take_state, whole_state
from megabatch.train.step import train_step, warm_up_pass
from megabatch.train.stop import StopRequest
from megabatch.train.world import World, raise_everywhere

T = TypeVar("T")

_CACHED_ROWS = 64


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
        self.config, self.world, self.device, self.folder = config, world, device, folder
        self.grid, self.stop, self.resume, self.plan = grid, stop, resume, plan
        self.progress = Progress(is_main=world.is_main)
        self.components = build_components(config, world, grid, device)
        name = elastic.name if elastic else str(world.rank)
        sources = self.components.train_source, self.components.val_source
        self.feeds = Feeds(config, world.local_size, folder / f"broken.{name}.jsonl", *sources)
        self.evaluator = Evaluator(self.components, self.feeds.val)
        self.watch = Stopwatch(host_clock_tells=device.type == "cpu")
        num_images = len(self.components.train_source)
        self.phases = phases_of(config)
        self.state = RunState(start_clock(config, self.phases[0], num_images))
        self.planned_samples = planned_samples(config, num_images)
        self.recorder: Recorder | None = None  # on the main rank
        self.writer = CheckpointWriter()
        self.rows: deque[dict[str, Any]] = deque(maxlen=_CACHED_ROWS)  # the newest, for the next main rank
        self.made: MadeStep | None = None  # the newest step, until it is finished
        self.elastic = elastic  # for a run whose workers come and go
        self.hosts: list[str] = []  # by rank
        self.workers: tuple[str, ...] = ()  # names of those who take part in an elastic run
        self.trunk_state: TrainingState | None = None  # what the branch that is going on returns to
        self._result: Evaluation | None = None  # of the model that the run leaves behind
        self.is_concluding = False
        self._began = 0.0

    def run(self) -> dict[str, Any]:
        """Train, and return the summary of the run."""
        with ExitStack() as stack:
            stack.enter_context(self.components)
            if self.elastic is None:
                warm_up_pass(self.components)
            if self.elastic is None or self.elastic.begin(self, stack):
                self._open(stack)
            stack.enter_context(self.writer)
            stack.enter_context(self.progress.showing(self._overall(), self.planned_samples))
            self._began = time.perf_counter() - self.state.wall_seconds

            number, ending = self.state.phase, Ending.OVER
            while ending == Ending.OVER and number < len(self.phases):
                ending = self._run_phase(self.phases[number])
                number = max(number + 1, self.state.phase)  # a rank that was further may have shared its state

            summary = self._together(lambda: self._conclude(ending))
        if self.world.is_main:
            write_page(self.folder, self.progress.say)
        return summary

    def _run_phase(self, planned: TrainingPhase) -> Ending:
        """Train a phase; a branch leaves its member behind, the last phase the model of the run."""
        with self._entered(planned) as phase:
            while (ending := self._together(lambda: self._train_steps(phase))) == Ending.AGAIN:
                pass
            if ending == Ending.OVER and phase.is_branch:
                self._together(lambda: self._finish_member(phase))
            if ending != Ending.OVER or phase.number == len(self.phases) - 1:
                self._together(lambda: self._finish_model(phase, ending))
        return ending

    def _together(self, action: Callable[[], T]) -> T:
        """Do what needs every rank. In an elastic run, when one is lost on the way: again, with those who are left."""
        while True:
            try:
                return action()
            except Exception as error:
                if self.elastic is None or not is_lost_contact(error):
                    raise
                self.elastic.meet_again(self)

    def _train_steps(self, phase: TrainingPhase) -> Ending:
        """Make the steps that are left of a phase, as long as the same ranks take part."""
        config, components, state = self.config, self.components, self.state
        if state.phase != phase.number:
            return Ending.OVER  # a rank that was further has shared its state
        if self.made is not None:  # with others than those who are there now
            self._finish_step(phase, self.made)
        control = control_of(config, phase, state.clock, self.world.rank, self.world.size, components.adaptive)
        loader = self.feeds.open_loader(phase, control, state.past_epochs, self.device)
        # The control closes before the loader, whose thread may wait for it.
        with closing(loader), closing(control):
            for step, ghosts in loader:
                scheduled = schedule_optimizer(
                    components.optimizer, phase.optimizer, step.epoch, step=step, past_epochs=state.past_epochs
                )
                make = partial(
                    train_step,
                    components,
                    step,
                    seed=phase.seed,
                    watch=self.watch,
                    stop_wanted=self.stop.wanted and not self._leaves(),
                    ask_wanted=self.elastic is not None and self.elastic.wants_to_ask(self.world),
                    measure_noise=not phase.is_branch,
                )
                is_first = components.exact is not None and components.exact.is_new
                held = list(ghosts) if is_first else ghosts  # the first step is always repeated
                result = make(ghosts=held)
                if result is None and is_first:
                    result = make(ghosts=held)
                if result is None:
                    return Ending.AGAIN
                self.made = MadeStep(state.clock, scheduled, result.columns, step.is_last, result.stop_wanted)
                state.count_step(step, result.step_seconds, result.applied)
                if components.adaptive and not phase.is_branch:
                    components.adaptive.observe(state.clock.epoch, result.noise_average)
                self.evaluator.weights_changed()

                self._finish_step(phase, self.made)
                if result.stop_wanted:
                    return Ending.STOPPED
                if self._leaves():
                    self.save_here()
                    raise LeftRunError(f"left the run after step {state.clock.steps}; the others go on")
                if self.elastic is not None and result.ask_wanted and self.elastic.has_changed(self):
                    return Ending.AGAIN
        return Ending.OVER if control.is_over(state.clock.samples) else Ending.LIMIT

    def _leaves(self) -> bool:
        return self.elastic is not None and self.elastic.leaves(self.world, self.stop)

    def _finish_step(self, phase: TrainingPhase, made: MadeStep) -> None:
        """Evaluate, log and save after a step that counts already; every rank must call it."""
        config, state = self.config, self.state
        is_best = False
        evaluate_now = made.is_last or state.clock.crosses(made.before, config.train.evaluate_every_epochs)
        if evaluate_now and not made.stop_wanted:
            is_best = state.count_evaluation(self._evaluate(phase).top1)

        save_now = made.stop_wanted or made.is_last or is_best or self._checkpoint_is_due(made.before)
        state.note_wall_seconds(time.perf_counter() - self._began)
        row = row_of(state, phase.name, made.scheduled, made.columns, self.evaluator.found)
        if (save_now or self._digest_is_due()) and (self.world.is_main or self.elastic):
            weights, statistics = self.components.network.state_dict(), self.components.statistics.state_dict()
            row["weights_digest"] = weights_digest(weights, statistics)
        self.rows.append(row)
        self.progress.show(self._overall(), row)
        if self.recorder is not None:
            self.recorder.append(row)
        self.writer.check()
        state.refuse_to_diverge(config.train.max_skipped_steps, made.scheduled["lr"])

        # A run whose gradients are not finite may be lost: its last good checkpoints must not make way for it.
        # The best weights so far are good ones, and `best` must not name a file that is not there.
        if save_now and (made.columns["applied"] or made.stop_wanted or is_best):
            self.evaluator.publish(phase, self.state.clock.samples)
            self.save_here()
        self.made = None

    def _open(self, stack: ExitStack) -> None:
        """Take the run folder, say what will be done, and restore a run that is resumed; every rank must call it."""
        config, components, say = self.config, self.components, self.progress.say
        environment = describe_environment(self.world, self.grid, self.device)
        problem: MegabatchError | None = None
        if self.world.is_main:
            channels, image_size = components.train_source.channels, config.data.image_size
            environment |= describe_gradients(components.network, channels, image_size)
            environment["data"] = describe_data(components.train_source, components.val_source)
            try:
                for line in changes_on_resume(self.folder, config, environment) if self.resume else []:
                    say(line)
                stack.enter_context(hold(self.folder, config, self.resume))
                write_json(self.folder / "environment.json", environment)
                if self.plan:
                    write_atomically(self.folder / "plan.json", self.plan)
            except MegabatchError as error:
                problem = error
        raise_everywhere(problem)
        lines = derived_lines(config, self.state.clock, self.world.size, self.grid, components.network)
        for line in [*lines, *(components.hook.explanation if components.hook else [])]:
            say(line)
        metrics_bytes = 0
        if self.resume:
            metrics_bytes, self.trunk_state = restore(components, self.state, self.folder, say)
        self.hosts = environment["hosts"]
        if self.world.is_main:
            self._record(stack, metrics_bytes)

    def enter_world(self, world: World, grid: GridShape, names: tuple[str, ...], hosts: list[str]) -> None:
        """Go on in another world of an elastic run, whose gradients already travel there."""
        self.world, self.grid, self.workers, self.hosts = world, grid, names, hosts
        self.progress.is_main = world.is_main
        self.evaluator.weights_changed()  # a step that is finished again is evaluated by all or by none

    def state_dict(self) -> dict[str, Any]:
        """Everything that another worker needs to go on from here."""
        made = asdict(self.made) if self.made else None
        of_run = {"made": made, "rows": list(self.rows), "workers": list(self.workers)}
        return whole_state(self.components, self.state, self.trunk_state) | of_run

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from where another worker is."""
        take_state(self.components, self.state, saved)
        made = saved["made"]
        self.made = MadeStep(**{**made, "before": Clock(**made["before"])}) if made else None
        self.trunk_state = saved["trunk"]
        self.rows.clear()  # those of the other worker are as new or newer
        self.rows.extend(saved["rows"])
        self.workers = tuple(saved["workers"])

    def take_over(self, stack: ExitStack) -> None:
        """As the main rank of a new world: write down what the one before did not, and a checkpoint.

        The one before may be this rank itself. It cannot know: it may have hung, while another led and wrote.
        """
        keep_bytes, last_step = whole_rows(self.folder / "metrics.jsonl", self.state.clock.steps)
        if self.recorder is None:
            stack.enter_context(lock(self.folder / ".lock", 0.0))  # a main rank that hangs may still hold it
            self.recorder = self._record(stack, keep_bytes)
        else:
            self.recorder.reopen(keep_bytes)
        for row in self.rows:
            if row["step"] > last_step:
                self.recorder.append(row)
        self.save_here()

    def save_here(self) -> None:
        """Begin to write a checkpoint, on the main rank; without talking to the others."""
        if self.recorder is not None:
            is_best = self.state.best_step == self.state.clock.steps
            metrics_bytes = self.recorder.num_bytes
            save(self.components, self.state, self.trunk_state, self.folder, metrics_bytes, is_best, self.writer)

    def hand_over(self) -> None:
        """Another rank is the main one now, and writes."""
        self.writer.forget()
        if self.recorder is not None:
            self.recorder.close()
            self.recorder = None

    def _record(self, stack: ExitStack, keep_bytes: int) -> Recorder:
        self.recorder = Recorder(self.folder, keep_bytes, self.state.clock.steps, self.config, self.progress.say)
        stack.callback(self.hand_over)
        return self.recorder

    def _conclude(self, ending: Ending) -> dict[str, Any]:
        """Write what the run leaves behind, and return its summary; every rank must call it."""
        self.writer.flush()
        self.is_concluding = True
        stopped_by = (self.stop.signal_name or "a signal to another rank") if ending == Ending.STOPPED else ""
        summary = summary_of(self.state, self.config, self.world.size, self._result, stopped_by)
        summary["broken_images"] = self.feeds.total_broken(self.device)
        ranks = gather_ranks(self.watch, self.hosts)
        if self.recorder is not None:
            if ending != Ending.STOPPED:
                write_atomically(self.folder / "model.safetensors", self._final_weights(ending))
            write_json(self.folder / "ranks.json", ranks)
            write_json(self.folder / "summary.json", summary)
            self.recorder.end(summary)
        if self.elastic is not None and self.world.size > 1:
            torch.distributed.barrier()  # nobody leaves before the files are there: another may have to write them
        return summary

    def _final_weights(self, ending: Ending) -> bytes:
        """The last collapsed member, or the model as it is."""
        if ending == Ending.OVER and self.state.members:
            return (self.folder / self.state.members[-1].file).read_bytes()
        return weights_bytes(self.components.model)

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
        with branch(
            *components.trained,
            reset_momentum=phase.reset_momentum,
            trunk=self.trunk_state,
        ) as trunk_state:
            self.trunk_state = trunk_state
            if state.trunk_clock is None:
                state.leave_trunk(start_clock(self.config, phase, len(components.train_source), state.clock.steps))
            assert state.trunk_clock is not None
            measured = components.adaptive.at(components.adaptive.observed) if components.adaptive else None
            yield resolved(phase, self.config, state.trunk_clock, measured)
            is_behind = state.phase != phase.number  # a rank that was further has shared its state: stay there
            if is_behind:
                trunk_state.update(copied(training_state(*components.trained)))
        self.trunk_state = self.trunk_state if is_behind else None
        self.evaluator.weights_changed()

    def _finish_member(self, phase: TrainingPhase) -> None:
        """Write the member that a branch has become."""
        state = self.state
        if state.phase != phase.number or state.trunk_clock is None:  # a rank that was further has shared its state
            return
        found = self._evaluate(phase)
        file = member_file(phase.member)
        if self.world.is_main:
            write_member(self.folder, file, self.components.model)
        start, length = state.trunk_clock.epoch, state.clock.epoch
        state.return_to_trunk(Member(phase.member, start, length, found.top1, found.top5, found.loss, file))

    def _finish_model(self, phase: TrainingPhase, ending: Ending) -> None:
        """Find out how good the model is that the run leaves behind; nothing when it was stopped."""
        if ending == Ending.OVER and self.state.members:
            member = self.state.members[-1]
            self._result = Evaluation(member.top1, member.top5, member.val_loss, len(self.components.val_source))
        elif ending != Ending.STOPPED:
            self._result = self._evaluate(phase)

    def _evaluate(self, phase: TrainingPhase) -> Evaluation:
        """Exact accuracy of the weights as they are now; every rank must call it."""
        found = self.evaluator.evaluate(phase, self.state.clock.samples)
        if not phase.is_branch:
            self.state.note_trunk_top1(found.top1)
        return found

    def _checkpoint_is_due(self, before: Clock) -> bool:
        settings, clock = self.config.checkpoint, self.state.clock
        by_steps = bool(settings.every_steps) and clock.steps % settings.every_steps == 0
        return by_steps or clock.crosses(before, settings.every_epochs)

    def _digest_is_due(self) -> bool:
        every = self.config.train.digest_every_steps
        return bool(every) and self.state.clock.steps % every == 0

    def _overall(self) -> Clock:
        """Images of all phases together, as a clock."""
        return replace(self.state.clock, total_samples=self.planned_samples, samples=self.state.seen_samples)
