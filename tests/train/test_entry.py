"""`megabatch.train`: alone, in a process group that is already there, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

import megabatch
from megabatch.cli.words import TrainWords, make_request
from megabatch.config import Config
from megabatch.errors import CheckpointError, ConfigError, GridError, LaunchError
from megabatch.recipes import load_config
from megabatch.recipes.scale import over_epochs
from megabatch.schedule.pieces import value_at
from megabatch.train import entry
from megabatch.train.entry import train_here
from megabatch.train.request import Elastic, TrainRequest
from megabatch.train.run_dir import check_output, config_of_run
from megabatch.use.evaluate import evaluate_run
from megabatch.use.verify import verify_run
from tests.ranks import run_ranks
from tests.system.runs import clean_environment, rows_of, small_config, train_on_ranks

SHORT = ("train.max_steps=3",)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)
    monkeypatch.setenv("MEGABATCH_TOKEN", "")  # an elastic run sets it for its workers: put back after the test
    monkeypatch.delenv("MEGABATCH_TOKEN")


def test_alone_it_trains_in_this_process_and_leaves_no_trace(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    summary = megabatch.train(small_config(*SHORT), output=tmp_path / "run")
    assert (summary["status"], summary["steps"], summary["workers"]) == ("finished", 3, 1)
    assert not dist.is_initialized()
    assert signal.getsignal(signal.SIGTERM) == before
    with pytest.raises(CheckpointError, match="already holds a run"):
        megabatch.train(small_config(*SHORT), output=tmp_path / "run")
    longer = small_config("train.max_steps=5")
    assert megabatch.train(longer, output=str(tmp_path / "run"), resume=True)["steps"] == 5


def go_on(folder: Path, epochs: float) -> None:
    """`megabatch train --resume FOLDER --epochs EPOCHS`, in this process."""
    words = TrainWords(str(folder), resume=True, epochs=epochs, workers=1)
    request, _ = make_request(words, {}, lambda line: None)
    megabatch.train(request.config, output=request.output, resume=request.resume)


def rows_and_config(folder: Path) -> tuple[list[dict[str, Any]], Config]:
    return rows_of(folder), config_of_run(folder)


def test_a_finished_run_goes_on_to_another_length_with_stretched_schedules(tmp_path: Path) -> None:
    folder, up = tmp_path / "run", "{until_epoch=1,shape='linear',start=0.1,end=0.2}"
    down = "{until_epoch=2,shape='cosine',start=0.2,end=0.0}"
    short = small_config("train.epochs=2", f"optimizer.lr=[{up},{down}]")
    first = megabatch.train(short, output=folder)
    assert first["steps"] == 17  # 660 images: the last step is cut to the 16 that are left
    go_on(folder, epochs=4)
    rows, config = rows_and_config(folder)
    assert config == over_epochs(short, 4)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert rows[17]["samples"] == 656 + 40
    for row in rows[17:]:  # the schedule of a run that was to have 4 epochs from the start
        begin = (row["samples"] - 40) / 330 if row is not rows[-1] else rows[-2]["samples"] / 330
        assert row["lr"] == pytest.approx(value_at(config.optimizer.lr, begin))
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["samples"]) == ("finished", len(rows), 1320)
    assert (folder / "report.html").is_file()

    go_on(folder, epochs=5)  # and once more
    again, config = rows_and_config(folder)
    assert again[: len(rows)] == rows
    assert config.train.epochs == 5
    assert again[-1]["samples"] == 1648  # of 1650, in whole ghost batches

    before = (folder / "config.toml").read_text()
    with pytest.raises(CheckpointError, match=r"has been trained for 4.994 epochs, more than the 3 given; give more"):
        go_on(folder, epochs=3)
    assert ((folder / "config.toml").read_text(), (folder / "summary.json").is_file()) == (before, True)
    with pytest.raises(CheckpointError, match=r"its length alone is changed by --epochs; resume with the settings"):
        check_output(folder, load_config(str(folder / "config.toml"), ["train.epochs=6"]), resume=True)
    with pytest.raises(CheckpointError, match="was given another length after step"):
        verify_run(folder, "0:")


def test_the_length_of_a_run_with_branches_does_not_change(tmp_path: Path) -> None:
    config = small_config("train.epochs=2", "train.reset_momentum_at_epochs=[1]")
    (tmp_path / "config.toml").write_text(config.to_toml())
    with pytest.raises(CheckpointError, match=r"has branches or momentum resets.* its length stays 2 epochs"):
        check_output(tmp_path, over_epochs(config, 3), resume=True)


def train_in_group(rank: int, folder: str) -> dict[str, Any]:
    summary = megabatch.train(small_config(*SHORT), output=folder if rank == 0 else "elsewhere", grid="1x3")
    assert dist.is_initialized()  # the group is the caller's
    return summary


def test_a_group_that_is_there_is_used_and_left_alone(tmp_path: Path) -> None:
    summaries = run_ranks(3, train_in_group, str(tmp_path / "own"))
    assert [one["steps"] for one in summaries] == [3, 3, 3]
    assert summaries[0]["top1"] == summaries[2]["top1"]
    train_on_ranks(3, tmp_path / "ours", *SHORT)
    own, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("own", "ours"))
    assert all(own[name].equal(ours[name]) for name in ours)


def train_on_three_hosts(rank: int, folder: str) -> str:
    os.environ["MEGABATCH_HOST"] = f"host-{rank // 2}"
    megabatch.train(small_config(*SHORT), output=folder)
    return str(json.loads((Path(folder) / "environment.json").read_text())["grid"])


def test_the_default_grid_has_a_row_per_host(tmp_path: Path) -> None:
    assert run_ranks(6, train_on_three_hosts, str(tmp_path / "run")) == ["[3, 2]"] * 6


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="give the run folder as output"):
        megabatch.train(small_config(), resume=True)
    with pytest.raises(GridError, match="2x2 needs 4"):
        megabatch.train(small_config(), output=tmp_path / "run", grid="2x2")
    assert not (tmp_path / "run").exists()


TOKEN = {"MEGABATCH_TOKEN": "0123456789abcdef" * 2}
SRUN = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NODELIST": "a",
}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("lighthouse", "environ", "overrides", "said"),
    [
        ("", {}, ("comm.sums=float",), "elastic runs need exact sums, comm.sums is 'float'"),
        ("", {}, ("comm.backend=nccl",), "elastic runs speak Gloo"),
        ("", SRUN, (), "srun started this process as one of 2; give --elastic HOST:PORT"),
        ("", TORCHRUN, (), "torchrun started this process as one of 2; give --elastic HOST:PORT"),
        ("127.0.0.1:1", {}, (), "needs the token of the run"),
        ("127.0.0.1:1", {"MEGABATCH_TOKEN": "short"}, (), "holds 5 bytes"),
        ("nonsense", TOKEN, (), "'nonsense' is not usable .*give HOST:PORT"),
        ("127.0.0.1:99999", TOKEN, (), "'127.0.0.1:99999' is not usable .*a port is 1 to 65535.*give HOST:PORT"),
        ("127.0.0.1:-1", TOKEN, (), "a port is 1 to 65535"),
        ("127.0.0.1:", TOKEN, (), "a port is 1 to 65535"),
        ("[::1]:5", TOKEN, (), r"'\[::1\]:5' is not usable .*IPv4"),
    ],
)
def test_elastic_runs_that_cannot_work_are_refused_in_one_line(
    lighthouse: str, environ: dict[str, str], overrides: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    request = TrainRequest(small_config(*overrides), tmp_path / "run", elastic=Elastic(lighthouse))
    with pytest.raises((ConfigError, LaunchError), match=said) as caught:
        train_here(request, 1, environ)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("elastic", "said"),
    [
        (Elastic(min_workers=3, max_workers=1), "--min-workers 3 is more than --max-workers 1"),
        (Elastic("127.0.0.1:1", min_workers=3, max_workers=2), "--min-workers 3 is more than --max-workers 2"),
        (Elastic(min_workers=3), "--min-workers 3 is more than the 2 local workers to start; add --workers 3"),
    ],
)
def test_bounds_that_no_run_can_meet_are_refused_at_once(elastic: Elastic, said: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=said) as caught:
        train_here(TrainRequest(small_config(), tmp_path / "run", elastic=elastic), 2, TOKEN)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("lighthouse", ["", "127.0.0.1:1"])
def test_an_elastic_run_without_torchft_names_the_extra(
    lighthouse: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchft", None)
    monkeypatch.setitem(sys.modules, "torchft.coordination", None)
    request = TrainRequest(small_config(), tmp_path / "run", elastic=Elastic(lighthouse))
    with pytest.raises(LaunchError, match=r"need torchft; pip install 'megabatch\[elastic\]'"):
        train_here(request, 1, TOKEN)
    assert not (tmp_path / "run").exists()


def test_a_grid_of_all_hosts_is_not_held_against_the_workers_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def start(request: TrainRequest, elastic: Elastic, world_size: int) -> int:
        started.append(world_size)
        return 0

    monkeypatch.setattr(entry, "start_elastic", start)
    request = TrainRequest(small_config(), tmp_path / "run", "4x8", elastic=Elastic("127.0.0.1:1"))
    assert train_here(request, 8, TOKEN) == 0
    assert started == [8]
    with pytest.raises(GridError, match="4x8 needs 32"):
        train_here(replace(request, elastic=Elastic()), 8, TOKEN)
    with pytest.raises(GridError, match="4y8"):
        train_here(replace(request, grid="4y8"), 8, TOKEN)


@pytest.mark.parametrize("elastic", [None, Elastic(), Elastic("127.0.0.1:1")])
def test_more_local_workers_than_any_machine_has_are_one_line(elastic: Elastic | None, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="at most 1,024 local workers") as caught:
        train_here(TrainRequest(small_config(), tmp_path / "run", elastic=elastic), 99999999999, TOKEN)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_lighthouse_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    door = pytest.importorskip("megabatch.workers.door")
    pytest.importorskip("torchft", reason="torchft is an extra: pip install megabatch[elastic]")
    monkeypatch.setattr(door, "_CONNECT_SECONDS", 0.5)
    request = TrainRequest(small_config(), tmp_path / "run", elastic=Elastic("127.0.0.1:1"))
    with pytest.raises(LaunchError, match=r"no lighthouse answers at 127\.0\.0\.1:1") as caught:
        train_here(request, 1, TOKEN)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_rounding_of_two_stretches_is_no_other_run(tmp_path: Path) -> None:
    """Stretched to 3 and then to 9 epochs differs from stretched to 9 in the last bit of some numbers."""
    recipe = load_config("photos")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text(over_epochs(recipe, 3).to_toml())
    nine = over_epochs(recipe, 9)
    assert over_epochs(over_epochs(recipe, 3), 9) != nine
    check_output(folder, nine, resume=True)
    other = nine.model_copy(update={"optimizer": nine.optimizer.model_copy(update={"lr_factor": 1.001})})
    with pytest.raises(CheckpointError, match="holds another run"):
        check_output(folder, other, resume=True)


def test_a_run_whose_steps_end_inside_a_branch_tells_of_the_model_it_writes(tmp_path: Path) -> None:
    overrides = ("collapse.at_epochs=[1]", "collapse.epochs=1", "train.epochs=2", "train.max_steps=12")
    summary = train_on_ranks(2, tmp_path / "run", *overrides)
    assert (summary["status"], summary["steps"]) == ("finished", 12)
    assert rows_of(tmp_path / "run")[-1]["phase"] == "collapse-1"
    found = evaluate_run(tmp_path / "run", None)
    assert found is not None
    assert found["top1"] == pytest.approx(summary["top1"], abs=1e-6)
