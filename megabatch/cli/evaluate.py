"""`megabatch evaluate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from megabatch.cli.options import DataOfRun, Debug, Json, examples

app = typer.Typer()


@app.command(
    epilog=examples(
        "megabatch evaluate runs/demo-20260101-120000",
        "megabatch evaluate runs/mine --ensemble --json",
    )
)
def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    data: DataOfRun = None,
    ensemble: Annotated[
        bool, typer.Option("--ensemble", help="The members of a collapsed ensemble, alone and together.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Exact top-1 and top-5 of a run's model, every validation image counted once.

    Of a finished run also accuracy by class, confusions and the worst mistakes: as CSV and in the report.
    """
    from megabatch.report.run import CLASSES_FILE
    from megabatch.train.metrics import write_page
    from megabatch.use.evaluate import evaluate_ensemble, evaluate_run

    result = evaluate_ensemble(run, data) if ensemble else evaluate_run(run, data)
    if result is None:
        return
    if as_json:
        print(json.dumps(result))
    elif ensemble:
        names = [*(one["file"] for one in result["members"]), "ensemble (mean probability)", "mean of the weights"]
        for name, one in zip(names, [*result["members"], result["ensemble"], result["weight_average"]], strict=True):
            print(f"{name:<30}  top-1 {one['top1']:.2%}  top-5 {one['top5']:.2%}  loss {one['loss']:.4f}")
        print(f"({result['num_images']:,} images)")
    else:
        print(
            f"top-1 {result['top1']:.2%}  top-5 {result['top5']:.2%}  loss {result['loss']:.4f}  "
            f"({result['num_images']:,} images, {result['weights']})"
        )
    if (run / CLASSES_FILE).is_file():
        write_page(run, lambda line: print(line, file=sys.stderr))
        if not as_json:
            print(f"by class: {run / 'classes.csv'}, confusion.csv, mistakes.csv, and in report.html")
