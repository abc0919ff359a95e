from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from megabatch.data.assemble import GREY, assemble_evaluation
from megabatch.data.broken import BrokenLog
from megabatch.data.evaluation import evaluation_batches
from megabatch.data.feeding import Feeding
from megabatch.data.sources import Source, open_source
from megabatch.errors import DataError
from tests.data.conftest import MANY_SIZES, make_folder


@pytest.fixture
def images(tmp_path: Path) -> Source:
    make_folder(tmp_path, MANY_SIZES, 0)
    return open_source("folder", tmp_path, "train", memory_limit_bytes=0)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("begin", "end", "size"), [(0, 11, 4), (0, 11, 100), (2, 9, 1), (5, 5, 3)])
def test_every_image_once_and_in_order(images: Source, threads: int, begin: int, end: int, size: int) -> None:
    batches = list(evaluation_batches(images, 8, begin, end, size, Feeding(threads=threads)))
    assert [len(labels) for _, labels in batches] == [min(size, end - at) for at in range(begin, end, size)]
    if batches:
        expected, labels = assemble_evaluation(images, 8, np.arange(begin, end))
        np.testing.assert_array_equal(np.concatenate([p for p, _ in batches]), expected)
        assert np.concatenate([found for _, found in batches]).tolist() == labels.tolist()


def test_a_broken_image_is_grey_under_its_own_label(images: Source, tmp_path: Path) -> None:
    (tmp_path / "train" / "bee" / "005.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"005.png"):
        list(evaluation_batches(images, 8, 0, 11, 4, Feeding(threads=2)))
    log = BrokenLog(0.01, tmp_path / "broken.jsonl", images.name)
    found = list(evaluation_batches(images, 8, 0, 11, 4, Feeding(threads=2, broken=log)))
    shown, labels = found[1]
    assert (shown[1] == GREY).all()
    assert (shown[0] != GREY).any()
    assert labels[1] == 1
    assert (log.num_broken, log.num_read) == (1, 11)
    assert "005.png" in (tmp_path / "broken.jsonl").read_text()


def test_leaving_early_ends_the_threads(images: Source) -> None:
    batches = evaluation_batches(images, 8, 0, 11, 1, Feeding(threads=3))
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("evaluation")]
