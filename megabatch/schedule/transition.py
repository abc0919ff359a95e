"""From RMSprop to SGD (Akiba, Suzuki, Fukuda 2017, arXiv 1711.04325, section 3.1): the share of SGD by epoch.

    share = 1/2 * exp(2 * (epoch - center) / period)     before the center
          = 1/2 + (epoch - center) / period              until period / 2 after it
          = 1                                            from there on

The paper prints the middle line with slope 2 / period. That line reaches 1 half way, goes on to 1.5, falls back to 1,
and makes the share of RMSprop negative meanwhile; with slope 1 / period the curve is continuous and smooth at the
center, as the paper's text describes it. `literal` gives the printed one.
"""

from __future__ import annotations

import math

__all__ = ["sgd_share", "transition_ends"]


def sgd_share(epoch: float, center_epoch: float = 10.0, period_epochs: float = 5.0, *, literal: bool = False) -> float:
    """alpha_SGD of the paper at a fractional epoch."""
    passed = (epoch - center_epoch) / period_epochs
    if passed < 0:
        return 0.5 * math.exp(2.0 * passed)
    if passed < 0.5:
        return 0.5 + (2.0 if literal else 1.0) * passed
    return 1.0


def transition_ends(center_epoch: float, period_epochs: float) -> float:
    """The epoch from which on the step is SGD alone."""
    return center_epoch + period_epochs / 2.0
