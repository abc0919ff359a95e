"""`megabatch predict`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from megabatch.cli.options import Debug, FinishedRun, Json, examples

app = typer.Typer()


@app.command(
    epilog=examples(
        "megabatch predict runs/mine photo.jpg",
        "megabatch predict runs/mine FOLDER --json --top 3",
    )
)
def predict(
    run: FinishedRun,
    images: Annotated[list[Path], typer.Argument(help="Images, or folders of images.")],
    top: Annotated[int, typer.Option(min=1, help="How many classes to name for each image.")] = 5,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Classify images with a run's model. Exit 1 when some cannot be read."""
    from megabatch.errors import DataError
    from megabatch.use.classifier import image_files, load
    from megabatch.use.classifier import predict as predict_files

    files, classifier = image_files(images), load(run)
    names, num_bad, began = classifier.class_names, 0, time.perf_counter()
    for one in predict_files(classifier, files):
        if one.logits is None:
            if len(files) == 1:
                raise DataError(one.problem)
            num_bad += 1
            print(json.dumps({"file": str(one.file), "problem": one.problem})) if as_json else print(
                f"{one.file}: {one.problem}", file=sys.stderr
            )
            continue
        best = one.logits.softmax(0).topk(min(top, len(names)))
        shares = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        if as_json:
            found = [{"class": names[label], "label": label, "probability": share} for label, share in shares]
            print(json.dumps({"file": str(one.file), "classes": found}))
        else:
            print(f"{one.file}: " + ", ".join(f"{names[label]} {share:.1%}" for label, share in shares))
    seconds = time.perf_counter() - began
    print(f"{len(files):,} images, {len(files) / seconds:,.0f} images/s", file=sys.stderr)
    raise typer.Exit(1 if num_bad else 0)
