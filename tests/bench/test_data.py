from __future__ import annotations

from pathlib import Path

import pytest

from megabatch.bench import data as module
from megabatch.bench.data import STAGES, measure_speed
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
    microseconds = speed["microseconds_per_image"]
    assert tuple(microseconds) == STAGES
    assert all(value >= 0 for value in microseconds.values())
    assert microseconds["decode"] > 0
    assert microseconds["augment"] > 0
    assert speed["rounds"] == 3
    assert 1e6 / speed["fastest_round"] >= max(microseconds["decode"] * 0.2, 1)


def test_other_crops(source: Source) -> None:
    speed = measure_speed(source, Augmentation(crop="pad", padding=2, flip=True), 16, EXACT, 8, 2)
    assert speed["images_per_core_second"] > 0
    speed = measure_speed(source, Augmentation(brightness=0.3), 16, EXACT, 8, 2)
    assert speed["microseconds_per_image"]["augment"] > 0


def test_the_middle_round_counts_and_the_extremes_are_told(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = iter([1.0, 9e-3, 10e-3, 50e-3])  # the first is not counted
    monkeypatch.setattr(module, "_one_round", lambda *_: dict.fromkeys(STAGES, 0.0) | {"read": next(rounds)})
    speed = measure_speed(source, Augmentation(), 16, EXACT, num_images=10, rounds=3)
    assert speed["images_per_core_second"] == pytest.approx(1000)
    assert (speed["slowest_round"], speed["fastest_round"]) == pytest.approx((200, 10 / 9e-3))
