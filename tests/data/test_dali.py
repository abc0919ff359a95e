"""DALI on the CPU: our order, our crops, its pixels."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from megabatch.data.augment import Augmentation
from megabatch.data.dali import check_dali
from megabatch.data.decode import Decoding
from megabatch.data.feeding import Feeding
from megabatch.data.loader import Ghost, GhostLoader
from megabatch.data.sources import Source, open_source
from megabatch.errors import ConfigError
from megabatch.schedule.batch import iterate_steps
from tests.data.conftest import write_tar
from tests.data.images import encoded, photograph, turned

POLICY = Augmentation(crop="resized", flip=True)


def photographs(folder: Path, odd: bytes | None = None) -> Source:
    members = []
    for i in range(12):
        content = odd if odd is not None and i == 7 else encoded(photograph(90 + 5 * i, 160 - 5 * i, seed=i))
        members += [(f"{i:03}.jpg", content), (f"{i:03}.cls", b"%d" % i)]
    write_tar(folder / "train-0.tar", members)
    return open_source("tar", folder, "train", memory_limit_bytes=0)


def ghosts(source: Source, decoding: Decoding, size: int = 48, start: int = 0) -> list[Ghost]:
    steps = iterate_steps(lambda _: 4, 4, 12, 24, start_samples=start)
    loader = GhostLoader(source, POLICY, size, 3, steps, rank=0, world_size=1, feeding=Feeding(decoding=decoding))
    found = [ghost for _, of_step in loader for ghost in of_step]
    loader.close()
    return found


def test_without_dali_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(ConfigError, match=r"pip install 'megabatch\[dali\]'"):
        check_dali()


@pytest.mark.parametrize("odd", [None, turned(photograph(80, 100), 6), encoded(photograph(60, 50), "PNG")])
def test_crops_and_order_are_ours(tmp_path: Path, odd: bytes | None) -> None:
    pytest.importorskip("nvidia.dali")
    source = photographs(tmp_path, odd)
    for theirs, mine in zip(ghosts(source, Decoding("dali")), ghosts(source, Decoding()), strict=True):
        assert theirs.labels.tolist() == mine.labels.tolist()
        difference = np.abs(theirs.images.numpy().astype(int) - mine.images.numpy())
        assert difference.mean() < 3
    again = ghosts(source, Decoding("dali"))
    resumed = ghosts(source, Decoding("dali"), start=8)
    for one, other in zip(again[2:], resumed, strict=True):
        assert (one.images == other.images).all()
