from __future__ import annotations

import os
import subprocess
import sys

import numpy as np

from megabatch.data.slots import Slots


def test_a_slot_is_free_when_its_last_view_is_gone() -> None:
    slots = Slots(10_000)
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
    assert slots.num_slots == 3
    slots.close()
    other[:] = 1  # memory outlives the file


def test_another_process_sees_the_same_bytes_and_nothing_has_a_name() -> None:
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    slots = Slots(5000)
    _, zero = slots.lease()
    _, one = slots.lease()
    one[:3] = [1, 2, 3]
    code = (
        "import sys\nfrom megabatch.data.slots import Slots\n"
        f"seen = Slots({slots.slot_bytes}, {slots.descriptor}).look_at(1)\n"
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
