"""Encoded images to pixels: whole, or only the part that is wanted, scaled.

There is one right answer, Pillow's: turn the image upright, cut the box out, scale it with the antialiased bilinear
filter - what torchvision's reference pipeline does. The compiled helper (`native`) gives the same bytes without
decoding what is not wanted; images it does not take (PNG, WebP, CMYK, turned, cut short) go through Pillow.
`opencv` is faster where there is no compiler and gives other pixels: bilinear without antialiasing, 1.4 grey levels
away on average.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from PIL import Image, ImageOps

from megabatch.data.jpeg import Box, JpegHeader, Pixels, read_jpeg_header, reduction_for
from megabatch.data.native import native
from megabatch.errors import ConfigError, DataError

DecoderName = Literal["auto", "pillow", "opencv"]


@dataclass(frozen=True)
class Decoding:
    """How images are decoded. `auto` and `pillow` give the same pixels.

    With `reduce` a JPEG whose crop is at least twice the wanted size is decoded at 1/2, 1/4 or 1/8 of its size:
    faster for small images, and other pixels than without.
    """

    decoder: DecoderName = "auto"
    reduce: bool = False


EXACT = Decoding()


MAX_PIXELS = 89_478_485
"""Larger images are taken for decompression bombs and refused before they are decoded; Pillow's own limit."""

Name = str | Callable[[], str]


def decode_image(encoded: bytes, channels: int, name: Name) -> Pixels:
    """An encoded JPEG, PNG or WebP image, upright, as [height, width, channels]; DataError names it."""
    try:
        return decoded_pixels(_open(encoded), channels)
    except Exception as error:  # Pillow's readers raise a dozen types on broken bytes
        raise _broken(name, error) from error


def decoded_pixels(pil: Image.Image, channels: int) -> Pixels:
    """An image of Pillow as [height, width, channels], upright, as its EXIF note wants it shown."""
    upright = ImageOps.exif_transpose(pil)
    return np.asarray(_with_channels(upright, channels)).reshape(upright.height, upright.width, channels)


