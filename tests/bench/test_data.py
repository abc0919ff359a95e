from __future__ import annotations

from pathlib import Path

import pytest

from megabatch.bench.data import STAGES, Speed, measure_speed
from megabatch.data.augment import Augmentation
from megabatch.data.decode import EXACT
from megabatch.data.formats import open_source
from megabatch.data.sources import Source
from tests.data.conftest import MANY_SIZES, make_folder


@pytest.fixture(params=["encoded", "in memory"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    if request.param == "in memory":
        return open_source("generated", None, "train", num_images=40, image_size=24)
    make_folder(tmp_path, MANY_SIZES, 0)
    return open_source("folder", tmp_path, "train", memory_limit_bytes=0)


def test_stages_add_up_and_all_are_there(source: Source) -> None:
    policy = Augmentation(crop="resized", flip=True, brightness=0.3)
    speed = measure_speed(source, policy, 16, EXACT, num_images=8, rounds=3)
    assert tuple(speed.microseconds) == STAGES
    assert all(value >= 0 for value in speed.microseconds.values())
    assert speed.microseconds["decode"] > 0
    assert speed.microseconds["augment"] > 0
    assert len(speed.total_microseconds) == 3
    assert min(speed.total_microseconds) >= max(speed.microseconds["decode"] * 0.2, 1)
    assert speed.as_table()["rounds"] == 3


def test_other_crops(source: Source) -> None:
    speed = measure_speed(source, Augmentation(crop="pad", padding=2, flip=True), 16, EXACT, 8, 2)
    assert speed.images_per_core_second > 0
    speed = measure_speed(source, Augmentation(brightness=0.3), 16, EXACT, 8, 2)
    assert speed.microseconds["augment"] > 0


def test_cores_follow_from_the_median_round() -> None:
    speed = Speed({}, [900.0, 1000.0, 5000.0], 10, "x")
    assert speed.images_per_core_second == 1000
    assert speed.cores_for(2500) == 2.5
    assert speed.as_table()["slowest_round"] == 200
