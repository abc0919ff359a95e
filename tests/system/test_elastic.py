"""Workers come and go: real processes, killed and replaced, and the bits of the undisturbed run."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.system.runs import command, rows_of, start
from tests.system.test_launch import wait_for_rows, workers_of

pytest.importorskip("torchft", reason="torchft is an extra: pip install megabatch[elastic]")

STEPS = 60
SETTINGS = (
    "train.max_steps=60",
    "train.epochs=100",
    "train.threads_per_worker=1",
    "train.global_batch_size=128",
    "comm.bucket_mb=0.02",
)


def weights_of(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def finished(process: subprocess.Popen[str], folder: Path) -> None:
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, f"{out}\n{err}"
    assert [row["step"] for row in rows_of(folder)] == list(range(1, STEPS + 1))


def membership_of(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "membership.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    finished(start(command(folder, "--workers", "1", overrides=SETTINGS)), folder)
    return weights_of(folder)


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_worker_costs_no_bit_and_is_replaced(victim: int, undisturbed: str, tmp_path: Path) -> None:
    """Number 0 is the first that was started; any of them may be the main rank."""
    folder = tmp_path / "run"
    process = start(command(folder, "--workers", "3", "--elastic", overrides=SETTINGS))
    wait_for_rows(folder, process, at_least=8)
    workers_of(process)[victim].kill()
    finished(process, folder)
    assert weights_of(folder) == undisturbed
    changes = membership_of(folder)
    assert changes[0]["workers"] == 2
    assert len(changes[0]["lost"]) == 1  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["lars", "lamb"])
def test_one_that_comes_gets_the_optimizer_as_it_lies_in_memory(optimizer: str, tmp_path: Path) -> None:
    """Norms over tensors are added up in the order of memory, so another layout would give other bits."""
    settings = (*SETTINGS, f"optimizer.name={optimizer}", "optimizer.nesterov=false", "train.max_steps=400")
    folders = [tmp_path / "undisturbed", tmp_path / "run"]
    process = start(command(folders[0], "--workers", "1", overrides=settings))
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    process = start(command(folders[1], "--workers", "2", "--elastic", overrides=settings))
    wait_for_rows(folders[1], process, at_least=8)
    workers_of(process)[0].kill()
    out, err = process.communicate(timeout=250)
    assert process.returncode == 0, f"{out}\n{err}"
    assert any(change["joined"] for change in membership_of(folders[1])), "the run was over before another one came"
    assert weights_of(folders[1]) == weights_of(folders[0])


@pytest.mark.slow
def test_a_worker_lost_with_its_share_of_the_roots_costs_no_bit(tmp_path: Path) -> None:
    """Roots are computed by all and gathered in every step, so the loss falls into one."""
    options = "optimizer.shampoo={start_steps=2,every_steps=1,block_size=32}"
    shampoo = (*SETTINGS, "optimizer.name=shampoo", "optimizer.lr=0.05", options)
    alone, folder = tmp_path / "alone", tmp_path / "run"
    finished(start(command(alone, "--workers", "1", overrides=shampoo)), alone)
    process = start(command(folder, "--workers", "3", "--elastic", overrides=shampoo))
    wait_for_rows(folder, process, at_least=8)
    workers_of(process)[1].kill()
    finished(process, folder)
    assert weights_of(folder) == weights_of(alone)
    assert membership_of(folder)[0]["workers"] == 2


@pytest.mark.slow
def test_the_main_rank_and_half_of_the_others_at_once(undisturbed: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(command(folder, "--workers", "4", "--elastic", overrides=SETTINGS))
    wait_for_rows(folder, process, at_least=8)
    for worker in workers_of(process)[:3]:
        worker.kill()
    finished(process, folder)
    assert weights_of(folder) == undisturbed


@pytest.mark.slow
def test_a_worker_that_is_asked_to_leave_leaves_and_is_not_replaced(undisturbed: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(command(folder, "--workers", "3", "--elastic", overrides=SETTINGS))
    wait_for_rows(folder, process, at_least=8)
    workers_of(process)[0].terminate()
    finished(process, folder)
    assert weights_of(folder) == undisturbed
    assert [change["workers"] for change in membership_of(folder)] == [2]


def is_main(worker: psutil.Process) -> bool:
    """The main rank is the one that writes the metrics."""
    return any(file.path.endswith("metrics.jsonl") for file in worker.open_files())


@pytest.mark.slow
@pytest.mark.parametrize("main_leaves", [True, False])
def test_with_too_few_workers_the_run_waits_then_saves_and_stops(main_leaves: bool, tmp_path: Path) -> None:
    """Workers that are asked to leave are not replaced, so two stay fewer than three.

    The wait is also that for each other at the beginning, which on a busy machine takes seconds.
    """
    folder = tmp_path / "run"
    settings = (*SETTINGS, "comm.wait_seconds=25", "train.max_steps=100000")
    process = start(command(folder, "--workers", "3", "--elastic", "--min-workers", "3", overrides=settings))
    wait_for_rows(folder, process, at_least=8)
    next(worker for worker in workers_of(process) if is_main(worker) == main_leaves).terminate()
    _, err = process.communicate(timeout=200)
    assert process.returncode == 2
    assert "fewer than 3 workers, or no lighthouse, for 25 s" in err
    assert "--resume" in err
    newest = max((folder / "checkpoints").glob("step-*.pt"))
    assert int(newest.stem.removeprefix("step-")) == rows_of(folder)[-1]["step"]


@pytest.mark.slow
def test_all_workers_lost_at_once_go_on_from_the_checkpoint(undisturbed: str, tmp_path: Path) -> None:
    """One has left before and does not come back: those in place of the others do not wait for it."""
    folder = tmp_path / "run"
    settings = (*SETTINGS, "checkpoint.every_steps=2", "comm.wait_seconds=1000")
    process = start(command(folder, "--workers", "3", "--elastic", overrides=settings))
    wait_for_rows(folder, process, at_least=8)
    workers_of(process)[0].terminate()
    wait_for_rows(folder, process, at_least=16)
    for worker in workers_of(process):
        worker.kill()
    finished(process, folder)
    assert weights_of(folder) == undisturbed


@pytest.mark.slow
def test_a_branch_survives_a_loss(tmp_path: Path) -> None:
    """Of a worker that is killed in it, and of one that hangs in it and comes back when the trunk has gone on."""
    collapse = ("collapse.epochs=3", "collapse.at_epochs=[6, 12]", "collapse.lr=0.05", "train.epochs=18")
    settings = tuple(one for one in SETTINGS if not one.startswith(("train.max_steps", "train.epochs"))) + collapse
    found = []
    for fault in ("", "kill", "hang"):
        folder = tmp_path / (fault or "undisturbed")
        words = ["--workers", "3", "--elastic"] if fault else ["--workers", "1"]
        process = start(command(folder, *words, overrides=(*settings, "comm.hang_seconds=2")))
        if fault:
            wait_for_rows(folder, process, at_least=19)  # inside the first branch
            victim = workers_of(process)[0]
            victim.send_signal(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        if fault == "hang":
            wait_for_rows(folder, process, at_least=32)
            victim.send_signal(signal.SIGCONT)
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, f"{out}\n{err}"
        files = sorted(folder.glob("members/*.safetensors"))
        assert len(files) == 2
        found.append([weights_of(folder), *(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)])
    assert found[0] == found[1] == found[2]