def crop_resized(
    encoded: bytes, choose: Callable[[int, int], Box], mirror: bool, out: Pixels, name: Name, decoding: Decoding = EXACT
) -> None:
    """Fills `out`, [height, width, channels], with a box of the image, mirrored left to right if wanted.

    `choose` maps the height and width of the upright image to the box. Raises DataError naming the image.
    """
    header = read_jpeg_header(encoded)
    height, width, channels = out.shape
    plain = header is not None and header.upright and header.num_components in (1, 3)
    if header is not None and header.height * header.width > MAX_PIXELS:
        raise _broken(name, ValueError(_too_large(header.height, header.width)))
    if plain and header is not None and header.whole and channels == 3:
        if decoding.decoder == "opencv":
            if _by_opencv(encoded, header, choose, mirror, out, decoding.reduce):
                return
        elif decoding.decoder == "auto" and (helper := native()) is not None:
            part = reduction_for(choose(header.height, header.width), height, width, decoding.reduce)
            if helper.decode(encoded, (header.height, header.width), *part, mirror, out):
                return
    try:
        pil = _open(encoded)
        if not plain:
            pil = ImageOps.exif_transpose(pil)
        box = choose(pil.height, pil.width)
        part = reduction_for(box, height, width, may_reduce=plain and decoding.reduce)
        if part.denominator > 1:
            pil.draft(None, (pil.width // part.denominator, pil.height // part.denominator))
        cut = _with_channels(pil, channels).crop(part.region)
        whole = (0.0, 0.0, float(cut.width), float(cut.height))
        scaled = cut.resize((width, height), Image.Resampling.BILINEAR, box=None if part.box == whole else part.box)
        pixels = np.asarray(scaled).reshape(height, width, channels)
        out[:] = pixels[:, ::-1] if mirror else pixels
    except Exception as error:
        raise _broken(name, error) from error


def resize_into(image: Pixels, box: Box | None, mirror: bool, out: Pixels, decoding: Decoding = EXACT) -> None:
    """Fills `out` with a box of a decoded image [h, w, channels], scaled: Pillow's antialiased bilinear."""
    height, width, _ = out.shape
    if box is not None:
        left, top, right, bottom = box
        image = image[top:bottom, left:right]
    if decoding.decoder == "auto" and (helper := native()) is not None:
        whole = (0.0, 0.0, float(image.shape[1]), float(image.shape[0]))
        if helper.resize(image, whole, mirror, out):
            return
    pil = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
    scaled = np.asarray(pil.resize((width, height), Image.Resampling.BILINEAR)).reshape(out.shape)
    out[:] = scaled[:, ::-1] if mirror else scaled


def resize(image: Pixels, height: int, width: int, box: Box | None = None) -> Pixels:
    """An image [h, w, channels], or the box cut out of it, scaled to height x width; see `resize_into`."""
    out = np.empty((height, width, image.shape[2]), dtype=np.uint8)
    resize_into(image, box, False, out)
    return out


def check_decoder(name: str) -> None:
    """Raises ConfigError unless the decoder is known and installed."""
    if name == "opencv":
        try:
            import cv2  # noqa: F401
            import simplejpeg  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f"data.decoder is 'opencv' and {error.name} is not installed; pip install 'megabatch[opencv]'"
            ) from None
    elif name not in get_args(DecoderName):
        raise ConfigError(f"data.decoder is '{name}'; it must be one of {', '.join(get_args(DecoderName))}")


def _by_opencv(
    encoded: bytes, header: JpegHeader, choose: Callable[[int, int], Box], mirror: bool, out: Pixels, may_reduce: bool
) -> bool:
    """Decode by simplejpeg, scale by OpenCV; False when the image is broken or unusual."""
    import cv2
    import simplejpeg

    height, width, _ = out.shape
    box = choose(header.height, header.width)
    denominator, _, _ = reduction_for(box, height, width, may_reduce)
    try:
        image = simplejpeg.decode_jpeg(
            encoded,
            min_height=-(-header.height // denominator) if denominator > 1 else 0,
            min_width=-(-header.width // denominator) if denominator > 1 else 0,
            min_factor=denominator if denominator > 1 else 1,
        )
    except ValueError:
        return False
    scale_y, scale_x = image.shape[0] / header.height, image.shape[1] / header.width
    left, right = round(box[0] * scale_x), max(round(box[0] * scale_x) + 1, round(box[2] * scale_x))
    top, bottom = round(box[1] * scale_y), max(round(box[1] * scale_y) + 1, round(box[3] * scale_y))
    if mirror:
        cv2.flip(cv2.resize(image[top:bottom, left:right], (width, height)), 1, dst=out)
    else:
        cv2.resize(image[top:bottom, left:right], (width, height), dst=out)
    return True


def _open(encoded: bytes) -> Image.Image:
    pil = Image.open(io.BytesIO(encoded))
    if pil.width * pil.height > MAX_PIXELS:
        raise ValueError(_too_large(pil.height, pil.width))
    return pil


def _with_channels(pil: Image.Image, channels: int) -> Image.Image:
    """The image in grey or RGB; 16-bit grey is scaled, where Pillow alone would cut everything above 255."""
    if pil.mode.startswith("I;16"):
        pil = Image.fromarray((np.asarray(pil) >> 8).astype(np.uint8))
    return pil.convert("L" if channels == 1 else "RGB")


def _too_large(height: int, width: int) -> str:
    return f"it has {width}x{height} pixels, at most {MAX_PIXELS:,} are decoded"


def _broken(name: Name, error: Exception) -> DataError:
    said = name if isinstance(name, str) else name()
    reason = str(error).partition("<_io")[0].strip() or type(error).__name__
    return DataError(f"cannot decode the image {said}: {reason}; replace or remove it")
