"""Two noise scales: the one that lr and batch make (Smith), and the one that the gradient has (McCandlish).

Smith 2017 ("Don't decay the learning rate, increase the batch size", section 3) describes momentum SGD by

    g = lr * images / (global_batch_size * (1 - momentum))        in images x lr

Raising the batch by k at a fixed lr divides g by k, which is what an lr decay of k does. To keep g instead, the
lr is multiplied by k, or `1 - momentum` is divided by k.

McCandlish 2018 ("An empirical model of large-batch training", section 2.2) measures the batch at which noise and
signal of the gradient are equal, in images:

    B_simple = S / G2        S = trace of the covariance of one image's gradient, G2 = |expected gradient|^2

A step averages pieces: piece j has n_j images, weight w_j (all weights add up to 1) and the mean gradient g_j.
Since E |g_j|^2 = G2 + S / n_j and E |sum_j w_j g_j|^2 = G2 + S * sum_j w_j^2 / n_j, two numbers that are at hand,

    small = sum_j w_j |g_j|^2            big = |sum_j w_j g_j|^2

give unbiased estimates for any sizes and weights, and for any way the pieces lie on workers:

    S = (small - big) / (sum_j w_j / n_j - sum_j w_j^2 / n_j)        G2 = small - S * sum_j w_j / n_j

For equal pieces of b images in a step of B these are appendix A.1 of the paper. Batch-norm ties the images of a
ghost batch together, so S is then b times the covariance of ghost gradients rather than of images' own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megabatch.errors import ConfigError

# What happens to Smith's noise scale when the batch grows: it falls, or the lr or the momentum keeps it.
NoiseRule = Literal["falls", "lr", "momentum"]


def keep_noise(rule: NoiseRule, lr: float, momentum: float, growth: float) -> tuple[float, float]:
    """The lr and momentum for a batch that is `growth` times the one they are made for."""
    if rule == "lr":
        return lr * growth, momentum
    if rule == "momentum":
        return lr, noise_keeping_momentum(momentum, growth)
    return lr, momentum


def noise_keeping_momentum(momentum: float, growth: float) -> float:
    """The momentum that keeps g at a fixed lr when the batch is `growth` times as large.

    Raises:
        ConfigError: when the batch shrinks so far that the momentum would have to be negative.
    """
    kept = 1.0 - (1.0 - momentum) / growth
    if kept < 0.0:
        raise ConfigError(
            f"a batch of {growth:g} times the first stage needs momentum {kept:.3g} to keep the noise scale, which is "
            'below 0; let the batch grow, or choose batch_control.noise_rule = "lr"'
        )
    return kept


@dataclass(frozen=True)
class NoiseSample:
    """What one step says: unbiased, but so noisy alone that `signal` may be negative."""

    noise: float  # S
    signal: float  # G2


def noise_sample(small: float, big: float, sum_w_over_n: float, sum_w2_over_n: float) -> NoiseSample | None:
    """The estimate of one step (see above), or None when it was a single piece, or not finite."""
    spread = sum_w_over_n - sum_w2_over_n
    # With one piece both sums are the same number and nothing can be told apart.
    if not spread > 1e-9 * sum_w_over_n:
        return None
    noise = (small - big) / spread
    signal = small - noise * sum_w_over_n
    finite = abs(noise) < float("inf") and abs(signal) < float("inf")
    return NoiseSample(noise, signal) if finite else None


@dataclass
class NoiseAverage:
    """Exponential averages of noise and signal, kept apart: the ratio of averages, not the average of ratios.

    `smoothing` is the weight of the past at each measured step. The beginning is not biased towards zero, because
    both averages start with the same zero weight, which cancels in their ratio.
    """

    smoothing: float = 0.95
    noise: float = 0.0
    signal: float = 0.0
    count: int = 0

    def add(self, sample: NoiseSample) -> None:
        self.noise = self.smoothing * self.noise + (1.0 - self.smoothing) * sample.noise
        self.signal = self.smoothing * self.signal + (1.0 - self.smoothing) * sample.signal
        self.count += 1

    @property
    def scale(self) -> float | None:
        """B_simple in images; None before the first measurement and while an average is not positive."""
        return self.noise / self.signal if self.count and self.signal > 0.0 and self.noise > 0.0 else None

    def sample(self) -> NoiseSample:
        """Both averages, without the weight that the beginning lacks."""
        weight = 1.0 - self.smoothing**self.count
        return NoiseSample(self.noise / weight, self.signal / weight) if self.count else NoiseSample(0.0, 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {"noise": self.noise, "signal": self.signal, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.noise, self.signal, self.count = state["noise"], state["signal"], state["count"]
