from __future__ import annotations

from pathlib import Path

import pytest

from megabatch.data.sources import open_source
from megabatch.data.verify import verify
from tests.data.conftest import MANY_SIZES, ImageSet, make_folder


@pytest.mark.parametrize("jobs", [1, 3])
def test_broken_images_and_empty_classes_are_found(tmp_path: Path, jobs: int) -> None:
    make_folder(tmp_path, MANY_SIZES, 0)
    (tmp_path / "train" / "bee" / "004.png").write_bytes(b"")
    (tmp_path / "train" / "cat" / "010.png").write_bytes(b"half an image")
    source = open_source("folder", tmp_path, "train", memory_limit_bytes=0, num_classes=5)
    done: list[int] = []
    findings = verify(source, jobs, done.append)
    assert [one.index for one in findings.broken] == [4, 10]
    assert findings.broken[0].name.endswith("bee/004.png")
    assert findings.class_counts.tolist() == [4, 5, 2, 0, 0]
    assert findings.empty_classes == [3, 4]
    assert sum(done) == findings.num_images == 11
    sizes = [size for number, size in enumerate(MANY_SIZES["train"]) if number not in (4, 10)]
    assert findings.smallest == min(sizes, key=lambda s: s[0] * s[1])
    assert findings.largest == max(sizes, key=lambda s: s[0] * s[1])


def test_whole_sets_of_every_kind(image_set: ImageSet) -> None:
    source = open_source(image_set.kind, image_set.path, "train", **image_set.options)
    findings = verify(source, 2)
    assert findings.broken == ()
    assert findings.class_counts.sum() == len(source)
