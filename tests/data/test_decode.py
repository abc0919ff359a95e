from __future__ import annotations

import io
import zlib

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps

from megabatch.data import decode
from megabatch.data.decode import Decoding, check_decoder, crop_resized, decode_image, resize
from megabatch.data.jpeg import Box
from megabatch.errors import ConfigError, DataError
from tests.data.conftest import png_bytes
from tests.data.images import encoded, photograph, random_box, reference, turned

DECODERS = [Decoding(), Decoding("pillow")]


def cropped(
    content: bytes, box: Box, mirror: bool = False, size: int = 16, how: Decoding = DECODERS[0]
) -> NDArray[np.uint8]:
    out = np.zeros((size, size, 3), dtype=np.uint8)
    crop_resized(content, lambda height, width: box, mirror, out, "x", how)
    return out


def test_decoding_converts_to_the_wanted_channels() -> None:
    colour = np.random.default_rng(0).integers(0, 256, (5, 4, 3), dtype=np.uint8)
    np.testing.assert_array_equal(decode_image(png_bytes(colour), 3, "x"), colour)
    # ITU-R 601-2, the conversion that Pillow documents; its integer arithmetic may be off by one.
    expected = colour @ np.array([0.299, 0.587, 0.114])
    np.testing.assert_allclose(decode_image(png_bytes(colour), 1, "x")[..., 0], expected, atol=1)
    grey = colour[..., :1]
    np.testing.assert_array_equal(decode_image(png_bytes(grey), 3, "x"), grey.repeat(3, axis=2))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("size", "wanted"), [((40, 60), (16, 16)), ((13, 9), (32, 20)), ((20, 20), (20, 20))])
def test_resize_against_torch(size: tuple[int, int], wanted: tuple[int, int], channels: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (*size, channels), dtype=np.uint8)
    scaled = resize(image, *wanted)
    assert scaled.shape == (*wanted, channels)
    assert scaled.dtype == np.uint8
    as_tensor = torch.from_numpy(image).permute(2, 0, 1)[None].double()
    expected = torch.nn.functional.interpolate(as_tensor, wanted, mode="bilinear", antialias=True)
    # Pillow rounds after each of its two passes.
    np.testing.assert_allclose(scaled, expected[0].permute(1, 2, 0).numpy(), atol=1.1)


def test_resize_of_a_box_takes_that_part_of_the_image() -> None:
    image = np.zeros((20, 30, 3), dtype=np.uint8)
    image[4:14, 6:26] = [10, 20, 30]
    scaled = resize(image, 8, 8, box=(8, 6, 24, 12))  # two pixels inside the edge
    assert (scaled == [10, 20, 30]).all()
    cut = resize(image, 10, 20, box=(6, 4, 26, 14))
    np.testing.assert_array_equal(cut, image[4:14, 6:26])


# --- kinds of images ---


def sixteen_bits() -> bytes:
    values = np.linspace(0, 65535, 30 * 40).reshape(30, 40).astype(np.uint16)
    return encoded(Image.fromarray(values), "PNG")


def kinds() -> dict[str, bytes]:
    image = Image.fromarray(photograph(30, 40))
    return {
        "jpeg": encoded(image),
        "grey jpeg": encoded(image.convert("L")),
        "cmyk jpeg": encoded(image.convert("CMYK")),
        "png": encoded(image, "PNG"),
        "png with alpha": encoded(image.convert("RGBA"), "PNG"),
        "png with a palette": encoded(image.convert("P"), "PNG"),
        "png of one bit": encoded(image.convert("1"), "PNG"),
        "webp": encoded(image, "WEBP"),
        "gif": encoded(image, "GIF"),
    }


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize("how", DECODERS, ids=["auto", "pillow"])
def test_every_kind_as_pillow_has_it(kind: str, how: Decoding) -> None:
    content, rng = kinds()[kind], np.random.default_rng(0)
    for _ in range(5):
        box, mirror = random_box(rng, 30, 40), bool(rng.integers(2))
        np.testing.assert_array_equal(cropped(content, box, mirror, how=how), reference(content, box, mirror, (16, 16)))
    whole = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    np.testing.assert_array_equal(decode_image(content, 3, "x"), whole)
    assert decode_image(content, 1, "x").shape == (30, 40, 1)


def test_sixteen_bits_are_scaled_not_cut() -> None:
    for channels in (1, 3):
        got = decode_image(sixteen_bits(), channels, "x")
        expected = (np.linspace(0, 65535, 1200).reshape(30, 40).astype(np.uint16) >> 8).astype(np.uint8)
        np.testing.assert_array_equal(got, expected[..., None].repeat(channels, axis=2))
    assert cropped(sixteen_bits(), (0, 0, 40, 30)).mean() == pytest.approx(127, abs=2)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_upright(orientation: int) -> None:
    content = turned(photograph(30, 40), orientation)
    upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB"))
    assert upright.shape == ((40, 30, 3) if orientation >= 5 else (30, 40, 3))
    np.testing.assert_array_equal(decode_image(content, 3, "x"), upright)
    seen = []

    def choose(height: int, width: int) -> Box:
        seen.append((height, width))
        return 2, 3, 25, 28

    out = np.zeros((16, 16, 3), dtype=np.uint8)
    crop_resized(content, choose, False, out, "x")
    assert seen == [upright.shape[:2]]
    np.testing.assert_array_equal(
        out, np.asarray(Image.fromarray(upright[3:28, 2:25]).resize((16, 16), Image.Resampling.BILINEAR))
    )


