"""The loop over the steps of one phase: step, evaluate, log, checkpoint. The trunk and its branches share it."""

from __future__ import annotations

from contextlib import ExitStack, closing
from enum import Enum

from megabatch.config import Config
from megabatch.errors import TrainingError
from megabatch.schedule.clock import Clock
from megabatch.train.outcome import row_of
from megabatch.train.segment import Segment
from megabatch.train.session import Session
from megabatch.train.snapshot import RunState
from megabatch.train.step import StepResult, train_step

__all__ = ["Ending", "run_phase"]


class Ending(Enum):
    """How a phase came to its end."""

    OVER = "over"  # the next phase can begin
    LIMIT = "limit"  # train.max_steps
    STOPPED = "stopped"  # a signal


def run_phase(session: Session, segment: Segment) -> Ending:
    """Make the steps that are left of a phase; every worker walks through it alike."""
    bench, run, config = session.bench, session.run, session.bench.config
    ghost_batch_size = config.train.ghost_batch_size
    with ExitStack() as stack:
        loader = stack.enter_context(closing(session.loader(segment)))
        if bench.adaptive:
            bench.adaptive.reopen()
            stack.enter_context(closing(bench.adaptive))  # before the loader, whose thread may wait for it
        for step, ghosts in loader:
            growth = step.global_batch_size / segment.base_global_batch_size
            past_epochs = run.trunk.epoch if run.trunk else 0.0
            rates = bench.set_rates(segment.optimizer, step.start_epoch, growth=growth, past_epochs=past_epochs)
            result = train_step(bench, step, ghosts, segment.seed, session.stop.wanted, not segment.phase.is_branch)
            before, run.clock = run.clock, run.clock.after(step.num_samples)
            run.seen_samples += step.num_samples
            run.training_seconds += result.step_seconds
            _count_skipped(run, result)
            session.weights_changed()
            if bench.adaptive and not segment.phase.is_branch:
                bench.adaptive.observe(run.clock.epoch, result.noise)

            is_last = segment.is_over(run.clock, ghost_batch_size) or run.clock.steps == config.train.max_steps
            is_best = False
            if not result.stop_wanted and (is_last or run.clock.crosses(before, config.train.evaluate_every_epochs)):
                is_best = session.evaluate(segment).top1 > run.best_top1
                if is_best and session.evaluation:
                    run.best_top1, run.best_step = session.evaluation.top1, run.clock.steps
            session.tick()
            row = row_of(run, segment.phase.name, step, rates, result, session.evaluation)
            session.progress.show(session.overall, row)
            if session.recorder is not None:
                session.recorder.append(row)
            _stop_when_diverged(config, run, rates)
            due = result.stop_wanted or is_last or is_best or _checkpoint_is_due(config, run.clock, before)
            # A run whose gradients are not finite may be lost: its last good checkpoints must not make way for it.
            # Weights that are better than all before are good ones, and `best` must not name a file that is not there.
            if due and (result.applied or result.stop_wanted or is_best):
                session.save(segment, is_best)
            if result.stop_wanted:
                return Ending.STOPPED
    return Ending.OVER if segment.is_over(run.clock, ghost_batch_size) else Ending.LIMIT


def _checkpoint_is_due(config: Config, clock: Clock, before: Clock) -> bool:
    every_steps = config.checkpoint.every_steps
    by_steps = bool(every_steps) and clock.steps % every_steps == 0
    return by_steps or clock.crosses(before, config.checkpoint.every_epochs)


def _count_skipped(run: RunState, result: StepResult) -> None:
    """Count steps that the optimizer left out because the gradient was not finite."""
    run.skipped_in_a_row = 0 if result.applied else run.skipped_in_a_row + 1
    run.skipped_steps += not result.applied


def _stop_when_diverged(config: Config, run: RunState, rates: dict[str, float]) -> None:
    limit = config.train.max_skipped_steps
    if run.skipped_in_a_row > limit:
        where = f"step {run.clock.steps}, epoch {run.epoch:.3f}, rate {rates['lr']:g}"
        raise TrainingError(
            f"{run.skipped_in_a_row} steps in a row had gradients that are not finite (the last at {where}; "
            f"at most {limit} are skipped); lower optimizer.lr or lengthen its warm-up, then --resume"
        )
