"""The step of a fit: its parts, its uncertainty, and what changes of it."""

from __future__ import annotations

import numpy as np
import pytest

from megabatch.plan.calibrate import fit_steps
from megabatch.plan.interval import FORM
from megabatch.plan.step_fit import PARAMETERS, fit_as_data
from megabatch.plan.straggler import expected_maximum
from tests.plan.test_calibrate import row


def test_passes_count_in_the_parts_and_in_their_uncertainty() -> None:
    """Four ghosts in turn: four times the fixed part and the images, once the network and the jitter."""
    fit = fit_steps([row(8, 408.0), row(64, 51.0)])
    fixed, per_image, across, scatter, jitter, _ = fit.parameters
    slowest = expected_maximum(64)
    parts = fit.parts(51, 64, 8, 4)
    assert parts["compute"] == pytest.approx(4 * (fixed + 51 * per_image))
    assert parts["exposed communication"] == pytest.approx(across)
    assert parts["stragglers"] == pytest.approx((4 * 51 * scatter + jitter) * slowest)
    features = np.array([4, 4 * 51, 1, 4 * 51 * slowest, slowest, 0])
    spread = np.sqrt(features @ fit.covariance @ features) / sum(parts.values())
    assert fit.deviation(51, 64, 8, 4) == pytest.approx(float(np.hypot(spread, FORM)))
    double = fit.parts(51, 64, 8, 4, work=2.0)
    assert double["compute"] == pytest.approx(2 * parts["compute"])
    assert double["stragglers"] == pytest.approx((2 * 4 * 51 * scatter + jitter) * slowest)


def test_what_is_changed_is_changed_alone() -> None:
    fit = fit_steps([row(8, 408.0), row(64, 51.0)])
    touched = {"compute": "compute", "stragglers": "stragglers", "exposed": "exposed communication"}
    before = fit.parts(51, 64, 8, 2)
    for part, name in touched.items():
        after = fit.changed(part, 3.0).parts(51, 64, 8, 2)
        assert after.pop(name) == pytest.approx(3 * before[name])
        assert after == {key: value for key, value in before.items() if key != name}


def test_a_fit_as_data() -> None:
    fit = fit_steps([row(8, 408.0)])
    data = fit_as_data(fit)
    assert list(data["parameters"]) == list(PARAMETERS)
    assert data["parameters"]["across"]["deviation"] == pytest.approx(fit.deviations[2])
    assert (data["num_rows"], data["evidence"]) == (1, "same system")
    assert set(data["undetermined"]) == {"fixed", "across", "scatter", "jitter"}
