from __future__ import annotations

import json
from pathlib import Path

import pytest

from megabatch.data.broken_images import JUDGED_OVER_IMAGES, Broken, BrokenLog
from megabatch.errors import DataError


def some(*indices: int) -> list[Broken]:
    return [Broken(index, f"image {index}", "it is cut short") for index in indices]


def test_each_image_is_listed_once(tmp_path: Path) -> None:
    log = BrokenLog(0.5, tmp_path / "a" / "broken.jsonl", "set")
    log.note(10, [])
    assert not (tmp_path / "a").exists()
    log.note(10, some(3, 4))
    log.note(10, some(4, 9))
    lines = [json.loads(line) for line in (tmp_path / "a" / "broken.jsonl").read_text().splitlines()]
    assert lines == [
        {"set": "set", "index": index, "name": f"image {index}", "reason": "it is cut short"} for index in (3, 4, 9)
    ]
    assert (log.num_read, log.num_broken) == (30, 4)


def test_the_share_is_taken_of_no_few_images() -> None:
    log = BrokenLog(0.001)
    allowed = int(0.001 * JUDGED_OVER_IMAGES)
    log.note(10, some(*range(allowed)))
    with pytest.raises(
        DataError, match=rf"{allowed + 1} of 20 images read were broken, data.max_broken_share allows 0.001"
    ):
        log.note(10, some(100))
    late = BrokenLog(0.001)
    late.note(10 * JUDGED_OVER_IMAGES, some(*range(10 * allowed)))
    with pytest.raises(DataError, match=f"{10 * allowed + 1} of"):
        late.note(0, some(7))


def test_none_is_allowed_with_zero_and_all_with_one() -> None:
    with pytest.raises(DataError, match=r"1 of 5 images read were broken, .*; the last: it is cut short"):
        BrokenLog(0.0).note(5, some(1))
    BrokenLog(1.0).note(5, some(*range(5)))


def test_a_list_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*; make room there"):
        BrokenLog(0.5, tmp_path / "file" / "broken.jsonl").note(5, some(1))
