"""`megabatch export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from megabatch.cli.options import Debug, FinishedRun, examples

app = typer.Typer()


@app.command(
    epilog=examples(
        "megabatch export runs/mine --to onnx",
        "megabatch export runs/mine --to onnx --images FOLDER",
        "megabatch export runs/mine --to huggingface --output ORG/NAME",
    )
)
def export(
    run: FinishedRun,
    to: Annotated[str, typer.Option(help="onnx, torch (torch.export), timm or huggingface (folders).")],
    output: Annotated[Path | None, typer.Option(help="Where to; in the run folder by default.")] = None,
    images: Annotated[
        Path | None, typer.Option(help="Images to compare the result on, at most 64; random pixels by default.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a run's model for other programs, and compare it with the model."""
    from megabatch.errors import ConfigError, nearest
    from megabatch.use.classifier import fitted_images, image_files, load
    from megabatch.use.export import FILES, Target, some_images
    from megabatch.use.export import export as write

    if to not in get_args(Target):
        raise ConfigError(
            f"--to is '{to}'{nearest(to, get_args(Target))}; it must be one of {', '.join(get_args(Target))}"
        )
    classifier = load(run)
    compared = fitted_images(classifier, image_files([images])[:64]) if images else some_images(classifier)
    place = output or run / FILES[to]
    difference = write(classifier, cast(Target, to), place, compared)
    said = "not compared: timm cannot be imported here"
    if difference is not None:
        said = f"logits differ by {difference:.2g} at most on {len(compared)} images"
    print(f"{to}: {place}, {said}")
