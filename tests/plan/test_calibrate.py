"""The fit: it finds parameters that rows determine, keeps the prior for those they do not, and widens with distance."""

from __future__ import annotations

import numpy as np
import pytest

from megabatch.errors import DataError
from megabatch.plan.calibrate import choose_evidence, fit_steps, generation
from megabatch.plan.rows import Row
from megabatch.plan.straggler import expected_maximum

TRUE = (0.002, 0.0003, 0.0015, 0.0008)


def row(
    workers: int, batch: float, *, stack: str = "2.0 mxnet closed", family: str = "who:a100", factor: float = 1.0
) -> Row:
    nodes = max(1, workers // 8)
    fixed, per_picture, across, per_worker = TRUE
    seconds = fixed + per_picture * batch + (across if nodes > 1 else 0) + per_worker * expected_maximum(workers)
    accelerator = family.split(":")[1]
    return Row(0, family, stack, accelerator, "box", f"{workers}xbox", workers, nodes, batch, factor * seconds, 0, 0, 0)


def test_many_rows_determine_everything() -> None:
    rows = [row(n, b) for n in (1, 8, 16, 64) for b in (8.0, 32.0, 128.0, 512.0)] * 40
    fit = fit_steps(rows)
    assert fit.undetermined == ()
    assert fit.parameters == pytest.approx(TRUE, rel=0.25)
    assert fit.seconds(64, 1024, 128) == pytest.approx(row(1024, 64).step_seconds, rel=0.03)


def test_one_row_determines_the_pictures_only_and_says_so() -> None:
    fit = fit_steps([row(8, 408.0)])
    assert set(fit.undetermined) == {"fixed", "across", "per_worker"}
    assert fit.parameters[1] == pytest.approx(TRUE[1], rel=0.05)
    near, far = fit.predict(408, 8, 1), fit.predict(16, 4096, 512)
    assert near.high / near.low < 1.2
    assert far.high / far.low > 1.5
    warnings = " ".join(fit.warnings(16, 4096, 512))
    for words in ("512 times the workers", "times outside the calibrated", "one node only", "do not determine"):
        assert words in warnings


def test_intervals_hold_new_systems_drawn_from_the_prior() -> None:
    """Systems whose parameters scatter as the prior says, two rows each: the 80 % interval holds about 80 %."""
    random = np.random.default_rng(11)
    held = 0
    for _ in range(300):
        whole = 256 * 0.0003
        fixed, across = (
            0.02 * whole * abs(1 + random.standard_normal()),
            0.015 * whole * abs(1 + random.standard_normal()),
        )
        growth = 0.02 * whole / expected_maximum(64) * abs(1 + random.standard_normal())

        def seconds(batch: float, workers: int, values: tuple[float, ...] = (fixed, across, growth)) -> float:
            apart = values[1] if workers > 8 else 0.0
            mean = values[0] + 0.0003 * batch + apart + values[2] * expected_maximum(workers)
            return mean * float(np.exp(0.03 * random.standard_normal()))

        made = [
            Row(0, "a:b", "s f c", "b", "x", "x", n, max(1, n // 8), b, seconds(b, n), 0, 0, 0)
            for n, b in ((8, 408.0), (64, 51.0))
        ]
        held += fit_steps(made).predict(51, 512, 64).holds(seconds(51, 512))
    assert 0.75 <= held / 300 <= 1.0


def test_no_parameter_is_negative() -> None:
    fit = fit_steps([row(8, 408.0), row(64, 51.0, factor=0.8)])
    assert min(fit.parameters) >= 0


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


def test_another_stack_widens_and_many_of_its_rows_do_not_outvote_that() -> None:
    own = fit_steps([row(8, 408.0)]).predict(408, 8, 1)
    others = fit_steps([row(8, 408.0, factor=1.1)] * 30, "other stack").predict(408, 8, 1)
    assert others.high / others.low > 1.3 * own.high / own.low


def test_answers_that_would_mean_nothing_are_refused() -> None:
    with pytest.raises(DataError, match="cannot tell the step"):
        fit_steps([row(8, 408.0)], "other framework").predict(0.001, 10**9, 10**8)
    with pytest.raises(DataError, match="no calibration rows"):
        fit_steps([])


def test_generations() -> None:
    names = {"dgxa100": "a100", "a100-pcie-80gb": "a100", "tpu-v4": "tpu-v4", "ascend-910-pro-a": "ascend910"}
    assert {name: generation(name) for name in names} == names
