"""The layout of a slot; what the process does is shown by tests/data/test_lanes.py."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from megabatch.data.child import views


def test_images_and_labels_do_not_overlap() -> None:
    memory = np.zeros(5 * 7 * 7 * 3 + 8 * 6, dtype=np.uint8)
    images, labels = views(memory, 5, 7, 3)
    assert (images.shape, labels.shape, labels.dtype) == ((5, 7, 7, 3), (5,), np.dtype(np.int64))
    images[:] = 255
    assert not labels.any()
    labels[:] = -1
    assert (images == 255).all()


def test_it_loads_no_torch() -> None:
    code = "import sys, megabatch.data.child\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
