"""The compiled helper against Pillow, to the bit."""

from __future__ import annotations

import io
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

import megabatch.data as package
from megabatch.data.jpeg import reduction_for
from megabatch.data.native import Native, find_libjpeg, native, why_not
from megabatch.machine import build
from tests.data.images import encoded, photograph, random_box, reference

KINDS: dict[str, dict[str, Any]] = {
    "4:2:0": {"subsampling": 2},
    "4:2:2": {"subsampling": 1},
    "4:4:4": {"subsampling": 0},
    "progressive": {"progressive": True},
    "progressive-4:4:4": {"progressive": True, "subsampling": 0},
    "restart-marks": {"restart_marker_rows": 1},
}


@pytest.fixture
def helper() -> Native:
    found = native()
    if found is None:
        pytest.skip(f"no compiled helper: {why_not()}")
    return found


def scaled(image: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    pil = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
    return np.asarray(pil.resize((size[1], size[0]), Image.Resampling.BILINEAR)).reshape(*size, image.shape[2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grey", [False, True])
def test_a_part_of_an_image_is_what_pillow_makes_of_it(helper: Native, kind: str, grey: bool) -> None:
    rng = np.random.default_rng(1)
    for height, width in ((97, 131), (64, 64), (33, 17), (8, 200)):
        image = Image.fromarray(photograph(height, width))
        content = encoded(image.convert("L") if grey else image, **KINDS[kind])
        for _ in range(12):
            box, mirror = random_box(rng, height, width), bool(rng.integers(2))
            size = (int(rng.integers(1, 60)), int(rng.integers(1, 60)))
            out = np.empty((*size, 3), dtype=np.uint8)
            part = reduction_for(box, *size, may_reduce=False)
            assert helper.decode(content, (height, width), *part, mirror, out)
            np.testing.assert_array_equal(out, reference(content, box, mirror, size), err_msg=f"{box} {size} {mirror}")


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mirror", [False, True])
def test_scaling_is_pillow_s(helper: Native, channels: int, mirror: bool) -> None:
    rng = np.random.default_rng(2)
    sizes = [(1, 1), (5, 3), (40, 60), (224, 224), (300, 41), (41, 300), (2, 400), (400, 2), (463, 459)]
    for height, width in sizes:
        image = rng.integers(0, 256, (height, width, channels), dtype=np.uint8)
        for size in ((1, 1), (8, 8), (224, 224), (31, 97), (height, width)):
            out = np.empty((*size, channels), dtype=np.uint8)
            whole = (0.0, 0.0, float(width), float(height))
            assert helper.resize(image, whole, mirror, out)
            expected = scaled(image, size)
            np.testing.assert_array_equal(
                out, expected[:, ::-1] if mirror else expected, err_msg=f"{height} {width} {size}"
            )


def test_a_fractional_box_and_a_view(helper: Native) -> None:
    image = photograph(90, 80)
    out = np.empty((20, 30, 3), dtype=np.uint8)
    box = (3.25, 4.5, 71.75, 80.0)
    assert helper.resize(image, box, False, out)
    expected = Image.fromarray(image).resize((30, 20), Image.Resampling.BILINEAR, box=box)
    np.testing.assert_array_equal(out, np.asarray(expected))
    view = image[10:60, 20:70]
    assert helper.resize(view, (0.0, 0.0, 50.0, 50.0), False, out)
    np.testing.assert_array_equal(out, scaled(view.copy(), (20, 30)))
    huge = np.zeros((2, 2000, 3), dtype=np.uint8)  # 2,000 pixels into one: more weights than it has room for
    assert not helper.resize(huge, (0.0, 0.0, 2000.0, 2.0), False, np.empty((1, 1, 3), dtype=np.uint8))
    assert not helper.resize(image[:, ::-1], (0.0, 0.0, 80.0, 90.0), False, out)
    assert not helper.resize(image[:, ::2], (0.0, 0.0, 40.0, 90.0), False, out)


def test_reduced_decoding_is_pillow_s_draft(helper: Native) -> None:
    height, width = 403, 517
    for options in KINDS.values():
        content = encoded(photograph(height, width), **options)
        for box, denominator in (((31, 17, 331, 317), 2), ((100, 3, 501, 402), 4), ((1, 1, 402, 402), 8)):
            size = (400 // (denominator + 1),) * 2 if denominator == 2 else (390 // denominator,) * 2
            part = reduction_for(box, *size)
            assert part.denominator == denominator
            image = Image.open(io.BytesIO(content))
            image.draft(None, (width // denominator, height // denominator))
            cut = image.convert("RGB").crop(part.region)
            expected = cut.resize((size[1], size[0]), Image.Resampling.BILINEAR, box=part.box)
            out = np.empty((*size, 3), dtype=np.uint8)
            assert helper.decode(content, (height, width), *part, False, out)
            np.testing.assert_array_equal(out, np.asarray(expected))


def test_many_threads_at_once(helper: Native) -> None:
    contents = [encoded(photograph(60 + i, 90 - i, seed=i)) for i in range(8)]

    def one(number: int) -> bool:
        at = number % 8
        box, out = (3, 5, 50, 55), np.empty((24, 24, 3), dtype=np.uint8)
        part = reduction_for(box, 24, 24, may_reduce=False)
        good = helper.decode(contents[at], (60 + at, 90 - at), *part, False, out)
        return good and bool((out == reference(contents[at], box, False, (24, 24))).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(400)))


def test_broken_and_unusual_bytes_are_declined(helper: Native) -> None:
    content = encoded(photograph(40, 50))
    out = np.empty((8, 8, 3), dtype=np.uint8)
    part = reduction_for((0, 0, 50, 40), 8, 8, may_reduce=False)
    for broken in (b"", b"nothing", content[:100], content[300:], encoded(photograph(40, 50), "PNG")):
        assert not helper.decode(broken, (40, 50), *part, False, out)
    assert not helper.decode(content, (41, 50), *part, False, out)  # another size than was read in the header
    assert not helper.decode(encoded(Image.fromarray(photograph(40, 50)).convert("CMYK")), (40, 50), *part, False, out)
    assert not helper.decode(content, (40, 50), 1, (0, 0, 51, 40), (0.0, 0.0, 51.0, 40.0), False, out)
    assert helper.decode(content, (40, 50), *part, False, out)


def test_flipped_bytes_never_do_harm(helper: Native) -> None:
    """What libjpeg makes of damaged bytes is the same by either way; most of it is a warning and odd pixels.

    The process goes on, nothing is written beside the place for the image, and the next image is a good one.
    """
    content = encoded(photograph(48, 64), progressive=True)
    rng, around = np.random.default_rng(5), np.full((18, 16, 3), 7, dtype=np.uint8)
    out = around[1:-1]
    part = reduction_for((8, 8, 60, 44), 16, 16, may_reduce=False)
    for _ in range(400):
        damaged = bytearray(content)
        for at in rng.integers(2, len(content), 3):
            damaged[at] = int(rng.integers(256))
        helper.decode(bytes(damaged), (48, 64), *part, False, out)
        assert (around[[0, -1]] == 7).all()
    assert helper.decode(content, (48, 64), *part, False, out)
    good = np.empty_like(out)
    assert helper.decode(content, (48, 64), *part, False, good)
    np.testing.assert_array_equal(out, good)


def test_real_photographs(helper: Native, real_data: Path) -> None:
    import pyarrow.parquet as pq

    files = sorted((real_data / "imagenet-photos").glob("*.parquet"))
    if not files:
        pytest.skip(f"no imagenet-photos in {real_data}")
    rng = np.random.default_rng(3)
    contents = [row["bytes"] for row in pq.read_table(files[0]).column("image").to_pylist()]
    for content in contents[::4]:
        width, height = Image.open(io.BytesIO(content)).size
        box = random_box(rng, height, width)
        out = np.empty((224, 224, 3), dtype=np.uint8)
        assert helper.decode(content, (height, width), *reduction_for(box, 224, 224, may_reduce=False), True, out)
        np.testing.assert_array_equal(out, reference(content, box, True, (224, 224)))


# --- building and doing without ---


@pytest.mark.parametrize("how", ["switched off", "no libjpeg"])
def test_everything_works_without_it(how: str) -> None:
    code = f"""
import os
os.environ["MEGABATCH_NATIVE"] = "0" if {how!r} == "switched off" else "1"
from megabatch.data import native
if {how!r} == "no libjpeg":
    native.find_libjpeg = lambda: None
import numpy as np
from megabatch.data.decode import crop_resized
from tests.data.images import encoded, photograph, reference
assert native.native() is None and native.why_not()
out = np.empty((9, 9, 3), dtype=np.uint8)
content = encoded(photograph(30, 40))
crop_resized(content, lambda h, w: (1, 2, 31, 29), True, out, "x")
assert (out == reference(content, (1, 2, 31, 29), True, (9, 9))).all()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_library_that_is_not_libjpeg_is_declined(helper: Native) -> None:
    with pytest.raises(OSError, match="is not a libjpeg"):
        Native(build(Path(package.__file__).with_name("crop.c")), "libm.so.6")
    assert find_libjpeg()


def test_positions_in_the_structs(tmp_path: Path) -> None:
    """Where jpeglib.h is installed, the positions that crop.c states are compared with it."""
    fields = {"image_width": 48, "num_components": 56, "jpeg_color_space": 60, "out_color_space": 64, "scale_num": 68}
    fields |= {"scale_denom": 72, "output_width": 136, "output_height": 140, "output_scanline": 168}
    checks = [
        f"_Static_assert(offsetof(struct jpeg_decompress_struct, {n}) == {at}, {n!r});" for n, at in fields.items()
    ]
    errors = {"error_exit": 0, "emit_message": 8, "output_message": 16}
    checks += [f"_Static_assert(offsetof(struct jpeg_error_mgr, {n}) == {at}, {n!r});" for n, at in errors.items()]
    checks += [
        "_Static_assert(sizeof(struct jpeg_decompress_struct) == 632 && sizeof(struct jpeg_error_mgr) == 168, '');"
    ]
    source = "#include <stddef.h>\n#include <stdio.h>\n#include <jpeglib.h>\n" + "\n".join(checks).replace("'", '"')
    (tmp_path / "x.c").write_text("#include <stdio.h>\n#include <jpeglib.h>\n")
    probe = ["cc", "-c", "x.c", "-o", "x.o"]
    try:
        if subprocess.run(probe, cwd=tmp_path, capture_output=True, timeout=60, check=False).returncode != 0:
            pytest.skip("jpeglib.h is not installed")
    except FileNotFoundError:
        pytest.skip("no C compiler")
    (tmp_path / "x.c").write_text(source)
    done = subprocess.run(probe, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
