"""The command line: one file per verb or group of verbs.

A verb parses, calls and prints; no logic. Everything heavy is imported by the verb that needs it.
"""

from __future__ import annotations

from typing import Annotated

import typer

import megabatch
from megabatch.cli import (
    bench,
    data,
    doctor,
    evaluate,
    export,
    launch,
    lighthouse,
    plan,
    predict,
    recipes,
    report,
    study,
    train,
    tune,
    verify,
)
from megabatch.cli.options import examples

app = typer.Typer(
    name="megabatch",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Train image classifiers, on own images or with extremely large minibatches on many workers, and use them.\n\n"
    "Pages: docs/own_images.md, docs/use_a_model.md, docs/running.md.",
    epilog=examples(
        "megabatch train photos --data FOLDER",
        "megabatch predict runs/mine photo.jpg",
        "megabatch export runs/mine --to onnx",
        "megabatch train demo --workers 4 --grid 2x2",
    ),
)
for verbs in (
    train.app,
    evaluate.app,
    predict.app,
    export.app,
    verify.app,
    recipes.app,
    plan.app,
    report.app,
    tune.app,
    study.app,
    doctor.app,
    lighthouse.app,
):
    app.add_typer(verbs)
for name, group in (("data", data.app), ("bench", bench.app), ("launch", launch.app)):
    app.add_typer(group, name=name)


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"megabatch {megabatch.__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say the version and end.")
    ] = False,
) -> None:
    """Options before the verb."""
