from __future__ import annotations

from megabatch.data.decode import EXACT
from megabatch.data.feeding import Feeding


def test_by_default_pixels_are_exact_and_no_broken_image_is_tolerated() -> None:
    one, other = Feeding(), Feeding()
    assert one.decoding == EXACT
    assert one.broken.max_share == 0
    assert one.broken is not other.broken  # each counts for itself
