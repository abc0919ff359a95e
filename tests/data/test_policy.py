"""RandAugment and TrivialAugment: each operation against Pillow's own or a slow loop, and how often each is drawn."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps

from megabatch.data import policy
from megabatch.data.augment import OPERATION_DRAWS, Augmentation
from megabatch.data.policy import OPERATIONS, RAND, TRIVIAL, Ranges, apply_policy, operate
from megabatch.data.randomness import keyed_uniforms
from tests.data.images import photograph

Pixels = NDArray[np.uint8]


def pillows(image: Pixels, operation: str, strength: float, sign: float, ranges: Ranges) -> Image.Image:
    """What Pillow makes of it."""
    pil, factor = Image.fromarray(image), 1 + sign * strength * ranges.factor
    match operation:
        case "brightness":
            return ImageEnhance.Brightness(pil).enhance(factor)
        case "contrast":
            return ImageEnhance.Contrast(pil).enhance(factor)
        case "color":
            return ImageEnhance.Color(pil).enhance(factor)
        case "sharpness":
            return ImageEnhance.Sharpness(pil).enhance(factor)
        case "posterize":
            return ImageOps.posterize(pil, 8 - round(strength * ranges.bits))
        case "solarize":
            return ImageOps.solarize(pil, int(np.ceil(255 * (1 - strength))))
        case "auto_contrast":
            return ImageOps.autocontrast(pil)
        case "equalize":
            return ImageOps.equalize(pil)
    return pil


@pytest.mark.parametrize("operation", [one for one in OPERATIONS if not one.startswith(("shear", "trans", "rotate"))])
@pytest.mark.parametrize("ranges", [TRIVIAL, RAND], ids=["trivial", "rand"])
def test_colours_are_those_of_pillow(operation: str, ranges: Ranges) -> None:
    changed = 0
    for seed, strength, sign in ((0, 0.0, 1.0), (1, 0.3, 1.0), (2, 0.5, -1.0), (3, 1.0, 1.0), (4, 1.0, -1.0)):
        image = (photograph(40, 31, seed) // 2 + 40).astype(np.uint8)  # room to stretch
        found = operate(image, operation, strength, sign, ranges).astype(int)
        wanted = np.asarray(pillows(image, operation, strength, sign, ranges)).astype(int)
        # Pillow cuts fractions off where we round, and takes the mean grey in whole numbers.
        assert abs(found - wanted).max() <= (0 if operation in ("posterize", "solarize", "equalize") else 2)
        changed += int((found != image).any())
    # No value is above 167: solarize has nothing to turn around at 0 and at 0.3.
    assert changed == {"identity": 0, "auto_contrast": 5, "equalize": 5, "solarize": 3}.get(operation, 4)


def moved_slowly(image: Pixels, operation: str, by: float) -> NDArray[np.float64]:
    """Each pixel from where it was, counted from the image's centre, between its four neighbours."""
    height, width = image.shape[:2]
    out = np.full(image.shape, np.nan)
    for y in range(height):
        for x in range(width):
            right, down = x + 0.5 - width / 2, y + 0.5 - height / 2
            angle = np.deg2rad(by)
            match operation:
                case "shear_x":
                    right += by * down
                case "shear_y":
                    down += by * right
                case "translate_x":
                    right += by
                case "translate_y":
                    down += by
                case "rotate":
                    right, down = (
                        np.cos(angle) * right + np.sin(angle) * down,
                        np.cos(angle) * down - np.sin(angle) * right,
                    )
            at_x, at_y = right + width / 2 - 0.5, down + height / 2 - 0.5
            left, top = int(np.floor(at_x)), int(np.floor(at_y))
            if not (-0.5 <= at_x < width - 0.5 and -0.5 <= at_y < height - 0.5):
                out[y, x] = 0
            elif 0 <= left < width - 1 and 0 <= top < height - 1:  # else on the border: either answer will do
                part_x, part_y = at_x - left, at_y - top
                upper = (1 - part_x) * image[top, left] + part_x * image[top, left + 1]
                lower = (1 - part_x) * image[top + 1, left] + part_x * image[top + 1, left + 1]
                out[y, x] = (1 - part_y) * upper + part_y * lower
    return out


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("operation", ["shear_x", "shear_y", "translate_x", "translate_y", "rotate"])
def test_pixels_move_as_a_slow_loop_moves_them(operation: str, channels: int) -> None:
    image = np.ascontiguousarray(photograph(24, 33)[..., :channels])
    largest = {"shear_x": 0.3, "shear_y": 0.3, "translate_x": 33 * 150 / 331, "translate_y": 24 * 150 / 331}
    for strength, sign in ((0.0, 1.0), (0.4, -1.0), (1.0, 1.0)):
        found = operate(image, operation, strength, sign, RAND).astype(float)
        wanted = moved_slowly(image, operation, sign * strength * largest.get(operation, 30.0))
        known = ~np.isnan(wanted)
        assert known.mean() > 0.8
        assert abs(found - wanted)[known].max() <= 1.0 + 1e-9  # Pillow cuts fractions off
    assert np.array_equal(operate(image, operation, 0.0, 1.0, RAND), image)


