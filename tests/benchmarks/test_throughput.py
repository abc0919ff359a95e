"""The comparison of whole steps: its numbers from times that are known, and one short round of those installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import throughput
from benchmarks.throughput import OURS, compare, installed, largest_difference, main, verdict
from tests.system.runs import REPOSITORY

EXACT = "megabatch, exact sums"
TINY = (
    *("data.source=generated", "data.generated.num_train=600", "data.generated.num_val=20", "data.image_size=12"),
    *("model.width=4", "train.ghost_batch_size=20", "train.global_batch_size=80"),
)


def test_a_ratio_is_between_neighbours_and_the_interval_over_repeats_where_there_are_enough() -> None:
    repeats = [{EXACT: [1.0, 2.0, 4.0], "bare": [1.0 + n, 2.0 * (1 + n), 8.0 * (1 + n)]} for n in range(6)]
    found = compare(repeats, EXACT, "bare")  # the medians of the repeats are 1 to 6
    assert (found["ratio"], found["interval"], found["interval_over"]) == (3.5, [1.0, 6.0], "repeats")
    assert (found["least"], found["most"], found["repeats"], found["rounds"]) == (1.0, 12.0, 6, 3)
    few = compare(repeats[:2], EXACT, "bare")
    assert (few["interval_over"], few["interval"]) == ("rounds", [1.0, 4.0])
    assert few["ratio"] == 2.0


@pytest.mark.parametrize(
    ("interval", "wanted", "said"),
    [
        ([1.0, 1.2], 1.0, "reached"),
        ([0.99, 1.2], 1.0, "undecided"),
        ([0.8, 0.99], 1.0, "not reached"),
        ([0.8, 1.2], None, "noise"),
    ],
)
def test_the_whole_interval_must_be_where_it_was_wanted(interval: list[float], wanted: float | None, said: str) -> None:
    assert verdict({"interval": interval, "wanted": wanted, "enough": True}) == said


def test_a_few_rounds_decide_nothing_and_a_twin_has_no_target() -> None:
    one = {EXACT: [1.0], "bare": [2.0], "bare twin": [1.0], "lightning": [3.0]}
    assert verdict(compare([one], EXACT, "lightning")) == "too few to say"
    assert verdict(compare([one] * 6, EXACT, "lightning")) == "reached"
    assert verdict(compare([one] * 6, "bare twin", "bare")) == "noise"


def test_losses_that_differ_are_seen_in_any_step_of_any_contestant() -> None:
    same = {"a": [2.0, 1.0], "b": [2.0, 1.0]}
    assert largest_difference(same) == 0
    assert largest_difference({**same, "c": [2.0, 1.1]}) == pytest.approx(0.1)


def test_a_peer_that_is_not_installed_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "find_spec", lambda name: None)
    assert installed(["bare", "bare twin", "accelerate", "lightning"]) == (
        ["bare", "bare twin"],
        ["accelerate", "lightning"],
    )


def test_an_unknown_peer_ends_with_one_line() -> None:
    with pytest.raises(SystemExit, match=r"no peer is called 'keras'; choose of bare, bare twin, acc"):
        main(["--peers", "bare,keras"])


@pytest.mark.slow
@pytest.mark.timeout(900)  # ten processes start one after another
def test_those_that_are_installed_train_the_same_and_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    words = ["--repeats", "1", "--rounds", "1", "--block-seconds", "0.3", "--peers", "bare,accelerate,lightning"]
    main([*words, "--json", str(tmp_path / "found.json"), *(word for one in TINY for word in ("--set", one))])
    found = json.loads((tmp_path / "found.json").read_text())
    there, missing = installed(["bare", "accelerate", "lightning"])
    assert found["left_out"] == missing
    assert found["largest_loss_difference"] < 1e-4
    [rounds] = found["seconds_per_step"]
    assert list(rounds) == [*OURS, *there]
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in rounds.values())
    assert "| megabatch, exact sums | bare |" in capsys.readouterr().out
