"""A recipe meets a set of somebody's own: what follows from the images, and what a person should be told.

`fit_to_set` looks at the set that `--data` names. The kind is seen by its files. Of a set that is not the recipe's own
(another kind or another number of classes, or a recipe that names no classes) mean and std are measured. A recipe that
names no size of set gets a batch that fits: a twentieth of the images, in whole ghost batches, at most the recipe's
own; the learning rate follows it by the linear rule. What somebody sets by hand is never changed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megabatch.config import Config
from megabatch.data.formats import detect_kind, open_source
from megabatch.data.sources import Source, check_same_classes, names_of
from megabatch.data.statistics import cached_pixels
from megabatch.errors import DataError, some_names
from megabatch.schedule.batch import parse_stages
from megabatch.schedule.pieces import largest_value

STEPS_PER_EPOCH = 20
_SIMILAR = (0.8, 1.25)  # sets of about the recipe's size need no word
_IDX_KINDS = ("idx", "mnist", "fashion-mnist")


@dataclass(frozen=True)
class Fitted:
    """`overrides` in the form of --set, and lines to be said before the run."""

    overrides: tuple[str, ...]
    lines: tuple[str, ...]


def fit_to_set(config: Config, path: Path, given: Sequence[str]) -> Fitted:
    """What the set at `path` changes in a recipe; `given`: what was set by hand, which stays.

    Raises:
        DataError: nothing known is there, a set of one class, splits that do not fit together.
    """
    by_hand = {one.partition("=")[0].strip() for one in given}
    kind = config.data.source if "data.source" in by_hand else _kind_at(path, config.data.source)
    train, val = _open(kind, path, config.data.num_classes if "data.num_classes" in by_hand else None)
    if train.num_classes < 2:
        raise DataError(f"{path} has one class, training needs at least two; make a folder for each class")
    recipe_classes = config.data.num_classes
    is_own = (kind, train.num_classes) == (config.data.source, recipe_classes)
    changed: dict[str, Any] = {"data.source": kind, "data.num_classes": train.num_classes}
    lines = [line for source in (train, val) if (line := _missing_classes(source))]
    if recipe_classes not in (None, train.num_classes):
        lines.append(
            f"note           the recipe was made for {recipe_classes:,} classes, the set has {train.num_classes:,}"
        )
    if not is_own:
        found = cached_pixels(train, config.data.image_size)
        changed |= {"data.mean": list(found.mean), "data.std": list(found.std)}
        how = "measured before" if found.is_cached else "measured now"
        lines.append(
            f"pixels         mean {_numbers(found.mean)}, std {_numbers(found.std)}, {how} "
            f"on {found.num_images:,} images"
        )
    if config.reference.images is None:
        changed |= _fitting_batch(config, len(train), by_hand)
        if "optimizer.lr_factor" in changed:
            lines.append(
                f"batch          {changed['train.global_batch_size']} of {len(train):,} images, "
                f"learning rate times {changed['optimizer.lr_factor']:g} by the linear rule"
            )
    elif not _SIMILAR[0] <= len(train) / config.reference.images <= _SIMILAR[1]:
        lines.append(_other_size(config, len(train)))
    overrides = tuple(f"{name}={json.dumps(value)}" for name, value in changed.items() if name not in by_hand)
    return Fitted(overrides, tuple(lines))


def batch_note(published: Config, config: Config) -> list[str]:
    """A line when the batch is not the recipe's and its learning rate still is."""
    old, new = (parse_stages(one.train.global_batch_size).global_batch_sizes[0] for one in (published, config))
    lrs = [(one.optimizer.lr, one.optimizer.lr_factor) for one in (published, config)]
    if old == new or lrs[0] != lrs[1]:
        return []
    peak = largest_value(config.optimizer.lr) * config.optimizer.lr_factor
    factor = config.optimizer.lr_factor * new / old
    line = (
        f"warning        the learning rate, up to {peak:g}, was made for a global batch of {old:,} and this one is "
        f"{new:,}; by the linear rule add --set optimizer.lr_factor={factor:.3g}, or use `megabatch tune`"
    )
    return [line]


def _kind_at(path: Path, wanted: str) -> str:
    kind = detect_kind(path)
    return wanted if kind == "idx" and wanted in _IDX_KINDS else kind


def _open(kind: str, path: Path, num_classes: int | None) -> tuple[Source, Source]:
    options: dict[str, Any] = {"memory_limit_bytes": 0}  # only looked at here
    options |= {"num_classes": num_classes} if num_classes else {}
    train, val = (open_source(kind, path, split, **options) for split in ("train", "val"))
    if train.num_classes > val.num_classes and not num_classes:  # labels alone do not show the last classes
        val = open_source(kind, path, "val", **options, num_classes=train.num_classes)
    check_same_classes(train, val)
    return train, val


def _missing_classes(source: Source) -> str:
    """A line when a split has no image of some classes."""
    counts = np.bincount(source.labels, minlength=source.num_classes)
    missing = [name for name, count in zip(names_of(source), counts.tolist(), strict=True) if not count]
    if not missing:
        return ""
    classes = f"{len(missing)} of {source.num_classes:,} classes"
    return f"warning        {source.name} has no image of {classes}: {some_names(missing)}"


def _fitting_batch(config: Config, num_images: int, by_hand: set[str]) -> dict[str, Any]:
    if by_hand & {"train.global_batch_size", "train.ghost_batch_size", "optimizer.lr_factor"}:
        return {}
    stages = parse_stages(config.train.global_batch_size).global_batch_sizes
    ghost = config.train.ghost_batch_size
    while ghost > 2 and ghost * 4 > num_images:
        ghost //= 2
    batch = min(stages[0], max(1, num_images // STEPS_PER_EPOCH // ghost) * ghost)
    if len(stages) > 1 or batch == stages[0]:
        return {}
    factor = config.optimizer.lr_factor * batch / stages[0]
    return {"train.ghost_batch_size": ghost, "train.global_batch_size": batch, "optimizer.lr_factor": factor}


def _other_size(config: Config, num_images: int) -> str:
    batch = parse_stages(config.train.global_batch_size).global_batch_sizes[0]
    return (
        f"warning        the recipe was made for {config.reference.images:,} images, the set has {num_images:,}: "
        f"its batch of {batch:,} is {batch / num_images:.1%} of them; fit it with --scale PROFILE.toml, or search for "
        "its lr with `megabatch tune`"
    )


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)
