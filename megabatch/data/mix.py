"""mixup and cutmix: an image takes in a part of the next image of its ghost batch; the last one, of the first.

mixup (Zhang et al. 2017) blends both, cutmix (Yun et al. 2019) pastes a box of the other. The image's own share s is
drawn from Beta(alpha, alpha), and 1 - s where that is more. So its own label weighs most, and since each image is the
next of another one, mixtures are as likely as without. The loss is s times that of the image's own label plus 1 - s
times that of the other. A ghost batch's pixels depend on its images alone, in whole numbers.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from megabatch.data.augment import MIX_DRAWS, Augmentation
from megabatch.data.jpeg import Pixels
from megabatch.data.randomness import Floats

_PARTS = 256
"""A blend is made in so many parts: sums of whole numbers have the same bits everywhere."""


def mix(images: Pixels, policy: Augmentation, uniforms: Floats) -> NDArray[np.float32]:
    """Mixes the images of a ghost batch, [n, height, width, channels], in place; returns each one's own share, [n].

    Columns of `uniforms`, [n, MIX_DRAWS]: which kind, share, top, left.
    """
    from scipy.special import betaincinv  # takes a while to load, and few runs need it

    assert uniforms.shape == (len(images), MIX_DRAWS)
    others = np.roll(images, -1, axis=0)
    shares = np.empty(len(images), dtype=np.float32)
    cuts = uniforms[:, 0] < (0.5 if policy.mixup and policy.cutmix else float(policy.cutmix > 0))
    for at, (image, other, draws) in enumerate(zip(images, others, uniforms.tolist(), strict=True)):
        alpha = policy.cutmix if cuts[at] else policy.mixup
        share = float(betaincinv(alpha, alpha, draws[1]))
        share = max(share, 1.0 - share)
        shares[at] = _paste(image, other, share, *draws[2:]) if cuts[at] else _blend(image, other, share)
    return shares


def _blend(image: Pixels, other: Pixels, share: float) -> float:
    parts = round(share * _PARTS)
    image[:] = (image.astype(np.uint32) * parts + other.astype(np.uint32) * (_PARTS - parts) + _PARTS // 2) // _PARTS
    return parts / _PARTS


def _paste(image: Pixels, other: Pixels, share: float, for_top: float, for_left: float) -> float:
    """A box of the image's own shape and of 1 - share of its area, anywhere inside."""
    height, width = int(image.shape[0]), int(image.shape[1])
    side = math.sqrt(1.0 - share)
    box_height, box_width = round(height * side), round(width * side)
    top, left = int(for_top * (height - box_height + 1)), int(for_left * (width - box_width + 1))
    box = (slice(top, top + box_height), slice(left, left + box_width))
    image[box] = other[box]
    return 1.0 - box_height * box_width / (height * width)
