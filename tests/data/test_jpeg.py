"""What a JPEG says about itself, and how far it may be reduced."""

from __future__ import annotations

import io
from typing import Any

import pytest
from PIL import Image

from megabatch.data.jpeg import Box, JpegHeader, Reduction, read_jpeg_header, reduction_for
from tests.data.images import encoded, photograph, turned

PIXELS = photograph(21, 34)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"icc_profile": b"x" * 70_000}])
def test_size_and_components(options: dict[str, Any]) -> None:
    assert read_jpeg_header(encoded(PIXELS, **options)) == JpegHeader(21, 34, 3, True, True)
    grey = encoded(Image.fromarray(PIXELS).convert("L"), **options)
    assert read_jpeg_header(grey) == JpegHeader(21, 34, 1, True, True)
    cmyk = encoded(Image.fromarray(PIXELS).convert("CMYK"))
    assert read_jpeg_header(cmyk) == JpegHeader(21, 34, 4, True, True)


@pytest.mark.parametrize("orientation", range(9))
def test_orientation(orientation: int) -> None:
    header = read_jpeg_header(turned(PIXELS, orientation))
    assert header == JpegHeader(21, 34, 3, orientation in (0, 1), True)


def test_either_byte_order_and_other_notes() -> None:
    for order in ("<", ">"):
        exif = Image.Exif()
        exif.endian = order
        exif[0x010F] = "a camera with a rather long name"
        exif[0x0112] = 6
        header = read_jpeg_header(encoded(PIXELS, exif=exif.tobytes()))
        assert header is not None
        assert not header.upright
    for note, upright in ((b"http://ns.adobe.com/xap/1.0/\0<x:xmpmeta>", True), (b"... tiff:Orientation=6", False)):
        content = encoded(PIXELS)
        content = content[:2] + b"\xff\xe1" + (len(note) + 2).to_bytes(2, "big") + note + content[2:]
        header = read_jpeg_header(content)
        assert header is not None
        assert header.upright is upright


def test_a_damaged_note_leaves_the_decision_to_pillow() -> None:
    content = turned(PIXELS, 6)
    at = content.index(b"Exif\0\0") + 6
    for broken in (
        content[:at] + b"XX" + content[at + 2 :],
        content[: at + 4] + b"\xff\xff\xff\xff" + content[at + 8 :],
    ):
        header = read_jpeg_header(broken)
        assert header is not None
        # An IFD beyond the note has no entries; a note of no known byte order is not trusted.
        assert header.upright == (broken[at : at + 2] != b"XX")


def test_the_end_mark() -> None:
    content = encoded(PIXELS)
    for changed, whole in ((content[:-2], False), (content + b"\0" * 9, True), (content[: len(content) // 2], False)):
        header = read_jpeg_header(changed)
        assert header is not None
        assert header.whole is whole


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"\xff\xd8",
        b"\xff\xd8\xff",
        b"\xff\xd8\xff\xd9",
        b"\xff\xd8ab",
        b"\xff\xd8\xff\xe0\0\1",
        encoded(PIXELS)[:40],
    ],
)
def test_no_header(content: bytes) -> None:
    assert read_jpeg_header(content) is None
    assert read_jpeg_header(encoded(PIXELS, "PNG")) is None


def test_twelve_bits_and_lossless_are_left_to_others() -> None:
    content = encoded(PIXELS)
    at = content.index(b"\xff\xc0")
    assert read_jpeg_header(content[: at + 4] + b"\x0c" + content[at + 5 :]) is None
    assert read_jpeg_header(content[: at + 1] + b"\xc3" + content[at + 2 :]) is None
    assert read_jpeg_header(content[: at + 5] + b"\0\0" + content[at + 7 :]) is None


def test_every_cut_and_many_flips_give_an_answer() -> None:
    content = turned(PIXELS, 3)
    for end in range(len(content)):
        read_jpeg_header(content[:end])
    for at in range(len(content)):
        header = read_jpeg_header(content[:at] + bytes([content[at] ^ 0x5A]) + content[at + 1 :])
        if header is not None:
            assert header.height * header.width > 0


def test_it_agrees_with_pillow_about_size() -> None:
    for height, width in ((1, 1), (7, 300), (65_000, 1)):
        content = encoded(Image.new("RGB", (width, height)))
        header = read_jpeg_header(content)
        assert header is not None
        assert (header.width, header.height) == Image.open(io.BytesIO(content)).size


@pytest.mark.parametrize(
    ("box", "wanted", "expected"),
    [
        ((10, 20, 110, 90), (50, 64), Reduction(1, (10, 20, 110, 90), (0.0, 0.0, 100.0, 70.0))),
        ((10, 20, 138, 120), (50, 64), Reduction(2, (5, 10, 69, 60), (0.0, 0.0, 64.0, 50.0))),
        ((11, 21, 139, 121), (50, 64), Reduction(2, (5, 10, 70, 61), (0.5, 0.5, 64.5, 50.5))),
        ((3, 0, 1003, 1000), (100, 100), Reduction(8, (0, 0, 126, 125), (0.375, 0.0, 125.375, 125.0))),
        ((0, 0, 400, 100), (100, 100), Reduction(1, (0, 0, 400, 100), (0.0, 0.0, 400.0, 100.0))),
        ((0, 0, 400, 799), (100, 100), Reduction(4, (0, 0, 100, 200), (0.0, 0.0, 100.0, 199.75))),
    ],
)
def test_reductions(box: Box, wanted: tuple[int, int], expected: Reduction) -> None:
    assert reduction_for(box, *wanted) == expected
    left, top, right, bottom = box
    assert reduction_for(box, *wanted, may_reduce=False) == Reduction(
        1, box, (0.0, 0.0, float(right - left), float(bottom - top))
    )
