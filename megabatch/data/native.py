"""Calls `crop.c`, built on the machine at hand: images decoded and scaled to Pillow's own bytes, faster.

Where the helper cannot be had, `why_not()` says why and everything works without it.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import PIL

from megabatch.data.jpeg import Box, FloatBox, Pixels
from megabatch.errors import WriteError
from megabatch.machine import build

_SOURCE = Path(__file__).with_name("crop.c")
_IntBox = ctypes.c_int * 4
_DoubleBox = ctypes.c_double * 4


class Native:
    """The helper, loaded. Calls release the interpreter lock."""

    def __init__(self, helper: Path, libjpeg: str) -> None:
        library = ctypes.CDLL(str(helper))
        library.megabatch_open.argtypes = [ctypes.c_char_p]
        sizes, pointer = ctypes.c_int, ctypes.c_void_p
        library.megabatch_decode.argtypes = [
            *(ctypes.c_char_p, ctypes.c_size_t, sizes, sizes, sizes),
            *(_IntBox, _DoubleBox, sizes, sizes, sizes, pointer),
        ]
        library.megabatch_resize.argtypes = [
            *(pointer, ctypes.c_size_t, sizes, sizes, sizes),
            *(_DoubleBox, sizes, sizes, sizes, pointer),
        ]
        if library.megabatch_open(libjpeg.encode()) != 0:
            raise OSError(f"{libjpeg} is not a libjpeg with the interface of version 6b and partial decoding")
        self._decode, self._resize = library.megabatch_decode, library.megabatch_resize
        self.libjpeg = libjpeg

    def decode(
        self,
        encoded: bytes,
        size: tuple[int, int],
        denominator: int,
        region: Box,
        box: FloatBox,
        mirror: bool,
        out: Pixels,
    ) -> bool:
        """Decodes `region` of the JPEG image of `size` (height, width) reduced by `denominator`, scales `box` of it.

        `out` is [height, width, 3], contiguous. False when the image is unusual or broken; `out` is then undefined.
        """
        _check(out)
        boxes = _IntBox(*region), _DoubleBox(*box)
        done: int = self._decode(
            encoded, len(encoded), *size, denominator, *boxes, mirror, *out.shape[:2], out.ctypes.data
        )
        return done == 0

    def resize(self, image: Pixels, box: FloatBox, mirror: bool, out: Pixels) -> bool:
        """Scales `box` of an image [h, w, channels] into `out`; False when the image's layout does not allow it."""
        _check(out)
        channels = image.shape[2]
        if image.strides[1:] != (channels, 1) or image.strides[0] < 0 or channels != out.shape[2]:
            return False
        place = image.ctypes.data, image.strides[0]
        done: int = self._resize(*place, *image.shape, _DoubleBox(*box), mirror, *out.shape[:2], out.ctypes.data)
        return done == 0


def native() -> Native | None:
    """The helper; None where it cannot be had."""
    return _loaded()[0]


def why_not() -> str:
    """Why there is no helper here; empty when there is one."""
    return _loaded()[1]


@cache
def _loaded() -> tuple[Native | None, str]:
    libjpeg = find_libjpeg()
    if libjpeg is None:
        return None, "no libjpeg with the interface of version 6b was found"
    try:
        return Native(build(_SOURCE), libjpeg), ""
    except (OSError, WriteError, subprocess.SubprocessError, AttributeError) as error:
        return None, str(error)


def find_libjpeg() -> str | None:
    """The libjpeg that Pillow's wheel carries - the very one Pillow decodes with -, else the system's."""
    site = Path(PIL.__file__).parents[1]
    for pattern in ("pillow.libs/libjpeg*.so.62*", "PIL/.dylibs/libjpeg.62*.dylib"):
        if found := sorted(site.glob(pattern)):
            return str(found[0])
    name = ctypes.util.find_library("jpeg")
    return name if name and ".62" in name else None


def _check(out: Pixels) -> None:
    assert out.dtype == np.uint8
    assert out.ndim == 3
    assert out.flags.c_contiguous
    assert out.flags.writeable
