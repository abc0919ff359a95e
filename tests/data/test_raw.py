from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from megabatch.data.raw import RawImages
from megabatch.errors import DataError
from tests.data.conftest import MANY_SIZES, make_raw


def test_reading_is_a_view_of_the_file(tmp_path: Path) -> None:
    given = make_raw(tmp_path, MANY_SIZES)
    source = RawImages(tmp_path, "train")
    image = source.read(3)
    assert type(image) is np.ndarray
    assert not image.flags.writeable
    assert not image.flags.owndata
    assert len(pickle.dumps(source)) < 10_000  # the pixels stay where they are
    assert given.images is not None


@pytest.mark.parametrize("change", ["cut", "grow", "no table", "broken table"])
def test_files_that_do_not_fit_are_refused(tmp_path: Path, change: str) -> None:
    make_raw(tmp_path, MANY_SIZES)
    raw, table = tmp_path / "train-00001.raw", tmp_path / "train-00001.npz"
    if change == "cut":
        raw.write_bytes(raw.read_bytes()[:-1])
    elif change == "grow":
        raw.write_bytes(raw.read_bytes() + b"\0")
    elif change == "no table":
        table.unlink()
    else:
        table.write_bytes(table.read_bytes()[:50])
    with pytest.raises(DataError, match=r"(has \d+ bytes, its table asks for \d+|cannot read .*train-00001.npz)"):
        RawImages(tmp_path, "train")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("offsets", -1, "offsets that are not those of images one after the other"),
        ("offsets", 2**40, "offsets that are not those of images one after the other"),
        ("shapes", -3, "an image of no possible size"),
        ("shapes", 2**40, "an image of no possible size"),
    ],
)
def test_tables_that_point_beyond_the_file_are_refused(tmp_path: Path, name: str, value: int, message: str) -> None:
    make_raw(tmp_path, MANY_SIZES)
    path = tmp_path / "train-00001.npz"
    with np.load(path) as stored:
        arrays = {one: stored[one].astype(np.int64) for one in stored.files}
    arrays[name].flat[0] = value
    np.savez(path, **arrays)
    with pytest.raises(DataError, match=message):
        RawImages(tmp_path, "train")
