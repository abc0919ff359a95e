"""A recipe made for a large set, fitted to a small one or to fewer epochs, with the shape of everything kept.

`at_scale` replaces images, network and ghost batch by those of a profile (a TOML file in `recipes/scales`, or one of
the user's own) and scales every batch so that batch / images in the set stays. Epochs and schedules stay. Hence the
number of steps stays, and with it the noise scale lr * images / batch (Smith and Le 2017), so learning rates stay
too; `optimizer.lr_factor` changes their level. Batches are rounded to whole ghost batches: `scaling_lines` says how.

`over_epochs` compresses or stretches the epoch axis: every epoch in schedules, batch stages, transitions and collapses
is multiplied by the same factor. How often a run is evaluated and saved stays.

Both go by the house's naming rule, so that they reach settings they have never heard of: a number of epochs is called
`..._epoch` or `..._epochs`, a batch `...global_batch_size`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from megabatch.config import Config
from megabatch.config.section import PositiveInt, Section
from megabatch.errors import ConfigError, complaint, nearest
from megabatch.files import parse_toml, read_text
from megabatch.recipes.validate import apply_override, validate
from megabatch.schedule.batch import MAX_EPOCHS, BatchStages, count_steps, parse_stages

SCALES = Path(__file__).parent / "scales"
_INTERVALS = ("evaluate_every_epochs", "every_epochs")  # for those who watch; no part of the method


class Profile(Section):
    """A small set to scale a recipe to, the network for it, and what else a small machine needs."""

    name: str = ""
    images: PositiveInt  # in its training set
    data: dict[str, Any]  # replaces the recipe's section
    model: dict[str, Any] = Field(default_factory=dict)  # these three are laid over the recipe's
    train: dict[str, Any] = Field(default_factory=dict)
    comm: dict[str, Any] = Field(default_factory=dict)

    @property
    def training_images(self) -> int:
        """How many are trained on, with those kept out by settings of the data left out."""
        limit = int(self.data.get("max_train_images", 0)) or self.images
        return min(limit, self.images - int(self.data.get("held_out_images", 0)))


def profile_names() -> list[str]:
    """The profiles that come with the package."""
    return sorted(path.stem for path in SCALES.glob("*.toml"))


def read_profile(name: str, overrides: list[str] | None = None) -> Profile:
    """A shipped profile by name, or a TOML file; overrides of the data, the model and the ghost batch go into it.

    Raises:
        ConfigError: an unknown name, or a file that is no profile.
    """
    path = Path(name) if name.endswith(".toml") else SCALES / f"{name}.toml"
    if not path.is_file():
        hint = nearest(name, profile_names()) or f"; known: {', '.join(profile_names())}"
        raise ConfigError(f"unknown scale '{name}'{hint}; give one of these, or a TOML file with a profile")
    try:
        table = {"name": path.stem, **parse_toml(read_text(path))}
        for override in overrides or []:
            if override.lstrip().startswith(("data.", "model.", "train.ghost_batch_size")):
                apply_override(table, override)
        return Profile.model_validate(table)
    except ValidationError as error:
        where, reason = complaint(error)
        raise ConfigError(f"scale '{name}' is no profile: '{where}': {reason}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"scale '{name}' cannot be read: {error}; it must be a TOML file") from None


def at_scale(config: Config, profile: Profile) -> Config:
    """The recipe fitted to the profile's set: same epochs, same schedules, same batch / images.

    Raises:
        ConfigError: the recipe does not say for how many images it was made, or the result cannot work.
    """
    if config.reference.images is None:
        raise ConfigError(
            "--scale needs to know for how many training images a recipe was made and this one does not say; "
            "add reference.images to it"
        )
    ghost = int(profile.train.get("ghost_batch_size", config.train.ghost_batch_size))
    factor = profile.training_images / config.reference.images

    def scale(key: str, value: Any) -> Any:
        if not key.endswith("global_batch_size") or value == 0:
            return value
        stages = parse_stages(value)
        totals = [max(1, round(total * factor / ghost)) * ghost for total in stages.global_batch_sizes]
        return BatchStages(stages.from_epochs, tuple(totals)).text

    table = _mapped(config.model_dump(mode="json", exclude_none=True), scale)
    table["data"] = dict(profile.data)
    for section in ("model", "train", "comm"):
        table[section] |= getattr(profile, section)
    not_known = f"not known: a published recipe scaled to {profile.name}"
    table["reference"] |= {
        "images": profile.training_images,
        "hardware": "any",
        "time": not_known,
        "accuracy": not_known,
    }
    table["reference"].pop("workers", None)
    return validate(table, source=f"the recipe at scale '{profile.name}'")


def over_epochs(config: Config, epochs: float) -> Config:
    """The recipe over another number of epochs, every schedule and stage compressed or stretched alike.

    Raises:
        ConfigError: a number of epochs that cannot work.
    """
    if not 0 < epochs <= MAX_EPOCHS:
        raise ConfigError(f"--epochs {epochs:g} cannot be used; give a number above 0, at most {MAX_EPOCHS:,.0f}")
    table = stretched(config.model_dump(mode="json", exclude_none=True), epochs / config.train.epochs)
    table["train"]["epochs"] = epochs  # exactly
    return validate(table, source=f"the recipe over {epochs:g} epochs")


def stretched(table: dict[str, Any], factor: float) -> dict[str, Any]:
    """Settings with every epoch times `factor`: lr, momentum, weight decay, stages, collapses, resets."""

    def stretch(key: str, value: Any) -> Any:
        if key.endswith("global_batch_size") and isinstance(value, str):
            return parse_stages(value).stretched(factor).text
        if not (key.endswith(("_epoch", "_epochs")) or key == "epochs") or key in _INTERVALS or isinstance(value, bool):
            return value
        return [one * factor for one in value] if isinstance(value, list) else value * factor

    changed: dict[str, Any] = _mapped(table, stretch)
    return changed


def scaling_lines(published: Config, scaled: Config) -> list[str]:
    """What scaling did, for a person: batches as shares of the set, rounding, steps."""
    images, small = published.reference.images or 0, scaled.reference.images or 0
    lines = [f"scaled         {images:,} -> {small:,} images, network {scaled.model.name}"]
    old, new = (parse_stages(one.train.global_batch_size) for one in (published, scaled))
    if images and small and len(old.global_batch_sizes) == len(new.global_batch_sizes):
        for before, after in zip(old.global_batch_sizes, new.global_batch_sizes, strict=True):
            exact, ghost = before * small / images, scaled.train.ghost_batch_size
            lines.append(
                f"global batch   {before:,} ({before / images:.2%} of the set) -> {after:,} ({after / small:.2%}), "
                f"rounded from {exact:,.1f} to whole ghost batches of {ghost} ({after / exact - 1:+.1%})"
            )
        counts = [
            count_steps(stages, one.train.ghost_batch_size, total, round(one.train.epochs * total))
            for stages, one, total in ((old, published, images), (new, scaled, small))
        ]
        lines.append(f"steps          {counts[0]:,} -> {counts[1]:,}")
    if scaled.optimizer.lr_factor != 1:
        lines.append(f"lr             times {scaled.optimizer.lr_factor:g}")
    return lines


def _mapped(table: Any, change: Callable[[str, Any], Any], key: str = "") -> Any:
    """The table with `change(key, value)` for every value that is not itself a table or a list of tables."""
    if isinstance(table, dict):
        return {name: _mapped(value, change, name) for name, value in table.items()}
    if isinstance(table, list) and any(isinstance(one, dict) for one in table):
        return [_mapped(one, change) for one in table]
    return change(key, table)