def bomb() -> bytes:
    """A PNG of 100,000 x 100,000 pixels in a few hundred bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    side = (100_000).to_bytes(4, "big")
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", side + side + b"\x08\x02\0\0\0")
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


def huge_jpeg() -> bytes:
    content = encoded(photograph(8, 8))
    at = content.index(b"\xff\xc0") + 5
    return content[:at] + b"\xff\xf0\xff\xf0" + content[at + 4 :]


@pytest.mark.parametrize("how", DECODERS, ids=["auto", "pillow"])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cannot identify"),
        (b"not an image", "cannot identify"),
        (encoded(photograph(40, 40))[:-2], "truncated"),
        (encoded(photograph(40, 40))[:-200], "truncated"),
        (encoded(photograph(40, 40), "PNG")[:-200], ""),
        (bomb(), "[Ii]mage size|pixels"),
        (huge_jpeg(), "pixels"),
    ],
    ids=["zero bytes", "text", "no end mark", "half a jpeg", "half a png", "bomb", "huge jpeg"],
)
def test_broken_images_are_refused_by_name(content: bytes, reason: str, how: Decoding) -> None:
    with pytest.raises(DataError, match=rf"^cannot decode the image holiday.jpg: .*{reason}.*; replace or remove it$"):
        decode_image(content, 3, "holiday.jpg")
    out = np.zeros((8, 8, 3), dtype=np.uint8)
    with pytest.raises(DataError, match=rf"^cannot decode the image holiday.jpg: .*{reason}.*; replace or remove it$"):
        crop_resized(content, lambda h, w: (0, 0, w, h), False, out, lambda: "holiday.jpg", how)


def test_the_limit_of_pixels_is_kept_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MAX_PIXELS", 30 * 40 - 1)
    for content in kinds().values():
        with pytest.raises(DataError, match=r"40x30 pixels, at most 1,199"):
            cropped(content, (0, 0, 40, 30))
        with pytest.raises(DataError, match=r"40x30 pixels, at most 1,199"):
            decode_image(content, 3, "x")


# --- ways to decode ---


def test_reduced_decoding_is_the_same_by_either_way_and_close_to_full() -> None:
    content = encoded(photograph(300, 400))
    for box in ((0, 0, 400, 300), (13, 7, 301, 299), (100, 50, 140, 90)):
        by_helper, by_pillow = (cropped(content, box, True, 30, Decoding(d, reduce=True)) for d in ("auto", "pillow"))
        np.testing.assert_array_equal(by_helper, by_pillow)
        full = cropped(content, box, True, 30)
        assert np.abs(full.astype(int) - by_helper).mean() < 6
    assert (
        cropped(content, (0, 0, 400, 300), size=30, how=Decoding(reduce=True))
        != cropped(content, (0, 0, 400, 300), size=30)
    ).any()


def test_reduction_leaves_other_kinds_alone() -> None:
    for kind, content in kinds().items():
        if "jpeg" not in kind or kind == "cmyk jpeg":
            np.testing.assert_array_equal(
                cropped(content, (0, 0, 40, 30), size=8, how=Decoding(reduce=True)),
                cropped(content, (0, 0, 40, 30), size=8),
            )


@pytest.mark.parametrize("may_reduce", [False, True])
def test_opencv_is_near(may_reduce: bool) -> None:
    pytest.importorskip("cv2")
    pytest.importorskip("simplejpeg")
    check_decoder("opencv")
    smooth = Image.fromarray(photograph(300, 400)).resize((40, 30)).resize((400, 300), Image.Resampling.BICUBIC)
    content, rng = encoded(smooth), np.random.default_rng(0)
    for _ in range(10):
        left, top = (int(v) for v in rng.integers(0, 100, 2))
        box = (left, top, left + int(rng.integers(150, 300)), top + int(rng.integers(150, 200)))
        for mirror in (False, True):
            near = cropped(content, box, mirror, 60, Decoding("opencv", may_reduce))
            assert np.abs(near.astype(int) - cropped(content, box, mirror, 60)).mean() < 6
    png = encoded(smooth, "PNG")  # not a JPEG: by Pillow
    np.testing.assert_array_equal(cropped(png, (0, 0, 90, 90), how=Decoding("opencv")), cropped(png, (0, 0, 90, 90)))


def test_unknown_decoders_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_decoder("auto")
    with pytest.raises(ConfigError, match=r"data.decoder is 'turbo'; it must be one of auto, pillow, opencv"):
        check_decoder("turbo")
    monkeypatch.setitem(__import__("sys").modules, "simplejpeg", None)
    with pytest.raises(ConfigError, match=r"'opencv' and .* is not installed; pip install 'megabatch\[opencv\]'"):
        check_decoder("opencv")
