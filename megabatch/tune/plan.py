"""What a search consists of: the recipe, its ranges, the held-out images, the lengths of its runs.

**Held-out images.** Trials train on a part of the training set and are judged by `data.held_out_images` others of it:
the end of one fixed order of all training images that has the set's mix of classes (`data.sources.mixed_order`). The
order depends on the labels alone, so every trial holds out the same images. The validation images play no part.

**Successive halving.** A trial is a row of runs, each over more epochs than the one before, with every schedule
stretched to its length (`recipes.scale.over_epochs`). So every number that trials are compared by is that of a finished
schedule, whose lr has come down. One in `REDUCTION` trials goes on to the next length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megabatch.config import Config
from megabatch.data.formats import open_source
from megabatch.errors import ConfigError
from megabatch.recipes.scale import over_epochs
from megabatch.recipes.validate import validate
from megabatch.schedule.batch import count_steps, parse_stages
from megabatch.train.run_dir import digest_of
from megabatch.tune.space import Dimension, default_space, parse_search, with_values

REDUCTION = 3  # Li 2018 (ASHA), section 3: 3 or 4
MIN_STEPS = 40  # of the shortest run: fewer tell nothing
MAX_RUNGS = 3
METRICS = {"top1": True, "top5": True, "val_loss": False}  # whether more is better
_HELD_OUT_SHARE, _MAX_HELD_OUT = 10, 10_000


@dataclass(frozen=True)
class Rung:
    """One length of run; `resource` counts in units of the shortest."""

    number: int
    epochs: float
    resource: int


@dataclass(frozen=True)
class TunePlan:
    """Everything that decides what trials are; two plans with one digest may share a journal."""

    recipe: Config  # whole: best.toml is this with other values
    trial: Config  # as trials run it: images held out, at the recipe's length
    space: tuple[Dimension, ...]
    rungs: tuple[Rung, ...]
    metric: str
    num_train: int

    @property
    def maximize(self) -> bool:
        return METRICS[self.metric]

    @property
    def digest(self) -> str:
        return digest_of(self.trial, self.metric, self.rungs, self.space)

    def config(self, values: Mapping[str, float], rung: Rung) -> Config:
        """The settings of one run of a trial; a run that is interrupted loses a fifth of itself at most."""
        config = over_epochs(with_values(self.trial, values), rung.epochs)
        often = {"every_epochs": min(config.checkpoint.every_epochs or math.inf, rung.epochs / 5)}
        return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update=often)})

    def images(self, rung: Rung) -> int:
        """Training images that a run of this length sees, those of collapses included."""
        collapse = self.trial.collapse
        branches = len(collapse.at_epochs) * collapse.epochs / self.trial.train.epochs if collapse else 0.0
        return round(rung.epochs * (1 + branches) * self.num_train)


def make_plan(
    recipe: Config,
    *,
    search: Sequence[str] = (),
    epochs: float | None = None,
    held_out: int | None = None,
    rungs: int | None = None,
    metric: str = "top1",
) -> TunePlan:
    """Check everything that can be checked before the first run.

    Raises:
        ConfigError, DataError: in one line.
    """
    if metric not in METRICS:
        raise ConfigError(f"--metric '{metric}' is no number that runs are judged by; choose from {', '.join(METRICS)}")
    space = tuple(parse_search(text, recipe) for text in search) or default_space(recipe)
    keys = [one.key for one in space]
    if len(set(keys)) < len(keys):
        raise ConfigError(f"--search names '{max(keys, key=keys.count)}' twice; name each setting once")
    num_images = count_training_images(recipe)
    num_train, num_held_out = split(num_images, recipe, held_out)
    table = recipe.model_dump(mode="json", exclude_none=True)
    table["data"] |= {"held_out_images": num_held_out, "max_train_images": num_train}
    table["train"]["evaluate_every_epochs"] = 0.0  # only the end counts
    table["log"]["to"] = []
    trial = validate(table, source="the recipe with held-out images")
    longest = recipe.train.epochs if epochs is None else epochs
    over_epochs(trial, longest)  # refuses a length that cannot be
    stages = parse_stages(over_epochs(trial, longest).train.global_batch_size)
    steps = count_steps(stages, trial.train.ghost_batch_size, num_train, round(longest * num_train))
    return TunePlan(recipe, trial, space, make_rungs(longest, steps, rungs), metric, num_train)


def make_rungs(epochs: float, steps: int, wanted: int | None = None) -> tuple[Rung, ...]:
    """Lengths that grow by `REDUCTION`; as many as leave the shortest run `MIN_STEPS`, unless a number is wanted."""
    fitting = 1 + int(math.log(max(1.0, steps / MIN_STEPS), REDUCTION) + 1e-9)
    count = wanted or min(MAX_RUNGS, fitting)
    return tuple(Rung(number, epochs / REDUCTION ** (count - 1 - number), REDUCTION**number) for number in range(count))


def count_training_images(config: Config) -> int:
    """Images in the training set, before any are left out."""
    data = config.data
    if data.source == "generated":
        return data.generated.num_train
    # Nothing is decoded: only the labels are looked at.
    options = {"num_classes": data.num_classes} if data.num_classes else {}
    return len(open_source(data.source, data.path or None, "train", memory_limit_bytes=0, **options))


def split(num_images: int, config: Config, held_out: int | None = None) -> tuple[int, int]:
    """How many images trials train on, and how many they are evaluated on.

    Without a wish: what the recipe holds out, else a tenth of the images, at most 10,000. What the recipe limits itself
    to is kept where enough images lie beyond.

    Raises:
        ConfigError: no image can be held out.
    """
    limit = config.data.max_train_images or num_images
    tenth = min(limit, num_images) // _HELD_OUT_SHARE
    wanted = held_out or config.data.held_out_images or min(_MAX_HELD_OUT, max(1, tenth))
    num_train = min(limit, num_images - wanted)
    needed = config.train.ghost_batch_size
    if num_train < needed:
        raise ConfigError(
            f"no {wanted:,} images can be held out of {num_images:,} training images: {max(0, num_train):,} would be "
            f"left, a ghost batch needs {needed:,}; give more images, or a smaller --held-out or train.ghost_batch_size"
        )
    return num_train, wanted
