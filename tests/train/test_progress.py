"""What a person sees: a bar on a terminal, plain lines elsewhere, nothing from any but the main rank."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from megabatch.schedule.clock import Clock
from megabatch.train import progress as progress_module
from megabatch.train.progress import Progress

CLOCK = Clock(samples_per_epoch=1000, total_samples=3000)
ROW: dict[str, float | int] = {
    "step": 1,
    "loss": 2.3456,
    "top1": 0.125,
    "lr": 0.0512345,
    "global_batch_size": 1024,
    "images_per_second": 12345.6,
    "data_seconds": 0.1,
    "compute_seconds": 0.8,
    "communication_seconds": 0.1,
}
EVALUATED = {**ROW, "val_top1": 0.9, "val_top5": 0.995, "val_loss": 0.25}


class Time:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(progress_module, "time", made)
    return made


def progress(is_main: bool = True, terminal: bool = False) -> tuple[Progress, io.StringIO]:
    made, out = Progress(lambda: is_main), io.StringIO()
    made._console = Console(
        file=out, force_terminal=terminal, width=120, highlight=False, soft_wrap=True, legacy_windows=False
    )
    return made, out


def test_plain_lines_come_every_few_seconds_with_speed_split_and_time_left(hand: Time) -> None:
    made, out = progress()
    with made.showing(CLOCK, 3000):
        clock = CLOCK.after(1000)
        hand.now += 100.0
        made.show(clock, ROW)
        made.show(clock.after(1), ROW)  # too soon for another line
        hand.now += 4.9
        made.show(clock.after(1), ROW)
        hand.now += 0.2
        made.show(clock.after(500), ROW)
    text = "loss 2.346 top-1 12.5% lr 0.0512 batch 1,024 12,346 img/s data/comp/comm 10/80/10 %"
    assert out.getvalue().splitlines() == [
        f"epoch   1.00/3  {text}  eta 3:20",  # 100 s for one epoch, two are left
        f"epoch   1.50/3  {text}  eta 1:45",  # 105.1 s for one and a half
    ]


def test_a_resumed_run_counts_its_time_left_from_where_it_began(hand: Time) -> None:
    made, out = progress()
    with made.showing(Clock(1000, 3000, samples=2000, steps=2), 3000):
        hand.now += 10.0
        made.show(Clock(1000, 3000, samples=2500, steps=3), ROW)
    assert out.getvalue().endswith("eta 0:10\n")


def test_a_run_that_ends_early_counts_its_time_left_to_its_own_end(hand: Time) -> None:
    made, out = progress()
    with made.showing(CLOCK, 1500):
        hand.now += 100.0
        made.show(CLOCK.after(1000), ROW)
    assert out.getvalue().startswith("epoch   1.00/3 ")
    assert out.getvalue().endswith("eta 0:50\n")


def test_no_time_left_is_claimed_before_anything_was_done(hand: Time) -> None:
    made, out = progress()
    with made.showing(CLOCK, 3000):
        made.show(CLOCK, ROW)
    assert out.getvalue().endswith("eta -\n")


def test_an_evaluation_has_its_own_line_at_once(hand: Time) -> None:
    made, out = progress()
    with made.showing(CLOCK, 3000):
        made.show(CLOCK.after(10), ROW)
        made.show(CLOCK.after(1500), EVALUATED)
    assert out.getvalue().splitlines()[1:] == ["epoch   1.50  validation top-1 90.00%  top-5 99.50%  loss 0.2500"]


def test_values_that_are_not_finite_or_take_no_time_are_shown(hand: Time) -> None:
    made, out = progress()
    zero = {"data_seconds": 0.0, "compute_seconds": 0.0, "communication_seconds": 0.0}
    with made.showing(CLOCK, 3000):
        made.show(CLOCK.after(10), {**ROW, **zero, "loss": float("nan")})
    assert "loss nan" in out.getvalue()
    assert "data/comp/comm 0/0/0 %" in out.getvalue()


def test_other_workers_stay_silent() -> None:
    for terminal in (False, True):
        made, out = progress(is_main=False, terminal=terminal)
        made.say("hello")
        with made.showing(CLOCK, 3000):
            made.show(CLOCK.after(1000), EVALUATED)
        assert out.getvalue() == ""


def test_what_is_said_is_not_taken_for_markup() -> None:
    made, out = progress()
    made.say("folder [bold]runs[/] has 3 files")
    assert out.getvalue() == "folder [bold]runs[/] has 3 files\n"


def test_a_terminal_gets_a_bar_that_ends_with_the_block() -> None:
    made, out = progress(terminal=True)
    with made.showing(CLOCK, 3000):
        made.show(CLOCK.after(1000), ROW)
        made.show(CLOCK.after(3000), EVALUATED)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "epoch 3.00" in shown
    assert "validation top-1 90.00%" in shown
    assert "\x1b[?25h" in out.getvalue()  # the cursor is back
    length = len(out.getvalue())
    made.show(CLOCK.after(3000), EVALUATED)
    assert "epoch   3.00  validation" in out.getvalue()[length:]  # the bar is gone, lines still work


def test_the_bar_also_ends_when_the_run_fails() -> None:
    made, out = progress(terminal=True)
    with pytest.raises(KeyError), made.showing(CLOCK, 3000):
        raise KeyError
    assert "\x1b[?25h" in out.getvalue()
