from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from megabatch.data import downloads
from megabatch.data.idx import open_fashion_mnist, open_idx, read_idx
from megabatch.errors import DataError
from tests.data.conftest import idx_bytes, make_idx

VALUES = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)


@pytest.mark.parametrize("shape", [(24,), (2, 3, 4), (0, 5, 5), (1, 2, 3, 4)])
def test_round_trip(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    (tmp_path / "plain").write_bytes(idx_bytes(values))
    (tmp_path / "zipped.gz").write_bytes(gzip.compress(idx_bytes(values)))
    for name in ("plain", "zipped.gz"):
        np.testing.assert_array_equal(read_idx(tmp_path / name, num_dims=len(shape)), values)


def test_reads_a_file_written_out_by_hand(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes.fromhex("00000803 00000001 00000002 00000003 0a0b0c 0d0e0f"))
    assert read_idx(tmp_path / "x", num_dims=3).tolist() == [[[10, 11, 12], [13, 14, 15]]]


GOOD = idx_bytes(VALUES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with nothing; .* begins with 00000803"),
        (b"\x89PNG....", "begins with 89504e47"),
        (bytes([0, 0, 8, 1]) + GOOD[4:], "begins with 00000801"),  # dimensions of a label file
        (bytes([0, 0, 13, 3]) + GOOD[4:], "begins with 00000d03"),  # floats
        (GOOD[:10], "ends inside its header, after 10 bytes"),
        (GOOD[:-1], "has 39 bytes but its header 2x3x4 needs 40"),
        (GOOD + b"\0", "has 41 bytes but its header 2x3x4 needs 40"),
        (bytes([0, 0, 8, 3]) + b"\xff" * 12, "needs 79228162458924105385300197391"),
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_idx(tmp_path / "x", num_dims=3)
    (tmp_path / "x.gz").write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match=message):
        read_idx(tmp_path / "x.gz", num_dims=3)


def test_damaged_gzip(tmp_path: Path) -> None:
    zipped = gzip.compress(GOOD)
    flipped = bytearray(zipped)
    flipped[len(zipped) // 2] ^= 0xFF
    for content in (zipped[:-9], bytes(flipped), b"no gzip at all"):
        (tmp_path / "x.gz").write_bytes(content)
        with pytest.raises(DataError, match=r"cannot read .*x\.gz: .*; fetch the file again"):
            read_idx(tmp_path / "x.gz", num_dims=3)


def test_missing_file_is_named(tmp_path: Path) -> None:
    make_idx(tmp_path, "idx", zipped=True)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    assert len(open_idx(tmp_path, "train")) == 7
    with pytest.raises(DataError, match=r"has neither t10k-labels-idx1-ubyte nor t10k-labels-idx1-ubyte.gz"):
        open_idx(tmp_path, "val")


def test_label_count_mismatch(tmp_path: Path) -> None:
    make_idx(tmp_path, "idx", zipped=False)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(6, dtype=np.uint8)))
    with pytest.raises(DataError, match="has 7 images and 6 labels: the image at index 6 has no label"):
        open_idx(tmp_path, "train")


def test_fashion_mnist_without_a_path_is_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "SYSTEM_FOLDER", tmp_path / "absent")
    monkeypatch.setenv("MEGABATCH_DATA", str(tmp_path))
    with pytest.raises(DataError, match="fetch it with `megabatch data get fashion-mnist`"):
        open_fashion_mnist(None, "train")
    (tmp_path / "fashion-mnist").mkdir()
    make_idx(tmp_path / "fashion-mnist", "fashion-mnist", zipped=False)
    source = open_fashion_mnist(None, "val")
    assert source.name == "fashion-mnist val"
    assert source.num_classes == 10
