from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megabatch.data import pack as module
from megabatch.data.formats import open_source
from megabatch.data.jpeg import read_jpeg_header
from megabatch.data.pack import Format, Packing, pack
from megabatch.data.sources import EncodedImages, ImageArray, Source
from megabatch.errors import DataError
from tests.data.conftest import write_tar
from tests.data.images import encoded, photograph, turned

FORMATS: list[Format] = ["tar", "parquet", "raw"]


@pytest.fixture
def photographs(tmp_path: Path) -> Source:
    """JPEG of several sizes, one turned, and a PNG."""
    contents = [encoded(photograph(40 + 7 * i, 60 - 3 * i, seed=i)) for i in range(9)]
    contents += [turned(photograph(50, 70), 6), encoded(photograph(33, 44), "PNG")]
    members = []
    for i, content in enumerate(contents):
        members += [(f"{i:03}.{'png' if i == 10 else 'jpg'}", content), (f"{i:03}.cls", b"%d" % (i % 4))]
    (tmp_path / "given").mkdir()
    write_tar(tmp_path / "given" / "train-0.tar", members)
    return open_source("tar", tmp_path / "given", "train", memory_limit_bytes=0)


def opened(folder: Path, to: str) -> Source:
    options: dict[str, Any] = {} if to == "raw" else {"memory_limit_bytes": 0}
    return open_source(to, folder, "train", **options)


def sums(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if ".npz" not in path.name
    }


@pytest.mark.parametrize("to", FORMATS)
def test_the_same_images_come_out(photographs: Source, tmp_path: Path, to: Format) -> None:
    done: list[int] = []
    counts = pack(photographs, tmp_path / "out", "train", Packing(to, images_per_shard=4), 3, done.append)
    assert (counts["images"], counts["shards"], counts["broken"], sum(done)) == (11, 3, 0, 11)
    packed = opened(tmp_path / "out", to)
    assert packed.labels.tolist() == photographs.labels.tolist()
    for index in range(11):
        np.testing.assert_array_equal(packed.read(index), photographs.read(index))
        if packed.read_bytes(index) is not None:
            assert packed.read_bytes(index) == photographs.read_bytes(index)


@pytest.mark.parametrize("to", FORMATS)
def test_bytes_do_not_depend_on_threads_or_interruptions(
    photographs: Source, tmp_path: Path, to: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    packing = Packing(to, resize=32, images_per_shard=4)
    pack(photographs, tmp_path / "one", "train", packing, 1)
    real, calls = module._prepare, []

    def interrupted(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(module, "_prepare", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pack(photographs, tmp_path / "two", "train", packing, 1)
    before = sums(tmp_path / "two")
    assert [name for name in before if name.endswith(to)] == [f"train-00000.{to}"]
    counts = pack(photographs, tmp_path / "two", "train", packing, 4)
    assert counts["kept_shards"] == 1
    assert sums(tmp_path / "two") == sums(tmp_path / "one")


def test_smaller_images(photographs: Source, tmp_path: Path) -> None:
    pack(photographs, tmp_path / "out", "train", Packing(resize=36, quality=80), 2)
    small = opened(tmp_path / "out", "tar")
    assert isinstance(small, EncodedImages)
    assert isinstance(photographs, EncodedImages)
    for index in range(11):
        was, now = photographs.read(index).shape, small.read(index).shape
        header = read_jpeg_header(small.read_bytes(index))
        if min(was[:2]) <= 36 and index != 10:
            assert small.read_bytes(index) == photographs.read_bytes(index)
        elif index == 10:
            assert header is not None  # a PNG is encoded anew, but no larger than it was
            assert now == was
        else:
            assert min(now[:2]) == 36
            assert abs(now[0] / now[1] - was[0] / was[1]) < 0.03
            assert header is not None
            assert header.upright


def test_pixels_without_encoding_stay_exact(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 6, 7, 1), dtype=np.uint8)
    source = ImageArray("grey", pixels, [0, 1, 2, 1, 0])
    pack(source, tmp_path, "train", Packing("tar"), 1)
    packed = open_source("tar", tmp_path, "train", channels=1)
    for index in range(5):
        np.testing.assert_array_equal(packed.read(index), pixels[index])


def test_broken_images_are_left_out_and_listed(tmp_path: Path) -> None:
    members = []
    for i in range(6):
        content = b"" if i == 2 else encoded(photograph(20, 20, seed=i))
        members += [(f"{i}.jpg", content), (f"{i}.cls", b"%d" % i)]
    (tmp_path / "given").mkdir()
    write_tar(tmp_path / "given" / "train-0.tar", members)
    source = open_source("tar", tmp_path / "given", "train", memory_limit_bytes=0)
    counts = pack(source, tmp_path / "out", "train", Packing(resize=10), 2, max_broken_share=0.5)
    assert (counts["images"], counts["broken"]) == (5, 1)
    assert opened(tmp_path / "out", "tar").labels.tolist() == [0, 1, 3, 4, 5]
    (line,) = (tmp_path / "out" / "train.broken.jsonl").read_text().splitlines()
    assert json.loads(line)["index"] == 2
    with pytest.raises(DataError, match="1 of 6 images read were broken"):
        pack(source, tmp_path / "strict", "train", Packing(resize=10), 2, max_broken_share=0.0)


def test_another_pack_is_not_continued(photographs: Source, tmp_path: Path) -> None:
    pack(photographs, tmp_path / "out", "train", Packing(), 1)
    with pytest.raises(DataError, match=r"holds another pack of train \(other resize\); give an empty folder"):
        pack(photographs, tmp_path / "out", "train", Packing(resize=20), 1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "train-00000.tar").write_bytes(b"somebody's")
    with pytest.raises(DataError, match=r"already holds train-00000.tar"):
        pack(photographs, tmp_path / "full", "train", Packing(), 1)
