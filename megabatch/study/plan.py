"""What a study consists of: named arms, each a recipe with changes, each run once per seed.

A study is a file:

    title = "..."
    recipe = "demo"                    # of every arm that names none; a file is looked for beside the study file
    scale = "fashion-mnist"            # fits recipes to a small set, as `train --scale` does; may be a file beside
    epochs = 30                        # shortens or stretches all schedules, as `train --epochs` does
    seeds = 3                          # 0, 1, 2; an arm may have more or fewer
    baseline = "small batch"           # what arms are compared with
    margin_points = 0.5                # how far apart still counts as equal, in points of the metric; an arm may differ
    paired = true                      # compare seed with seed: arms with one seed share first weights and data order
    target_percent = 84.0              # also tell steps, images and seconds until top-1 first reaches it
    set = ["train.epochs=4"]           # changes of all arms

    [[arm]]
    name = "small batch"
    set = ["train.global_batch_size=64"]

    [[arm]]
    name = "large batch"
    like = "small batch"               # that arm's recipe and changes first
    set = ["train.global_batch_size=1024"]
    against = "small batch"            # instead of the baseline
    expect = "worse"                   # or "better": its p is one-sided

    [tune]                             # before its seeds run, every arm is tuned with the same effort
    trials = 24
    search = ["optimizer.lr_factor=0.1:10:log"]    # what `megabatch tune --search` takes; by default what is left open

    [[arm]]
    name = "other ranges"
    search = ["optimizer.lr_factor"]   # instead of the study's
    [[arm]]
    name = "as it is"
    tune = false                       # no search for this one
    [[arm]]
    name = "large batch, not tuned again"
    tuned_as = "small batch"           # what the search of that arm found, with the changes below
    set = ["train.global_batch_size=1024"]

A recipe that `megabatch tune` has written (`recipe = "best.toml"`) is an arm like any other.

or, on the command line, a recipe and the values its settings take (`from_grid`): every combination is an arm.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from megabatch.config import Config
from megabatch.config.section import Positive, Section
from megabatch.errors import ConfigError, complaint, nearest
from megabatch.files import parse_toml, read_text
from megabatch.recipes import load_config
from megabatch.schedule.batch import MAX_EPOCHS

_Seeds = Annotated[int, Field(ge=1, le=10_000)]
_Epochs = Annotated[float, Field(gt=0, le=MAX_EPOCHS)]


class Arm(Section):
    """One line of the result: a recipe with changes, and which number of its runs is looked at.

    What an arm of a file leaves out, `_resolved` fills in. same_runs_as: the arm whose runs are looked at, where only
    the number differs. seeds 0: as many as the study says. tune, search, tuned_as: in a study with [tune] only.
    """

    name: Annotated[str, Field(min_length=1)]
    recipe: str = ""
    like: str = ""
    scale: str = ""
    epochs: _Epochs | None = None
    set: tuple[str, ...] = ()
    seeds: _Seeds = 0
    against: str = ""
    metric: str = "top1"
    group: str = ""
    same_runs_as: str = ""
    tune: bool = True
    search: tuple[str, ...] = ()
    tuned_as: str = ""
    margin_points: Positive | None = None
    expect: Literal["", "worse", "better"] = ""

    @property
    def runs_of(self) -> str:
        """The arm whose runs are looked at."""
        return self.same_runs_as or self.name

    def config(self, seed: int) -> Config:
        """The settings of one of its runs."""
        changes = [*self.set, f"train.seed={seed}"]
        return load_config(self.recipe, changes, scale=self.scale or None, epochs=self.epochs)


class TuneTable(Section):
    """The same tuning effort for every arm; what is left out is as in `megabatch tune`."""

    trials: Annotated[int, Field(ge=1, le=100_000)]
    search: tuple[str, ...] = ()
    epochs: _Epochs | None = None
    held_out: Annotated[int, Field(ge=1)] | None = None
    rungs: Annotated[int, Field(ge=1, le=6)] | None = None


class _StudyTable(Section):
    """The file."""

    title: str
    recipe: str = ""
    scale: str = ""
    epochs: _Epochs | None = None
    seeds: _Seeds = 3
    baseline: str = ""
    margin_points: Positive = 0.5
    paired: bool = False
    target_percent: Annotated[float, Field(gt=0, le=100)] | None = None
    set: tuple[str, ...] = ()
    tune: TuneTable | None = None
    arm: Annotated[tuple[Arm, ...], Field(min_length=1)]


@dataclass(frozen=True)
class StudyRun:
    """One training run of an arm; `key` is its folder below the study's."""

    arm: str
    seed: int
    key: str
    config: Config


@dataclass(frozen=True)
class Study:
    """Arms in the order in which they are run and shown."""

    title: str
    arms: tuple[Arm, ...]
    baseline: str
    margin_points: float = 0.5
    tune: TuneTable | None = None
    target_percent: float | None = None
    paired: bool = False

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    def with_arm(self, arm: Arm) -> Study:
        """The study with another arm of this name."""
        return replace(self, arms=tuple(arm if one.name == arm.name else one for one in self.arms))

    def runs(self) -> list[StudyRun]:
        """Every run, checked: arms in order, seeds within an arm."""
        return [
            StudyRun(arm.name, seed, run_key(arm.name, seed), arm.config(seed))
            for arm in self.arms
            if arm.runs_of == arm.name
            for seed in range(arm.seeds)
        ]

    def runs_of(self, arm: Arm) -> list[str]:
        """The folders, below the study's, of the runs an arm looks at."""
        return [run_key(arm.runs_of, seed) for seed in range(arm.seeds)]


