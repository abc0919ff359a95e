from __future__ import annotations

import numpy as np
import pytest

from megabatch.data.encoded import EncodedImages, HasBytes
from megabatch.data.sources import ImageArray
from megabatch.errors import DataError
from tests.data.conftest import png_bytes, random_images


class Two(EncodedImages):
    channels = 3
    images = random_images(0, [(3, 4)], 3)

    def read_bytes(self, index: int) -> bytes:
        return png_bytes(self.images[0]) if index == 0 else b"nothing"

    def name_of(self, index: int) -> str:
        return f"number {index}"


def test_reading_decodes_and_names_what_cannot_be_decoded() -> None:
    np.testing.assert_array_equal(Two().read(0), Two.images[0])
    with pytest.raises(DataError, match="cannot decode the image number 1: "):
        Two().read(1)


def test_sources_that_have_bytes_are_told_from_those_that_have_none() -> None:
    assert isinstance(Two(), HasBytes)
    assert not isinstance(ImageArray("a", np.zeros((1, 2, 2, 3), dtype=np.uint8), [0]), HasBytes)