def test_a_plain_image_stays_as_it_is_or_at_least_whole() -> None:
    flat = np.full((9, 7, 3), 77, dtype=np.uint8)
    for operation in ("auto_contrast", "equalize", "sharpness", "contrast", "color"):
        assert (operate(flat, operation, 1.0, 1.0, TRIVIAL) == 77).all(), operation
    for size in ((1, 1), (2, 5)):
        tiny = np.full((*size, 1), 9, dtype=np.uint8)
        for operation in OPERATIONS:
            assert operate(tiny, operation, 1.0, -1.0, TRIVIAL).shape == tiny.shape


@pytest.mark.parametrize(("kind", "number"), [("trivial", 1), ("rand", 3)])
def test_operations_strengths_and_signs_are_drawn_evenly(
    kind: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, float, float]] = []

    def note(image: Pixels, operation: str, strength: float, sign: float, ranges: Ranges) -> Pixels:
        assert ranges is (TRIVIAL if kind == "trivial" else RAND)
        asked.append((operation, strength, sign))
        return image

    monkeypatch.setattr(policy, "operate", note)
    changes = Augmentation(policy=kind, rand_ops=3, rand_magnitude=12)  # type: ignore[arg-type]
    assert changes.num_draws == 1 + number * OPERATION_DRAWS
    draws = keyed_uniforms(3, 0, np.arange(6000), changes.num_draws)[:, changes.draws_of("policy")]
    apply_policy(np.zeros((6000, 1, 1, 3), dtype=np.uint8), changes, draws)
    assert len(asked) == 6000 * number
    counts = Counter(operation for operation, _, _ in asked)
    assert counts.keys() == set(OPERATIONS)
    assert max(counts.values()) < 1.3 * min(counts.values())
    assert {strength for _, strength, _ in asked} == ({n / 30 for n in range(31)} if kind == "trivial" else {0.4})
    assert abs(np.mean([sign for _, _, sign in asked])) < 0.05


def test_an_image_does_not_depend_on_its_company() -> None:
    changes = Augmentation(policy="rand", rand_ops=2, rand_magnitude=20)
    images = np.stack([photograph(16, 16, seed) for seed in range(6)])
    draws = keyed_uniforms(0, 0, np.arange(6), changes.num_draws)[:, changes.draws_of("policy")]
    together = images.copy()
    apply_policy(together, changes, draws)
    for at in range(6):
        alone = images[at : at + 1].copy()
        apply_policy(alone, changes, draws[at : at + 1])
        np.testing.assert_array_equal(alone[0], together[at])
    assert (together != images).any()


def test_other_draws_stay_what_they_were_without_a_policy() -> None:
    plain = Augmentation(crop="resized", noise_std=1.0, erase=0.5)
    changes = Augmentation(crop="resized", noise_std=1.0, erase=0.5, policy="trivial", mixup=0.2)
    for part in ("crop", "distort", "erase"):
        assert plain.draws_of(part) == changes.draws_of(part)
    assert (plain.num_draws, changes.num_draws) == (41 + 5 + 5, 41 + 5 + 5 + 3 + 4)