def is_study_file(target: str) -> bool:
    """Whether the file holds arms; a recipe's file does not."""
    try:
        return target.endswith(".toml") and re.search(r"^\s*\[\[arm]]", read_text(Path(target)), re.M) is not None
    except OSError:
        return False  # whoever reads it as a recipe says why it cannot be read


def from_file(path: Path, overrides: Sequence[str] = (), scale: str = "") -> Study:
    """Read a study file; `overrides` change all arms and win over the file, `scale` is used instead of the file's."""
    try:
        table = _StudyTable.model_validate(parse_toml(read_text(path)))
    except ValidationError as error:
        raise ConfigError(f"study '{path}' cannot be used: {': '.join(complaint(error))}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"study '{path}' cannot be read: {error}; it must be a TOML file") from None
    table = table.model_copy(update={"scale": scale or table.scale})
    by_name: dict[str, Arm] = {}
    baseline = table.baseline or table.arm[0].name
    for arm in table.arm:
        if arm.name in by_name:
            raise ConfigError(f"study '{path}' has two arms '{arm.name}'; give each a name of its own")
        for what in (arm.like, arm.same_runs_as, arm.tuned_as):
            if what and what not in by_name:
                raise ConfigError(
                    f"arm '{arm.name}' builds on '{what}', which is no arm before it{nearest(what, by_name)}"
                )
        by_name[arm.name] = _resolved(arm, table, by_name, path, baseline)
    arms = tuple(arm.model_copy(update={"set": (*arm.set, *overrides)}) for arm in by_name.values())
    study = Study(
        table.title, arms, baseline, table.margin_points, table.tune, table.target_percent, paired=table.paired
    )
    return _checked(study)


def _resolved(arm: Arm, table: _StudyTable, by_name: dict[str, Arm], path: Path, baseline: str) -> Arm:
    """The arm with what it takes over from the study and from the arm it is like."""
    origin = by_name.get(arm.same_runs_as or arm.tuned_as or arm.like)
    recipe = _beside(path, arm.recipe or (origin or table).recipe)
    if not recipe:
        raise ConfigError(f"arm '{arm.name}' of study '{path}' names no recipe; add recipe = \"...\" to it or on top")
    taken_over = {
        "recipe": recipe,
        "set": (*(origin or table).set, *arm.set),
        "seeds": arm.seeds or (origin.seeds if origin and arm.same_runs_as else table.seeds),
        "against": arm.against or baseline,
        "same_runs_as": origin.runs_of if origin and arm.same_runs_as else "",
        "scale": _beside(path, arm.scale or (origin or table).scale),
        "epochs": arm.epochs or (origin or table).epochs,
        "search": arm.search or (origin.search if origin else ()),
        "margin_points": arm.margin_points or table.margin_points,
    }
    return arm.model_copy(update=taken_over)


def from_grid(recipe: str, vary: Sequence[str], seeds: int, overrides: Sequence[str] = (), baseline: str = "") -> Study:
    """Every combination of the values in `vary` (`key=a,b,c`) is an arm named after them, the first is the baseline."""
    axes = [_axis(text) for text in vary]
    names = ["  ".join(combination) or recipe for combination in product(*axes)]
    first = baseline or names[0]
    arms = tuple(
        Arm(name=name, recipe=recipe, set=(*overrides, *combination), seeds=seeds, against=first)
        for name, combination in zip(names, product(*axes), strict=True)
    )
    varied = ", ".join(text.partition("=")[0] for text in vary) or "seeds"
    return _checked(Study(f"{Path(recipe).stem}: {varied}", arms, first))


def run_key(arm: str, seed: int) -> str:
    """The folder of a run below the study's."""
    return f"{slug(arm)}/seed-{seed}"


def slug(name: str) -> str:
    """The name as a folder."""
    return re.sub(r"[^a-z0-9_.+-]+", "-", name.lower()).strip("-.") or "arm"


def _checked(study: Study) -> Study:
    if study.target_percent is not None:
        for arm in study.arms:
            if not arm.config(0).train.evaluate_every_epochs:
                raise ConfigError(
                    f"arm '{arm.name}' is evaluated at its end only, so nobody sees when it reaches "
                    f"{study.target_percent:g} %; add train.evaluate_every_epochs=1 to set, or leave target_percent out"
                )
    names = [arm.name for arm in study.arms]
    folders: dict[str, str] = {}
    for arm in study.arms:
        if arm.against not in names:
            hint = nearest(arm.against, names) or f"; arms: {', '.join(names)}"
            raise ConfigError(f"arm '{arm.name}' is compared with '{arm.against}', which is no arm of the study{hint}")
        other = folders.setdefault(slug(arm.name), arm.name)
        if other != arm.name:
            raise ConfigError(f"the names of arms '{other}' and '{arm.name}' give one folder; change one of them")
    return study


def _beside(study_file: Path, recipe: str) -> str:
    sibling = study_file.parent / recipe
    return str(sibling) if recipe.endswith(".toml") and sibling.is_file() else recipe


def _axis(text: str) -> list[str]:
    """`key=a,b` as `key=a`, `key=b`; commas inside quotes and brackets belong to a value."""
    key, equals, values = text.partition("=")
    parts, depth, quoted, current = [], 0, "", ""
    for character in values:
        if quoted:
            quoted = "" if character == quoted else quoted
        elif character in "\"'":
            quoted = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        if character == "," and not depth and not quoted:
            parts.append(current)
            current = ""
        else:
            current += character
    parts.append(current)
    if not equals or not key.strip() or any(not part.strip() for part in parts):
        raise ConfigError(
            f"--vary '{text}' cannot be read; write key=a,b,c, for example train.global_batch_size=256,1024"
        )
    return [f"{key.strip()}={part.strip()}" for part in parts]
