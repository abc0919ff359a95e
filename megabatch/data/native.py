"""Builds `crop.c` on the machine at hand and calls it: images decoded and scaled to Pillow's own bytes, faster.

The helper is compiled when it is first wanted (about a second, a C compiler is all it needs) and cached in the user's
cache folder under the hash of its source, so that installing needs no compiler and a new version builds it anew.
`MEGABATCH_NATIVE=0` turns it off. Where it cannot be had, `why_not()` says why and everything works without it.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from numpy.typing import NDArray

from megabatch.data.jpeg import Box, FloatBox
from megabatch.data.storage import default_cache
from megabatch.errors import WriteError
from megabatch.files import lock, write_atomically

__all__ = ["Native", "native", "why_not"]

_SOURCE = Path(__file__).with_name("crop.c")
# Contracting a * b + c into one rounding would change weights in the last bit, and then a pixel here and there.
_FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-ffp-contract=off")
_LIBRARIES = ("-lm", "-lpthread", "-ldl")
_BUILD_SECONDS = 120.0
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
        out: NDArray[np.uint8],
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

    def resize(self, image: NDArray[np.uint8], box: FloatBox, mirror: bool, out: NDArray[np.uint8]) -> bool:
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
    if os.environ.get("MEGABATCH_NATIVE", "1") == "0":
        return None, "MEGABATCH_NATIVE is 0"
    if sys.maxsize < 2**32 or sys.byteorder != "little":
        return None, "the helper is for little-endian 64-bit machines"
    libjpeg = find_libjpeg()
    if libjpeg is None:
        return None, "no libjpeg with the interface of version 6b was found"
    try:
        return Native(build(default_cache() / "native"), libjpeg), ""
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


def build(folder: Path) -> Path:
    """The compiled helper, built in `folder` unless this very source has been built there; OSError says why not."""
    made_of = _SOURCE.read_bytes() + " ".join(_FLAGS).encode() + platform.machine().encode()
    helper = folder / f"crop-{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    if helper.exists():
        return helper
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise OSError("no C compiler (cc, gcc, clang) was found")
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder / "lock", _BUILD_SECONDS):
        if not helper.exists():
            _compile(compiler, helper)
    return helper


def _compile(compiler: str, helper: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        fresh = Path(place) / "crop.so"
        command: list[Any] = [compiler, *_FLAGS, "-o", fresh, _SOURCE, *_LIBRARIES]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False)
        if done.returncode != 0:
            raise OSError(f"{compiler} could not compile {_SOURCE.name}: {' '.join(done.stderr.split())[:300]}")
        write_atomically(helper, fresh.read_bytes())


def _check(out: NDArray[np.uint8]) -> None:
    assert out.dtype == np.uint8
    assert out.ndim == 3
    assert out.flags.c_contiguous
    assert out.flags.writeable
