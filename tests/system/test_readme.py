"""What the README and the examples tell people to type is typed here, on a small scale."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.runs import REPOSITORY, SMALL, clean_environment

SMALLER = (*SMALL, "train.max_steps=2")


def train_block() -> list[str]:
    """The commands of README's section on training, without their comments."""
    readme = (REPOSITORY / "README.md").read_text()
    match = re.search(r"## Train\n+```sh\n(.*?)```", readme, re.DOTALL)
    assert match is not None
    return [line.split("#")[0].strip() for line in match.group(1).splitlines()]


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        cwd=folder,
        env=clean_environment(PYTHONPATH=str(REPOSITORY)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_train_block_works_line_by_line(tmp_path: Path) -> None:
    commands = train_block()
    assert len(commands) >= 7
    for command in commands:
        verb = shlex.split(command)[1:]
        small = [word for setting in SMALLER for word in ("--set", setting)] if verb[0] == "train" else []
        small += ["--sizes", "1KB", "--iterations", "2"] if verb[0] == "bench" else []
        done = run([sys.executable, "-m", "megabatch", *verb, *small], tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_the_example_loop_runs() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run([*launcher, "examples/torus_in_your_loop.py", "--grid", "1x2", "--steps", "2"], REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("on a grid of 1x2") == 2
    assert not re.search(r"warning|^\[W", done.stderr, re.IGNORECASE | re.MULTILINE), done.stderr


@pytest.mark.slow
def test_batch_control_in_a_strangers_loop_is_the_same_on_any_number_of_ranks() -> None:
    losses = []
    for ranks in ("1", "3"):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        stages = ["--stages", "0:32 0.3:64 0.6:160", "--epochs", "1.2"]  # 32 are fewer ghost batches than ranks
        done = run([*launcher, "examples/batch_control_in_your_loop.py", *stages], REPOSITORY)
        assert done.returncode == 0, done.stderr
        rows = [line for line in done.stdout.splitlines() if line.startswith("epoch")]
        assert [int(row.split()[2]) for row in rows] == [32] * 5 + [64] * 3 + [160] + [80]
        losses.append([float(row.split("loss ")[1].split(",")[0]) for row in rows])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.slow
def test_exact_sums_in_a_strangers_loop_give_the_same_bits_on_any_number_of_ranks() -> None:
    digests = set()
    for ranks, algorithm in (("1", "torus"), ("2", "ring"), ("3", "torus")):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        done = run([*launcher, "examples/exact_in_your_loop.py", "--algorithm", algorithm], REPOSITORY)
        assert done.returncode == 0, done.stderr
        digests.add(done.stdout.split("SHA-256 ")[1].strip())
    assert len(digests) == 1
