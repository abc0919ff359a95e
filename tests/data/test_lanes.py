"""Both kinds of lanes on one task; whole loaders with them are in test_loader.py."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from megabatch.data.assemble import Job, assemble_training
from megabatch.data.augment import Augmentation
from megabatch.data.child import views
from megabatch.data.decode import EXACT
from megabatch.data.lanes import LaneTask, OwnProcess, SameProcess, read_message, send_message
from megabatch.data.slots import Slots
from megabatch.data.sources import ImageArray
from megabatch.errors import DataError

POLICY = Augmentation(crop="resized", flip=True)


def source(kind: type[ImageArray] = ImageArray) -> ImageArray:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 9, 7, 3), dtype=np.uint8)
    return kind("test", pixels, np.arange(20))


def task_in(slots: Slots, size: int = 8) -> LaneTask:
    """Images 2 .. 5 of a ghost batch of 6."""
    slot, memory = slots.lease()
    images, labels = views(memory, 6, size, 3)
    job = Job(POLICY, 3, np.array([1, 1, 2]), np.array([4, 19, 0]))
    return LaneTask(job, 6, 2, 5, size, slot, images, labels)


def check(task: LaneTask) -> None:
    expected, labels = assemble_training(source(), POLICY, 8, 3, task.job.epochs, task.job.samples)
    np.testing.assert_array_equal(task.images[2:5], expected)
    assert task.labels.tolist() == [0, 0, *labels, 0]
    assert not task.images[[0, 1, 5]].any()


def test_both_kinds_fill_their_part_and_no_more() -> None:
    slots = Slots(10_000)
    here = SameProcess(source(), EXACT, False)
    there = OwnProcess(source(), EXACT, False, slots)
    for lane in (here, there):
        task = task_in(slots)
        task.images[:], task.labels[:] = 0, 0
        assert lane.prepare(task) == []
        check(task)
        lane.close()


class Failing(ImageArray):
    def read(self, index: int) -> NDArray[np.uint8]:
        if index == 19:
            raise DataError("cannot decode the image 19")
        if index == 0:
            raise KeyError("a mistake of ours")
        return super().read(index)


def test_what_goes_wrong_there_is_raised_here() -> None:
    slots = Slots(10_000)
    lane = OwnProcess(source(Failing), EXACT, False, slots)
    with pytest.raises(DataError, match="cannot decode the image 19"):
        lane.prepare(task_in(slots))
    lane.close()
    lane = OwnProcess(source(Failing), EXACT, True, slots)
    with pytest.raises(DataError, match="a loader process failed: KeyError: 'a mistake of ours'"):
        lane.prepare(task_in(slots))
    lane.close()


def test_the_process_ignores_ctrl_c_and_ends_when_asked() -> None:
    slots = Slots(10_000)
    lane = OwnProcess(source(), EXACT, False, slots)
    lane.prepare(task_in(slots))
    lane._child.send_signal(signal.SIGINT)
    time.sleep(0.2)
    task = task_in(slots)
    lane.prepare(task)
    began = time.monotonic()
    lane.close()
    assert lane._child.returncode == 0
    assert time.monotonic() - began < 4
    lane.close()


def test_a_process_that_cannot_start_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    slots = Slots(10_000)
    with pytest.raises(DataError, match="a loader process ended with code 1 before its first image"):
        OwnProcess(source(), EXACT, False, slots).prepare(task_in(slots))


def test_no_process_outlives_the_one_that_made_it() -> None:
    code = """
import os, signal
from tests.data.test_lanes import EXACT, OwnProcess, Slots, source, task_in
slots = Slots(10_000)
lane = OwnProcess(source(), EXACT, False, slots)
lane.prepare(task_in(slots))
print(lane._child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    child = int(done.stdout)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_messages() -> None:
    pipe = io.BytesIO()
    sent: list[Any] = [{"a": 1}, None, list(range(100))]
    for message in sent:
        send_message(pipe, message)
    pipe.seek(0)
    assert [read_message(pipe) for _ in sent] == sent
    for cut in (0, 3, 12):
        with pytest.raises(EOFError):
            read_message(io.BytesIO(pipe.getvalue()[:cut]))
