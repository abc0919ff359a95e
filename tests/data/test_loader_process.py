"""The process and the memory that it shares; whole loaders are in test_loader.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from megabatch.data.augment import Augmentation
from megabatch.data.batches import Job, assemble_training
from megabatch.data.decode import EXACT
from megabatch.data.loader_process import LoaderProcess, SharedSlots, views
from megabatch.data.sources import ImageArray
from megabatch.errors import DataError


def test_a_slot_is_free_when_its_last_view_is_gone() -> None:
    slots = SharedSlots(10_000)
    first, memory = slots.lease()
    view = memory[:100].reshape(10, 10)
    part = view[3:5]
    second, other = slots.lease()
    assert {first, second} == {0, 1}
    del memory, view
    assert slots.lease()[0] == 2  # a part of the first is still looked at; this third one is dropped at once
    part[:] = 7
    del part
    assert {slots.lease()[0] for _ in range(4)} <= {0, 2}
    assert other.sum() == 0
    assert len(slots._maps) == 3
    slots.close()
    other[:] = 1  # memory outlives the file


def test_another_process_sees_the_same_bytes_and_nothing_has_a_name() -> None:
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    slots = SharedSlots(5000)
    _, zero = slots.lease()
    _, one = slots.lease()
    one[:3] = [1, 2, 3]
    code = (
        "import sys\nfrom megabatch.data.loader_process import SharedSlots\n"
        f"seen = SharedSlots({slots.slot_bytes}, {slots.descriptor}).look_at(1)\n"
        "assert seen[:3].tolist() == [1, 2, 3]\nseen[10] = 99\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, pass_fds=(slots.descriptor,), timeout=60)
    assert one[10] == 99
    assert not np.any(zero)
    assert slots.slot_bytes % 4096 == 0
    if before:
        assert set(os.listdir("/dev/shm")) <= before
    descriptor = slots.descriptor
    slots.close()
    assert not os.path.exists(f"/proc/self/fd/{descriptor}")


def test_images_and_labels_do_not_overlap() -> None:
    memory = np.zeros(5 * 7 * 7 * 3 + 8 * 6, dtype=np.uint8)
    images, labels = views(memory, 5, 7, 3)
    assert (images.shape, labels.shape, labels.dtype) == ((5, 7, 7, 3), (5,), np.dtype(np.int64))
    images[:] = 255
    assert not labels.any()
    labels[:] = -1
    assert (images == 255).all()


def test_it_loads_no_torch() -> None:
    code = "import sys, megabatch.data.loader_process\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


POLICY = Augmentation(crop="resized", flip=True)
JOB = Job(POLICY, 3, np.array([1, 1, 2]), np.array([4, 19, 0]))


def source(kind: type[ImageArray] = ImageArray) -> ImageArray:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 9, 7, 3), dtype=np.uint8)
    return kind("test", pixels, np.arange(20))


def prepared(process: LoaderProcess, slots: SharedSlots) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images 2 .. 5 of a ghost batch of 6 that was all zeros."""
    slot, memory = slots.lease()
    images, labels = views(memory, 6, 8, 3)
    images[:], labels[:] = 0, 0
    assert process.prepare(JOB, slot, slice(2, 5), 6, 8) == []
    return images, labels


def test_it_fills_its_part_and_no_more() -> None:
    slots = SharedSlots(10_000)
    process = LoaderProcess(source(), EXACT, False, slots)
    images, labels = prepared(process, slots)
    expected, expected_labels = assemble_training(source(), POLICY, 8, 3, JOB.epochs, JOB.samples)
    np.testing.assert_array_equal(images[2:5], expected)
    assert labels.tolist() == [0, 0, *expected_labels, 0]
    assert not images[[0, 1, 5]].any()
    process.close()


class Failing(ImageArray):
    def read(self, index: int) -> NDArray[np.uint8]:
        if index == 19:
            raise DataError("cannot decode the image 19")
        if index == 0:
            raise KeyError("a mistake of ours")
        return super().read(index)


def test_what_goes_wrong_there_is_raised_here() -> None:
    slots = SharedSlots(10_000)
    process = LoaderProcess(source(Failing), EXACT, False, slots)
    with pytest.raises(DataError, match="cannot decode the image 19"):
        prepared(process, slots)
    process.close()
    process = LoaderProcess(source(Failing), EXACT, True, slots)
    with pytest.raises(DataError, match="a loader process failed: KeyError: 'a mistake of ours'"):
        prepared(process, slots)
    process.close()


def test_the_process_ignores_ctrl_c_and_ends_when_asked() -> None:
    slots = SharedSlots(10_000)
    process = LoaderProcess(source(), EXACT, False, slots)
    prepared(process, slots)
    process._child.send_signal(signal.SIGINT)
    time.sleep(0.2)
    prepared(process, slots)
    process.close()
    assert process._child.returncode == 0  # it was not killed
    process.close()


def test_a_process_that_cannot_start_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    slots = SharedSlots(10_000)
    with pytest.raises(DataError, match="a loader process ended with code 1 before its first image"):
        prepared(LoaderProcess(source(), EXACT, False, slots), slots)


def test_no_process_outlives_the_one_that_made_it() -> None:
    code = """
import os, signal
from tests.data.test_loader_process import EXACT, LoaderProcess, SharedSlots, prepared, source
slots = SharedSlots(10_000)
process = LoaderProcess(source(), EXACT, False, slots)
prepared(process, slots)
print(process._child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    child = int(done.stdout)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
