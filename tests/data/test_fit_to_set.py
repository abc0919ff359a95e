"""A recipe meets a set: kind, classes, mean and batch follow it, what is set by hand stays, and a person is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from megabatch.data.fit_to_set import batch_note, fit_to_set
from megabatch.errors import DataError
from megabatch.recipes import load_config
from tests.data.images import encoded, photograph


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGABATCH_DATA", str(tmp_path / "cache"))


def photos(root: Path, *counts: int) -> Path:
    for label, count in enumerate(counts):
        (root / f"class{label}").mkdir(parents=True)
        for number in range(count):
            pixels = photograph(24, 24, seed=100 * label + number)
            (root / f"class{label}" / f"{number}.jpg").write_bytes(encoded(pixels))
    return root


def test_grey_demo_meets_photos(tmp_path: Path) -> None:
    path = photos(tmp_path / "photos", 10, 10, 10)
    fitted = fit_to_set(load_config("demo"), path, ())
    config = load_config("demo", list(fitted.overrides))
    assert (config.data.source, config.data.num_classes, len(config.data.mean)) == ("folder", 3, 3)
    said = "\n".join(fitted.lines)
    assert "made for 60,000 images, the set has 24" in said
    assert "measured now on 24 images" in said


def test_the_batch_of_photos_follows_the_set(tmp_path: Path) -> None:
    path = photos(tmp_path / "photos", 30, 30)
    config = load_config("photos", list(fit_to_set(load_config("photos"), path, ()).overrides))
    assert (config.train.global_batch_size, config.train.ghost_batch_size) == (8, 8)  # of 48 images
    assert config.optimizer.lr_factor == 8 / 128
    by_hand = ("train.global_batch_size=32", "data.mean=[0.5]", "data.std=[0.5]")
    kept = load_config("photos", [*fit_to_set(load_config("photos"), path, by_hand).overrides, *by_hand])
    assert (kept.train.global_batch_size, kept.optimizer.lr_factor, kept.data.mean) == (32, 1.0, (0.5,))


def test_a_paper_with_other_classes(tmp_path: Path) -> None:
    fitted = fit_to_set(load_config("goyal2017"), photos(tmp_path / "photos", 5, 5), ())
    assert any("made for 1,000 classes, the set has 2" in line for line in fitted.lines)
    assert any("--scale" in line and "tune" in line for line in fitted.lines)


def test_a_learning_rate_of_another_batch() -> None:
    published = load_config("goyal2017")
    [line] = batch_note(published, load_config("goyal2017", ["train.global_batch_size=64"]))
    assert "up to 3.2, was made for a global batch of 8,192 and this one is 64" in line
    assert "optimizer.lr_factor=0.00781" in line
    both = ["train.global_batch_size=64", "optimizer.lr_factor=0.0078"]
    assert batch_note(published, load_config("goyal2017", both)) == []
    assert batch_note(published, published) == []


def test_a_class_without_validation_images_is_named(tmp_path: Path) -> None:
    photos(tmp_path / "set" / "train", 6, 6, 6)
    photos(tmp_path / "set" / "val", 2, 2)
    lines = fit_to_set(load_config("photos"), tmp_path / "set", ()).lines
    assert "warning        set val has no image of 1 of 3 classes: 'class2'" in lines
    photos(tmp_path / "whole", 6, 6)
    assert not any("no image" in line for line in fit_to_set(load_config("photos"), tmp_path / "whole", ()).lines)


def test_sets_that_cannot_be_trained_on(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has one class, training needs at least two"):
        fit_to_set(load_config("photos"), photos(tmp_path / "one", 4), ())
    with pytest.raises(DataError, match="class1 has one image, a class needs two to be split"):
        fit_to_set(load_config("photos"), photos(tmp_path / "few", 4, 1), ())
    with pytest.raises(DataError, match=r"class1 has no images .*; fill the class folder or remove it"):
        fit_to_set(load_config("photos"), photos(tmp_path / "empty", 4, 0), ())
    with pytest.raises(DataError, match="nowhere does not exist"):
        fit_to_set(load_config("photos"), tmp_path / "nowhere", ())
