"""Whole steps on a fake CUDA device: no mixed devices, no wait that is not listed here, no more kernels than said."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.accelerator.scenarios import AT_ONCE, BUGS, GRAPH_BUGS, GRAPHS, LATE, SCENARIOS

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(1000)  # one process runs all scenarios, for whichever test comes first
Found = dict[str, dict[str, Any]]

LATE_READ = "event comm/transfer.py"
KERNELS = {
    "ResNet-50, lars, fp16": 600,
    "ResNet-50, sgd": 530,
    "ResNet-50, lars, exact sums": 680,
    "ResNet-50, sgd, exact sums": 610,
    "ResNet-50, rmsprop warm-up, exact sums": 675,
    "sgd": 200,
    "lars in fp16": 250,
    "exact sums": 240,
}

LAUNCHES_OF_GRAPHS = {
    "graph": 50,
    "graph, accumulated": 80,
    "graph, exact sums": 125,
    "graph, ResNet-50, lars, fp16": 95,
    "graph, ResNet-50, exact sums, batch stages": 165,
}

# What must be known at once is read at once.
WAITS_AT_ONCE = {
    "foreign": {"read train/step.py": 1},
}


@pytest.fixture(scope="module")
def found() -> Found:
    """What every scenario waits for and launches: one process runs them all."""
    if shutil.which("g++") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("the fake device needs g++, and CI must have it: apt-get install g++")
        pytest.skip("the fake device needs g++")
    command = [sys.executable, "-m", "tests.accelerator.run", "--scenarios"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row.pop("name"): row for row in rows}


def by_file(waits: dict[str, int]) -> dict[str, int]:
    """Waits by kind and file: lines move."""
    counts: dict[str, int] = {}
    for place, count in waits.items():
        file = place.rpartition(":")[0]
        counts[file] = counts.get(file, 0) + count
    return counts


def waits_of(found: Found, name: str) -> dict[str, int]:
    assert "error" not in found[name], found[name]["error"]
    return by_file(found[name]["waits"])


@pytest.mark.parametrize("name", LATE)
def test_a_step_waits_for_nothing_but_the_numbers_of_the_step_before(found: Found, name: str) -> None:
    reads = 2 if "noise scale" in name else 1
    assert waits_of(found, name) == {LATE_READ: reads}
    # All kernels of a step were queued behind what is waited for: the device is busy meanwhile.
    assert min(found[name]["lags"]) > found[name]["kernels"] / 2


@pytest.mark.parametrize("name", AT_ONCE)
def test_a_step_that_must_know_at_once_waits_where_it_is_said(found: Found, name: str) -> None:
    assert waits_of(found, name) == {LATE_READ: 1, **WAITS_AT_ONCE[name]}


@pytest.mark.parametrize("name", KERNELS)
def test_a_step_launches_no_more_kernels_than_said(found: Found, name: str) -> None:
    assert KERNELS[name] * 0.8 < found[name]["kernels"] <= KERNELS[name]


@pytest.mark.parametrize("name", GRAPHS)
def test_a_step_of_graphs_launches_little_and_captures_nothing_that_is_forbidden(found: Found, name: str) -> None:
    assert waits_of(found, name) == {LATE_READ: 1}
    assert found[name]["forbidden"] == {}
    assert found[name]["kernels"] <= LAUNCHES_OF_GRAPHS[name]
    assert found[name]["captured"] > LAUNCHES_OF_GRAPHS[name]  # in all kinds of passes together


@pytest.mark.parametrize("bug", GRAPH_BUGS)
def test_what_a_capture_forbids_is_seen(found: Found, bug: str) -> None:
    words = {"a seed in the pass": "seed of the host", "an upload in the pass": "copy cpu to cuda"}
    assert any(words[bug] in what for what in found[bug]["forbidden"]), found[bug]


def test_a_loop_of_ones_own_waits_for_the_noise_of_the_step_before(found: Found) -> None:
    assert waits_of(found, "a loop of one's own") == {LATE_READ: 1}


def test_an_evaluation_waits_once_at_its_end(found: Found) -> None:
    assert waits_of(found, "evaluation") == {"read train/evaluate.py": 1}


def test_a_rank_without_a_batch_talks_with_tensors_of_its_device(found: Found) -> None:
    assert waits_of(found, "statistics of no batch").keys() <= {"copy cpu to cuda model/norm.py"}


def test_a_checkpoint_reads_and_loads_every_tensor_on_its_device(found: Found) -> None:
    assert {place.partition(" ")[0] for place in waits_of(found, "checkpoint")} <= {"copy", "read"}


SEEN = {
    "float in lars": ("waits", "read"),
    "labels on the host": ("error", "cpu"),
    "a copy that blocks": ("waits", "copy cpu to cuda"),
    "a number of the host in a stack": ("error", "DeviceMixError"),
    "a stream that does not wait": ("waits", "has not waited"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_seen(found: Found, bug: str) -> None:
    where, word = SEEN[bug]
    assert where in found[bug], found[bug]
    assert word in str(found[bug][where])


def test_all_scenarios_were_run(found: Found) -> None:
    assert found.keys() == SCENARIOS.keys()
