from __future__ import annotations

import pytest

from megabatch.data.geometry import Box, Reduction, reduction_for


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
def test_worked_examples(box: Box, wanted: tuple[int, int], expected: Reduction) -> None:
    assert reduction_for(box, *wanted) == expected
    left, top, right, bottom = box
    assert reduction_for(box, *wanted, may_reduce=False) == Reduction(
        1, box, (0.0, 0.0, float(right - left), float(bottom - top))
    )
