"""The fit: it finds parameters that rows determine, keeps the prior for those they do not, and widens with distance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megabatch.errors import DataError
from megabatch.plan.compute import expected_maximum
from megabatch.plan.fit import PARAMETERS, PRIOR_PARTS, fit_as_data, fit_steps, prior
from megabatch.plan.quantity import FORM
from megabatch.plan.rows import SystemRow

TRUE = (0.002, 0.0003, 0.0015, 0.000005, 0.0004)
"""Fixed, per image, across, scatter, jitter; the logs contain no evaluation."""


def row(
    workers: int, batch: float, *, stack: str = "2.0 mxnet closed", family: str = "who:a100", factor: float = 1.0
) -> SystemRow:
    nodes = max(1, workers // 8)
    fixed, per_image, across, scatter, jitter = TRUE
    slowest = (scatter * batch + jitter) * expected_maximum(workers)
    seconds = fixed + per_image * batch + (across if nodes > 1 else 0) + slowest
    accelerator = family.split(":")[1]
    name = f"{workers}xbox"
    return SystemRow(0, family, stack, accelerator, "box", name, workers, nodes, batch, factor * seconds)


def test_many_rows_determine_everything() -> None:
    rows = [row(n, b) for n in (1, 8, 16, 64) for b in (8.0, 32.0, 128.0, 512.0)] * 40
    fit = fit_steps(rows)
    assert fit.undetermined == ()
    assert fit.parameters[:5] == pytest.approx(TRUE, rel=0.25)
    for value, deviation, true in zip(fit.parameters, fit.deviations, TRUE, strict=False):
        assert abs(value - true) < 2 * deviation
    assert fit.predict(64, 1024, 128).middle == pytest.approx(row(1024, 64).step_seconds, rel=0.03)


def test_one_row_determines_the_images_only_and_says_so() -> None:
    fit = fit_steps([row(8, 408.0)])
    assert set(fit.undetermined) == {"fixed", "across", "scatter", "jitter"}
    assert fit.parameters[1] == pytest.approx(TRUE[1], rel=0.05)
    near, far = fit.predict(408, 8, 1), fit.predict(16, 4096, 512)
    assert near.high / near.low < 1.2
    assert far.high / far.low > 1.5
    warnings = " ".join(fit.warnings(16, 4096, 512))
    for words in ("512 times the workers", "times outside the calibrated", "one node only", "do not determine"):
        assert words in warnings


def test_intervals_hold_new_systems_drawn_from_the_prior() -> None:
    """Systems whose parameters scatter as the prior says, two rows each, eight times the workers of any.

    The interval holds more than 80 %: it also allows for a form that is wrong so far outside, and here it is not.
    """
    random = np.random.default_rng(11)
    held = 0
    for _ in range(300):
        whole = 256 * 0.0003
        drawn = {name: part * whole * abs(1 + random.standard_normal()) for name, part in PRIOR_PARTS.items()}

        def seconds(batch: float, workers: int, drawn: dict[str, float] = drawn) -> float:
            apart = drawn["across"] if workers > 8 else 0.0
            delay = (
                (drawn["scatter"] * batch / 256 + drawn["jitter"]) * expected_maximum(workers) / expected_maximum(64)
            )
            return (drawn["fixed"] + 0.0003 * batch + apart + delay) * float(np.exp(0.03 * random.standard_normal()))

        made = [
            SystemRow(0, "a:b", "s f c", "b", "x", "x", n, max(1, n // 8), b, seconds(b, n))
            for n, b in ((8, 408.0), (64, 51.0))
        ]
        held += fit_steps(made).predict(51, 512, 64).holds(seconds(51, 512))
    assert 0.80 <= held / 300 <= 0.99


def test_no_parameter_is_negative() -> None:
    fit = fit_steps([row(8, 408.0), row(64, 51.0, factor=0.8)])
    assert min(fit.parameters) >= 0


def test_another_stack_widens_and_many_of_its_rows_do_not_outvote_that() -> None:
    own = fit_steps([row(8, 408.0)]).predict(408, 8, 1)
    others = fit_steps([row(8, 408.0, factor=1.1)] * 30, "other stack").predict(408, 8, 1)
    assert others.high / others.low > 1.3 * own.high / own.low


def test_answers_that_would_mean_nothing_are_refused() -> None:
    with pytest.raises(DataError, match="cannot tell the step"):
        fit_steps([row(8, 408.0)], "other framework").predict(0.001, 10**9, 10**8)
    with pytest.raises(DataError, match="no calibration rows"):
        fit_steps([])


def test_rows_off_their_line_widen_the_interval_and_say_so() -> None:
    even = fit_steps([row(8, 408.0), row(16, 204.0), row(32, 102.0), row(64, 51.0)])
    uneven = fit_steps([row(8, 408.0), row(16, 204.0), row(32, 102.0, factor=1.5), row(64, 51.0)])
    assert even.lack_of_fit == FORM
    assert uneven.lack_of_fit > 0.1
    narrow, wide = even.predict(51, 128, 16), uneven.predict(51, 128, 16)
    assert wide.high / wide.low > 1.5 * narrow.high / narrow.low
    assert "disagree with one another" in " ".join(uneven.warnings(51, 128, 16))
    assert "disagree" not in " ".join(even.warnings(51, 128, 16))


def test_evaluation_in_the_logs_is_told_from_the_step() -> None:
    """A second of evaluation every four epochs: the fit knows of it where such logs are known, and not elsewhere."""
    between = 4 * 1_281_167
    errors = {}
    for family in ("google:tpu-v3", "who:tpu-v3"):
        rows = [row(n, b, family=family) for n, b in ((8, 512.0), (8, 64.0), (32, 512.0), (64, 512.0))] * 40
        logged = [
            replace(one, step_seconds=one.step_seconds + one.world_size * one.local_batch / between) for one in rows
        ]
        larger = row(512, 64.0).step_seconds + 512 * 64 / between
        fit = fit_steps(logged)
        errors[family] = abs(fit.predict(64, 512, 64, logged=fit.logs_contain_evaluation).middle / larger - 1)
    assert errors["google:tpu-v3"] < 0.06
    assert errors["who:tpu-v3"] > 0.12
    # A step of a plan has no evaluation in it.
    assert fit_steps(logged).predict(64, 512, 64, logged=True).middle > fit_steps(logged).predict(64, 512, 64).middle


def test_rows_inside_one_node_leave_the_network_twice_as_uncertain() -> None:
    inside, across = prior([row(8, 408.0)]), prior([row(8, 408.0), row(64, 51.0)])
    assert inside[0] == pytest.approx(across[0])
    assert inside[1][2] == pytest.approx(2 * across[1][2])
    others = [0, 1, 3, 4, 5]
    assert inside[1][others] == pytest.approx(across[1][others])


def test_one_slow_stack_among_many_does_not_pull_the_others() -> None:
    """Common factors multiply what the parameters say: by what was measured, half of the outlier would be believed."""
    stacks = [f"{number}.0 mxnet closed" for number in range(6)]
    rows = [row(8, 408.0, stack=stack, factor=1.6 if stack.startswith("5") else 1.0) for stack in stacks]
    typical = row(8, 408.0).step_seconds
    assert fit_steps(rows, "other stack").predict(408, 8, 1).middle == pytest.approx(typical, rel=0.12)
    assert fit_steps(rows, "other stack").predict(408, 8, 1).middle > typical


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
