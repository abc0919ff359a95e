"""The memory that a worker needs for a recipe, by what it is for.

What grows with the ghost batch are the activations that a forward pass keeps for the backward pass; ghost batches are
passed one after the other, so their number does not matter. Everything else is bytes a parameter. `estimate` needs no
torch: of a stored ResNet every convolution keeps what it gets and what it gives, which its norm and ReLU share.
`megabatch train RECIPE --check-memory` counts the same with torch's tracker, for any network.
"""

from __future__ import annotations

import csv
import re
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from megabatch.config import Config
from megabatch.schedule.batch import parse_stages

LAYERS_FILE = Path(__file__).parent / "data" / "layers.csv"
RESERVED_BYTES = 1_500_000_000
"""For the device's own context, NCCL and the workspaces of cuDNN: a judgement, nothing here can measure it."""

_STATES = {"sgd": 1, "lars": 1, "adamw": 2, "nadamw": 2, "lamb": 2, "rmsprop_warmup": 2}
"""Tensors as large as the weights that an optimizer remembers; others are counted as two."""

_SIZES_GB = (8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 141, 192)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one worker while it trains. gradients: DDP's buckets. casts: weights in half precision.

    passed: what a pass of one ghost batch keeps at its largest moment, besides all the others.
    """

    weights: int
    gradients: int
    optimizer: int
    exact_sums: int
    average: int
    casts: int
    passed: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def lines(self, ghost_batch_size: int, device_bytes: int = 0) -> list[str]:
        """For people: the parts, and whether they fit a device, or which usual size of device they fit."""
        parts = [f"{name.replace('_', ' ')} {gigabytes(value)}" for name, value in asdict(self).items() if value]
        text = f"{gigabytes(self.total)} GB a worker: {', '.join(parts)} (ghost batch of {ghost_batch_size})"
        return [text, self.verdict(ghost_batch_size, device_bytes)]

    def of_ghost(self, before: int, after: int) -> Memory:
        """With a ghost batch of another size."""
        return replace(self, passed=round(self.passed * after / before))

    def fits(self, device_bytes: int) -> bool:
        """Whether a device holds it, with what its libraries take."""
        return self.total + RESERVED_BYTES <= device_bytes

    def verdict(self, ghost_batch_size: int, device_bytes: int = 0) -> str:
        """Whether it fits, and the largest ghost batch that would."""
        reserve = f"with {gigabytes(RESERVED_BYTES)} GB for the device's libraries"
        if not device_bytes:
            size = next((size for size in _SIZES_GB if self.fits(size * 10**9)), 0)
            return f"fits a device of {size} GB, {reserve}" if size else f"fits no usual device, {reserve}"
        largest = self.largest_ghost(ghost_batch_size, device_bytes)
        fits = "fits" if self.fits(device_bytes) else "DOES NOT FIT"
        return f"{fits} a device of {gigabytes(device_bytes)} GB, {reserve}; the largest ghost batch is about {largest}"

    def largest_ghost(self, ghost_batch_size: int, device_bytes: int) -> int:
        """The largest ghost batch that fits, were all of a pass in proportion to it; 0 when none does."""
        free = device_bytes - RESERVED_BYTES - (self.total - self.passed)
        return max(0, int(free * ghost_batch_size / max(1, self.passed)))


def estimate(config: Config, passes: int = 2) -> Memory | None:
    """The memory for a stored network, for so many ghost batches on a worker; None for a network that is not stored."""
    found = _stored(config.model.label)
    if found is None:
        return None
    parameters, outputs, of_first = found
    half = config.train.precision != "fp32"
    size = 2 if half else 4
    pooled = of_first / 4 * (size + 8)  # with the places of the largest, in eight bytes each
    images = 3 * 224**2 * (4 + half * 2)
    per_image = (2 * outputs * size + pooled + images) * (config.data.image_size / 224) ** 2
    return of_state(config, parameters, passes, round(per_image * config.train.ghost_batch_size))


def of_state(config: Config, parameters: int, passes: int, passed: int) -> Memory:
    """With what is kept for every parameter, by the settings."""
    weights = 4 * parameters
    has_momentum = config.optimizer.name not in ("sgd", "lars") or config.optimizer.momentum != 0.0
    return Memory(
        weights=weights,
        gradients=weights,
        optimizer=weights * _STATES.get(config.optimizer.name, 2) * has_momentum,
        exact_sums=weights * (config.comm.sums == "exact" and passes > 1),
        average=weights * bool(config.model.ema_half_life_epochs),
        casts=weights // 2 * (config.train.precision != "fp32"),
        passed=passed,
    )


def passes_of(config: Config, world_size: int) -> int:
    """The most ghost batches that a worker passes in a step."""
    largest = max(parse_stages(config.train.global_batch_size).global_batch_sizes)
    return -(-largest // config.train.ghost_batch_size // world_size)


def device_bytes_of(accelerator: str) -> int:
    """The memory in the name of an accelerator, "A100-SXM4-80GB"; 0 when the name does not tell."""
    found = re.search(r"(\d+) ?GB", accelerator)
    return int(found[1]) * 10**9 if found else 0


def gigabytes(value: int) -> str:
    return f"{value / 1e9:.2f}"


@cache
def _stored(model: str) -> tuple[int, int, int] | None:
    """Parameters, and elements that all convolutions and the first one give for one image of 224 pixels."""
    with open(LAYERS_FILE, encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == model]
    if not rows:
        return None
    outputs = [int(row["outputs"]) for row in rows]
    return sum(int(row["parameters"]) for row in rows), sum(outputs), outputs[0]
