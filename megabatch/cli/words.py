"""From the words after `megabatch train` to a request: the run to resume, the plan, the scale, the images at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megabatch.config import Config
from megabatch.data.fit_to_set import batch_note, fit_to_set
from megabatch.errors import CheckpointError, LaunchError
from megabatch.recipes import load_config
from megabatch.recipes.scale import scaling_lines
from megabatch.train.request import Elastic, TrainRequest
from megabatch.train.run_dir import recorded_run
from megabatch.workers.world import read_world


@dataclass(frozen=True)
class TrainWords:
    """What was typed. elastic: HOST:PORT of a lighthouse, or "local"; overrides: --set, and the path of --data."""

    recipe: str
    data: Path | None = None
    workers: int | None = None
    grid: str | None = None
    output: Path | None = None
    resume: bool = False
    scale: str | None = None
    epochs: float | None = None
    overrides: tuple[str, ...] = ()
    plan: Path | None = None
    elastic: str | None = None
    min_workers: int = 1
    max_workers: int = 0
    debug: bool = False


def make_request(
    words: TrainWords, environ: Mapping[str, str], say: Callable[[str], None]
) -> tuple[TrainRequest, int | None]:
    """The run that the words ask for, and how many local workers it wants, None: as many as there are.

    `say` hears what is to be said at once: looking at the images may take seconds.

    Raises:
        MegabatchError: a mistake in the words, the recipe, the plan or the images, in one line.
    """
    if words.elastic is None and (words.min_workers > 1 or words.max_workers):
        raise LaunchError("--min-workers and --max-workers bound the workers of an elastic run; add --elastic")
    name, plan_text = Path(words.recipe).stem, ""
    if words.resume and words.output is None:
        words = _as_recorded(words, environ)
    if words.plan is not None:
        words, plan_text = _as_planned(words, words.plan, environ)
    config, lines = _settings(words, environ, say)
    elastic = None
    if words.elastic is not None:
        lighthouse = "" if words.elastic == "local" else words.elastic
        elastic = Elastic(lighthouse, min_workers=words.min_workers, max_workers=words.max_workers)
    request = TrainRequest(
        config,
        words.output,
        words.grid,
        resume=words.resume,
        debug=words.debug,
        plan=plan_text,
        name=name,
        lines=tuple(lines),
        elastic=elastic,
    )
    return request, words.workers


def _as_recorded(words: TrainWords, environ: Mapping[str, str]) -> TrainWords:
    """The words with a run folder in place of the recipe read as the run it holds: its workers and grid stay."""
    folder = Path(words.recipe)
    recorded = recorded_run(folder)
    if recorded is None:
        if folder.is_dir():
            raise CheckpointError(f"'{folder}' is not a run folder (it has no config.toml); give the folder of a run")
        return words
    words = replace(words, recipe=recorded.recipe, output=recorded.folder)
    if words.workers is None and words.grid is None and read_world(environ) is None:
        words = replace(words, workers=recorded.workers, grid=recorded.grid)
    return words


def _as_planned(words: TrainWords, plan: Path, environ: Mapping[str, str]) -> tuple[TrainWords, str]:
    """The words after those of the plan, and the plan's text; what was typed wins."""
    from megabatch.plan.plan_file import follow  # only a run with a plan waits for the planner to load

    found = follow(plan, words.recipe, words.grid, words.workers, environ, scale=words.scale, epochs=words.epochs)
    overrides = found.overrides + words.overrides
    words = replace(words, overrides=overrides, grid=found.grid, workers=found.workers)
    return replace(words, scale=found.scale, epochs=found.epochs), found.text


def _settings(words: TrainWords, environ: Mapping[str, str], say: Callable[[str], None]) -> tuple[Config, list[str]]:
    """The settings, fitted to the images of --data; and what a person is told of how they came about."""
    load = partial(load_config, words.recipe, scale=words.scale, epochs=words.epochs)
    config = load(list(words.overrides))
    if words.data is not None and words.data.exists():
        world = read_world(environ, alone=words.workers is not None)
        if world is None or world.is_main:
            say(f"recipe         {words.recipe}, looking at the images in {words.data}")
    lines = scaling_lines(load(scale=None), config) if words.scale is not None else []
    lines += batch_note(load(), config)
    if words.data is not None:
        fitted = fit_to_set(config, words.data.absolute(), words.overrides)
        config = load([*words.overrides, *fitted.overrides])
        lines += fitted.lines
    return config, lines
