"""Evidence: the nearest rows are taken, and their distance is named."""

from __future__ import annotations

import pytest

from megabatch.errors import DataError
from megabatch.plan.relatives import choose_evidence
from tests.plan.test_calibrate import row


def test_evidence_goes_from_near_to_far() -> None:
    own, older = row(8, 408.0), row(8, 408.0, stack="1.1 mxnet closed", factor=1.1)
    framework, other = row(8, 408.0, stack="2.0 jax closed"), row(8, 400.0, family="else:a100-pcie", factor=1.2)
    rows = [own, older, framework, other]
    assert choose_evidence(rows, own.family, own.stack, "a100", "box") == ([own], "same system")
    assert choose_evidence(rows, own.family, own.stack, "a100", "tower") == ([own], "same stack")
    assert choose_evidence([older, framework, other], own.family, own.stack, "a100", "box") == ([older], "other stack")
    assert choose_evidence([framework, other], own.family, own.stack, "a100", "box") == ([framework], "other framework")
    assert choose_evidence([other], own.family, own.stack, "a100", "box") == ([other], "other system")
    with pytest.raises(DataError, match="no calibration row has the accelerator 'h100'"):
        choose_evidence(rows, "who:h100", own.stack, "h100", "box")
