"""Starting, joining, stopping and losing workers, with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.system.runs import REPOSITORY, clean_environment, command, rows_of, start

LONG = ("train.epochs=100000", "checkpoint.every_steps=2")
SHORT = ("train.max_steps=3",)


def wait_for_rows(folder: Path, process: subprocess.Popen[str], at_least: int = 5, seconds: float = 100) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (folder / "metrics.jsonl").exists() and len(
            (folder / "metrics.jsonl").read_bytes().splitlines()
        ) >= at_least:
            return
        if process.poll() is not None:
            out, err = process.communicate()
            pytest.fail(f"the run ended with {process.returncode} too early\n{out}\n{err}")
        time.sleep(0.05)
    process.kill()
    pytest.fail(f"no {at_least} rows within {seconds} s")


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """In the order in which they were started; the tracker of shared memory is no worker."""
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_signal_writes_a_checkpoint_and_stops_cleanly(number: signal.Signals, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(command(folder, "--workers", "2", overrides=LONG))
    wait_for_rows(folder, process)
    workers = workers_of(process)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert f"stopped by {number.name}" in out
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "stopped"
    newest = sorted((folder / "checkpoints").glob("step-*.pt"))[-1]
    assert int(newest.stem.split("-")[1]) == summary["steps"] == len(rows_of(folder))
    assert not psutil.wait_procs(workers, timeout=10)[1], "workers were left behind"


def test_a_killed_worker_is_restarted_and_the_run_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(
        command(
            folder,
            "--workers",
            "2",
            overrides=("train.epochs=10", "train.max_steps=80", "checkpoint.every_steps=2"),
        )
    )
    wait_for_rows(folder, process)
    workers_of(process)[1].kill()
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert "resuming after step" in out
    assert [row["step"] for row in rows_of(folder)] == list(range(1, 81))
    assert "Traceback" not in err


def test_workers_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(command(folder, "--workers", "2", overrides=LONG))
    wait_for_rows(folder, process)
    workers = workers_of(process)
    assert len(workers) == 2
    process.kill()
    process.communicate(timeout=20)
    assert not psutil.wait_procs(workers, timeout=20)[1]


def test_an_error_found_by_workers_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    bad = ("data.source=idx", f"data.path={tmp_path / 'nowhere'}")
    process = start(command(folder, "--workers", "2", overrides=bad))
    out, err = process.communicate(timeout=100)
    assert process.returncode == 2
    assert err.count("\n") == 1
    assert "nowhere" in err
    assert "Traceback" not in out + err
    assert not folder.exists()


def test_torchrun_is_joined_and_agrees_on_a_folder(tmp_path: Path) -> None:
    words = command(tmp_path / "unused", overrides=SHORT)[3:]
    words = [*words[: words.index("--output")], *words[words.index("--output") + 2 :]]
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "megabatch",
    ]
    environment = clean_environment(PYTHONPATH=str(REPOSITORY))
    done = subprocess.run(
        [*launcher, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert len(rows_of(folder)) == 3
    assert json.loads((folder / "environment.json").read_text())["launcher"] == "torchrun"


def _start_by_hand(folder: Path, variables: list[dict[str, str]]) -> list[subprocess.Popen[str]]:
    return [start(command(folder, overrides=SHORT), **environment) for environment in variables]


@pytest.mark.parametrize("launcher", ["srun", pytest.param("mpirun", marks=pytest.mark.slow)])
def test_slurm_and_mpi_variables_are_enough_to_join(launcher: str, tmp_path: Path) -> None:
    job = str(os.getpid())  # decides the port
    slurm = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": job, "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}
    mpi = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": job}
    variables = [
        slurm | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_TASKS_PER_NODE": "2"}
        if launcher == "srun"
        else mpi | {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank)}
        for rank in (0, 1)
    ]
    processes = _start_by_hand(tmp_path / "run", variables)
    results = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert len(rows_of(tmp_path / "run")) == 3
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert (environment["launcher"], environment["workers"]) == (launcher, 2)


def test_evaluate_counts_every_image_and_repeats_the_accuracy(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = subprocess.run(
        command(folder, "--workers", "2", overrides=SHORT),
        cwd=REPOSITORY, env=clean_environment(), capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "summary.json").read_text())
    words = [sys.executable, "-m", "megabatch", "evaluate", str(folder), "--json"]
    output = subprocess.run(
        words, cwd=REPOSITORY, env=clean_environment(), capture_output=True, text=True, timeout=60, check=True
    ).stdout
    result = json.loads(output)
    assert result["num_images"] == summary["val_images"] == 103
    assert (result["top1"], result["top5"]) == (summary["top1"], summary["top5"])
