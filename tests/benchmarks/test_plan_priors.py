"""Priors: the likelihood is the Gaussian's, and parts that made the rows are found again."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from benchmarks.plan_priors import best_parts, families_of, log_likelihood
from megabatch.plan.fit import PRIOR_PARTS, prior, row_features
from megabatch.plan.quantity import FORM
from megabatch.plan.rows import SystemRow

AS_USED = {**PRIOR_PARTS, "form": FORM}


def family(name: str, seed: int, parts: dict[str, float]) -> list[SystemRow]:
    """Rows whose parameters and noise are drawn from the prior with these parts."""
    random = np.random.default_rng(seed)
    sizes = [(4, 1, 408.0), (8, 1, 204.0), (16, 2, 204.0), (32, 4, 102.0), (64, 8, 204.0), (64, 8, 51.0)]
    rows = [
        SystemRow(0, f"{name}:a100", "2.0 mxnet closed", "a100", "box", "box", n, nodes, b, 0.0003 * b)
        for n, nodes, b in sizes
    ]
    mean, deviation = prior(rows, parts)
    mean = mean + deviation * random.standard_normal(len(mean)) * np.array([1, 0, 1, 1, 1, 0])
    noise = 1 + parts["form"] * random.standard_normal(len(rows))
    steps = [float(row_features(row) @ mean) * part for row, part in zip(rows, noise, strict=True)]
    return [dataclasses.replace(row, step_seconds=step) for row, step in zip(rows, steps, strict=True)]


def test_the_likelihood_of_one_row_by_hand() -> None:
    one = family("a", 1, AS_USED)[:1]
    mean, deviation = prior(one)
    features = row_features(one[0])
    variance = float((features * deviation) @ (features * deviation)) + (FORM * one[0].step_seconds) ** 2
    error = one[0].step_seconds - float(features @ mean)
    assert log_likelihood([one], AS_USED) == pytest.approx(-0.5 * (np.log(variance) + error**2 / variance))


def test_parts_that_made_the_rows_are_found_again() -> None:
    true = {"fixed": 0.01, "across": 0.08, "scatter": 0.03, "jitter": 0.01, "form": 0.01}
    families = [family(f"org{seed}", seed, true) for seed in range(80)]
    parts, value = best_parts(families, 0.01)
    assert value >= log_likelihood(families, true)
    assert parts["across"] == pytest.approx(0.08, rel=0.3)
    assert parts["form"] == pytest.approx(0.01, rel=0.3)
    assert parts["fixed"] < 0.03


def test_only_families_that_can_tell_anything_take_part() -> None:
    rows = family("a", 1, AS_USED)
    alone = [rows[0], dataclasses.replace(rows[0], line=7)]
    large = [dataclasses.replace(row, world_size=512, family="b:a100") for row in rows]
    google = [dataclasses.replace(row, family="google:tpu-v3") for row in rows]
    assert families_of(rows) == [rows]
    opened = [dataclasses.replace(row, stack="2.0 mxnet open") for row in rows]
    assert families_of(alone) == families_of(large) == families_of(google) == families_of(opened) == []
