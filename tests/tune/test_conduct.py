"""A whole search: played by the stand-in trainer, and with real, tiny training that is killed on the way."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megabatch.errors import CheckpointError, ConfigError, TrainingError
from megabatch.recipes import load_config
from megabatch.tune import conduct as conducting
from megabatch.tune.conduct import TuneRequest, conduct
from tests.tune.conftest import TINY

LEVEL = "optimizer.lr_factor"


def request(output: Path, *search: str, **options: object) -> TuneRequest:
    given: dict[str, object] = {"trials": 12, "num_jobs": 2, "rungs": 3, "as_json": True, **options}
    return TuneRequest("demo", TINY, search, output=output, **given)  # type: ignore[arg-type]


@pytest.mark.usefixtures("toy_trainer")
def test_the_good_rate_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The best level is 1.7 and the range a factor of 256: the recipe's own 1.0 is 0.77 octaves off."""
    output = tmp_path / "out"
    assert conduct(request(output, f"{LEVEL}=0.0625:16:log", trials=30)) == 0
    whole = json.loads(capsys.readouterr().out)
    found = whole["best"]["values"][LEVEL]
    assert abs(math.log2(found / 1.7)) < 0.4
    assert whole["best"]["value"] == pytest.approx(0.9 - 0.05 * abs(math.log2(found / 1.7)) - 0.1 / 8)
    assert len(whole["trials"]) == 30
    # Three lengths at a ninth, a third and the whole: far fewer images than all trials at full length.
    assert whole["images"] < 0.6 * whole["images_without_pruning"]
    assert whole["images"] == sum(row["images"] for row in whole["trials"])
    assert whole["images_without_pruning"] == 30 * 8 * 180
    (good,) = whole["good_ranges"]
    # An octave costs 0.05 and the margin is 0.01: good are the levels at most 0.2 octaves further off than the best.
    octaves = {row[LEVEL]: abs(math.log2(row[LEVEL] / 1.7)) for row in whole["trials"]}
    near = [level for level, off in octaves.items() if off <= min(octaves.values()) + 0.2]
    assert (good["low"], good["high"]) == (min(near), max(near))
    starts = [path.read_text().split() for path in output.glob("trials/*/rung-0/starts")]
    assert {tuple(words) for words in starts} == {(str(8 / 9), "20", "180", "0")}


@pytest.mark.usefixtures("toy_trainer")
def test_what_is_left_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    assert conduct(request(output, as_json=False)) == 0
    said = capsys.readouterr().out
    assert "180 to train on, 20 held out of the same set" in said
    assert "12 trials:" in said
    names = {path.name for path in output.iterdir()}
    assert names >= {
        "journal.log",
        "best.toml",
        "table.md",
        "trials.csv",
        "tune.json",
        "report.html",
        "trials",
        "figures",
    }
    assert {path.name for path in (output / "figures").glob("*.svg")} == {
        *("tune_rate.svg", "tune_importance.svg", "tune_saved.svg"),
    }
    whole = json.loads((output / "tune.json").read_text())
    best, recipe = load_config(str(output / "best.toml")), load_config("demo", list(TINY))
    assert best.optimizer.lr_factor == whole["best"]["values"][LEVEL]
    assert (best.train.epochs, best.data) == (
        recipe.train.epochs,
        recipe.data,
    )  # whole set, whole length, real validation
    page = (output / "report.html").read_text()
    for text in ("tune_rate", "What decides the result", "What pruning saved", "held out"):
        assert text in page
    assert sum(whole["importance"].values()) == pytest.approx(1.0)
    assert conduct(request(output, as_json=False)) == 0  # nothing left to run: the same again
    assert json.loads((output / "tune.json").read_text()) == whole
    assert conduct(request(output, trials=14)) == 0  # and it can be made longer
    assert len(json.loads((output / "tune.json").read_text())["trials"]) == 14


@pytest.mark.usefixtures("toy_trainer")
def test_diverged_trials_are_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert conduct(request(tmp_path / "out", f"{LEVEL}=1:400:log", trials=10)) == 0
    rows = json.loads(capsys.readouterr().out)["trials"]
    diverged = [row for row in rows if row["outcome"] == "diverged"]
    assert diverged
    assert all(row[LEVEL] > 20 for row in diverged)
    assert all(row[LEVEL] <= 20 for row in rows if row["outcome"] != "diverged")
    assert {(row["images"], row["seconds"]) for row in diverged} == {(240, 1.2)}


