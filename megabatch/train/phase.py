"""The loop over the updates of one phase: update, evaluate, log, checkpoint. The trunk and its branches share it."""

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
from megabatch.train.step import UpdateResult, train_update

__all__ = ["Ending", "run_phase"]


class Ending(Enum):
    """How a phase came to its end."""

    OVER = "over"  # the next phase can begin
    LIMIT = "limit"  # train.max_updates
    STOPPED = "stopped"  # a signal


def run_phase(session: Session, segment: Segment) -> Ending:
    """Make the updates that are left of a phase; every worker walks through it alike."""
    bench, run, config = session.bench, session.run, session.bench.config
    ghost_batch = config.train.ghost_batch
    with ExitStack() as stack:
        loader = stack.enter_context(closing(session.loader(segment)))
        if bench.adaptive:
            bench.adaptive.reopen()
            stack.enter_context(closing(bench.adaptive))  # before the loader, whose thread may wait for it
        for update, ghosts in loader:
            growth = update.batch_total / segment.base_batch_total
            past_epochs = run.trunk.epoch if run.trunk else 0.0
            rates = bench.set_rates(segment.optimizer, update.start_epoch, growth=growth, past_epochs=past_epochs)
            result = train_update(bench, update, ghosts, segment.seed, session.stop.wanted, not segment.phase.is_branch)
            before, run.clock = run.clock, run.clock.after(update.num_samples)
            run.seen_samples += update.num_samples
            run.training_seconds += result.update_seconds
            _count_skipped(run, result)
            session.weights_changed()
            if bench.adaptive and not segment.phase.is_branch:
                bench.adaptive.observe(run.clock.epoch, result.noise)

            is_last = segment.is_over(run.clock, ghost_batch) or run.clock.updates == config.train.max_updates
            is_best = False
            if not result.stop_wanted and (is_last or run.clock.crosses(before, config.train.evaluate_every_epochs)):
                is_best = session.evaluate(segment).top1 > run.best_top1
                if is_best and session.evaluation:
                    run.best_top1, run.best_update = session.evaluation.top1, run.clock.updates
            session.tick()
            row = row_of(run, segment.phase.name, update, rates, result, session.evaluation)
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
    return Ending.OVER if segment.is_over(run.clock, ghost_batch) else Ending.LIMIT


def _checkpoint_is_due(config: Config, clock: Clock, before: Clock) -> bool:
    every_updates = config.checkpoint.every_updates
    by_updates = bool(every_updates) and clock.updates % every_updates == 0
    return by_updates or clock.crosses(before, config.checkpoint.every_epochs)


def _count_skipped(run: RunState, result: UpdateResult) -> None:
    """Count updates that the optimiser left out because the gradient was not finite."""
    run.skipped_in_a_row = 0 if result.applied else run.skipped_in_a_row + 1
    run.skipped_updates += not result.applied


def _stop_when_diverged(config: Config, run: RunState, rates: dict[str, float]) -> None:
    limit = config.train.max_skipped_updates
    if run.skipped_in_a_row > limit:
        where = f"update {run.clock.updates}, epoch {run.epoch:.3f}, rate {rates['learning_rate']:g}"
        raise TrainingError(
            f"{run.skipped_in_a_row} updates in a row had gradients that are not finite (the last at {where}; "
            f"at most {limit} are skipped); lower optimizer.learning_rate or lengthen its warm-up, then --resume"
        )
