"""The two noise scales: Smith's formula and what keeps it, McCandlish's estimate and its averages."""

from __future__ import annotations

import numpy as np
import pytest

from megabatch.errors import ConfigError
from megabatch.schedule.noise import (
    NoiseAverage,
    NoiseSample,
    keep_noise,
    noise_keeping_momentum,
    noise_sample,
)


def sgd_noise_scale(lr: float, momentum: float, global_batch_size: int, num_images: int) -> float:
    """Smith's g of a step."""
    return lr * num_images / (global_batch_size * (1.0 - momentum))


def test_smiths_noise_scale_and_both_ways_to_keep_it() -> None:
    before = sgd_noise_scale(3.2, 0.9, 8192, 1_281_167)
    assert sgd_noise_scale(*keep_noise("lr", 3.2, 0.9, 2), 16384, 1_281_167) == pytest.approx(before)
    assert noise_keeping_momentum(0.9, 2) == pytest.approx(0.95)
    assert sgd_noise_scale(3.2, noise_keeping_momentum(0.9, 5), 5 * 8192, 1_281_167) == pytest.approx(before)
    assert noise_keeping_momentum(0.9, 0.5) == pytest.approx(0.8)  # a smaller batch needs less


def test_a_batch_that_shrinks_too_far_cannot_keep_the_noise_by_momentum() -> None:
    with pytest.raises(ConfigError, match="below 0"):
        noise_keeping_momentum(0.9, 0.05)


@pytest.mark.parametrize("sizes", [[8] * 6, [8, 4, 16, 2], [32, 32]])
@pytest.mark.parametrize("by_size", [True, False])
def test_estimates_are_unbiased_for_any_sizes_and_weights(sizes: list[int], by_size: bool) -> None:
    """Gaussian gradients with known mean and covariance, 5 dimensions, averaged over many steps."""
    numbers = np.random.default_rng(3)
    mean = np.array([0.5, -0.2, 0.1, 0.0, 0.3])
    deviation = np.array([1.0, 2.0, 0.5, 1.5, 0.1])
    weights = np.array(sizes, dtype=float) if by_size else np.ones(len(sizes))
    weights /= weights.sum()
    noise, signal = [], []
    for _ in range(4000):
        pieces = [mean + deviation * numbers.standard_normal((size, 5)).mean(axis=0) for size in sizes]
        small = sum(w * float(g @ g) for w, g in zip(weights, pieces, strict=True))
        total = sum(w * g for w, g in zip(weights, pieces, strict=True))
        over_n = [w / n for w, n in zip(weights, sizes, strict=True)]
        over_n2 = [w * w / n for w, n in zip(weights, sizes, strict=True)]
        sample = noise_sample(small, float(total @ total), sum(over_n), sum(over_n2))
        assert sample is not None
        noise.append(sample.noise)
        signal.append(sample.signal)
    for found, true in ((noise, float(deviation @ deviation)), (signal, float(mean @ mean))):
        error = np.std(found) / np.sqrt(len(found))
        assert abs(np.mean(found) - true) < 4 * error
        assert error < 0.05 * max(true, 1.0)  # else the test could not fail


def test_one_piece_says_nothing() -> None:
    assert noise_sample(2.0, 2.0, 1 / 64, 1 / 64) is None
    assert noise_sample(float("inf"), 2.0, 1 / 8, 1 / 64) is None
    assert noise_sample(float("nan"), 2.0, 1 / 8, 1 / 64) is None


def test_averages_are_kept_apart() -> None:
    average = NoiseAverage(smoothing=0.5)
    assert average.scale is None
    assert average.sample() == NoiseSample(0.0, 0.0)
    average.add(NoiseSample(8.0, 2.0))
    assert average.sample() == NoiseSample(8.0, 2.0)
    assert average.scale == pytest.approx(4.0)  # the first value is not drawn towards zero
    average.add(NoiseSample(4.0, -0.5))
    # Weights 1/4 and 1/2: (2 + 2) / (0.5 - 0.25), not the mean of 4 and -8.
    assert average.scale == pytest.approx(16.0)
    average.add(NoiseSample(1.0, -10.0))
    assert average.scale is None  # no signal above the noise: unknown, not negative
    again = NoiseAverage(smoothing=0.5)
    again.load_state_dict(average.state_dict())
    assert again == average