@pytest.mark.usefixtures("toy_trainer")
def test_all_diverged_says_which_end_to_extend(tmp_path: Path) -> None:
    with pytest.raises(
        TrainingError, match=r"all 3 trials diverged, with optimizer.lr_factor from 30 to .*lower end"
    ) as raised:
        conduct(request(tmp_path / "out", f"{LEVEL}=30:90:log", trials=3))
    assert "\n" not in str(raised.value)
    assert len((tmp_path / "out" / "trials.csv").read_text().splitlines()) == 4  # nothing is lost


@pytest.mark.usefixtures("toy_trainer")
def test_a_run_that_fails_otherwise_is_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may be the disk: the trial waits, and the same command tries it again."""
    given = request(tmp_path / "out", f"{LEVEL}=0.5:2", trials=2, num_jobs=1)
    broken = TuneRequest(**{**vars(given), "overrides": (*TINY, "optimizer.momentum=0.5")})
    assert conduct(broken) == 1
    heard = capsys.readouterr()
    assert "failed: trial 0: megabatch: no luck" in heard.err
    assert json.loads(heard.out)["trials"][0]["outcome"] == "under way"
    assert conduct(broken) == 1
    assert "failed: trial 0" in capsys.readouterr().err


@pytest.mark.usefixtures("toy_trainer")
def test_budgets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trial at all three lengths takes 8 * 180 * (1 + 1/3 + 1/9) images, a thousand a second: 2.08 s."""
    with pytest.raises(ConfigError, match=r"--budget 1 s is less than a trial takes, about 2.08 s"):
        conduct(request(tmp_path / "small", f"{LEVEL}=0.5:2", trials=None, budget="1s"))
    capsys.readouterr()
    assert conduct(request(tmp_path / "large", f"{LEVEL}=0.5:2", trials=None, budget="6s")) == 0
    whole = json.loads(capsys.readouterr().out)
    assert 6 - 2 * 2.08 < whole["seconds"] <= 6
    assert conduct(request(tmp_path / "small", f"{LEVEL}=0.5:2", trials=1)) == 0  # what had been run was kept


def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="add --trials N or --budget TIME"):
        conduct(request(tmp_path, trials=None))
    with pytest.raises(ConfigError, match="--metric 'loss'"):
        conduct(request(tmp_path, metric="loss"))
    with pytest.raises(ConfigError, match="can be held out"):
        conduct(request(tmp_path, held_out=199))
    monkeypatch.setattr(conducting, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"Optuna, which is not installed; pip install megabatch\[tune\]"):
        conduct(request(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("toy_trainer")
def test_a_journal_of_another_recipe(tmp_path: Path) -> None:
    assert conduct(request(tmp_path / "out", trials=1)) == 0
    other = TuneRequest(**{**vars(request(tmp_path / "out")), "overrides": (*TINY, "model.width=8")})
    with pytest.raises(CheckpointError, match=r"another recipe: its model\.width is 4, given 8"):
        conduct(other)


def test_killed_with_9_and_continued(tmp_path: Path) -> None:
    """Real training: killed in the middle of a run, the same command resumes that run from its checkpoint."""
    output = tmp_path / "out"
    changes = [
        word
        for change in (*TINY, "train.global_batch_size=10", "checkpoint.every_steps=5")
        for word in ("--set", change)
    ]
    command = [
        *(sys.executable, "-m", "megabatch", "tune", "demo", "--trials", "2", "--jobs", "1", "--rungs", "1"),
        *("--epochs", "6", "--search", f"{LEVEL}=0.5:2:log", "--output", str(output), "--json", *changes),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    first = output / "trials" / "0000" / "rung-0"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None and not list(first.glob("checkpoints/step-*.pt")):
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    _, heard = process.communicate(timeout=60)
    assert list(first.glob("checkpoints/step-*.pt")), heard.decode()
    assert not (first / "summary.json").exists(), "it was too quick to be killed"
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    whole = json.loads(done.stdout.splitlines()[-1])
    assert [row["trial"] for row in whole["trials"]] == [0, 1]  # continued, not begun anew as a third
    assert {row["outcome"] for row in whole["trials"]} == {"finished"}
    assert "resuming after step" in (output / "logs" / "trials-0000-rung-0.log").read_text()
    steps = [json.loads(line)["step"] for line in (first / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 6 * 180 // 10 + 1))
