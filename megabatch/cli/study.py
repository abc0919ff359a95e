"""`megabatch study`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megabatch.cli.options import Debug, Json, changes, examples

app = typer.Typer()


@app.command(
    epilog=examples(
        "megabatch study demo --vary train.global_batch_size=256,1024,4096 --seeds 3",
        "megabatch study demo --vary model.width=8,16 --vary norm.momentum=0.1,1.0 --jobs 2 --output runs/norms",
        "megabatch study studies/large_batch.toml --jobs 2",
    )
)
def study(
    target: Annotated[str, typer.Argument(help="A recipe to vary, or a study file (TOML with [[arm]] tables).")],
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B,C", help="Values of a setting; every combination becomes an arm."),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of all arms.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, max=10_000, help="Runs of each arm; 3 by default.")] = None,
    baseline: Annotated[str, typer.Option(help="The arm others are compared with; the first one by default.")] = "",
    data: Annotated[
        Path | None, typer.Option(envvar="MEGABATCH_DATA", help="Where the images are, for all arms.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time, one core each; as many as cores are free by default.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the study; under runs/ by default.")] = None,
    collect: Annotated[bool, typer.Option("--collect", help="Run nothing; show what has finished so far.")] = False,
    scale: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Another scale than the study file's: another set of images.")
    ] = "",
    only: Annotated[
        str, typer.Option(metavar="PATTERN", help="Run only the arms whose name fits, such as '*16 %'; show all.")
    ] = "",
    earlier: Annotated[
        Path | None, typer.Option(metavar="RUNS.CSV", help="Results of an earlier session, which are not run again.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare arms over seeds: runs, table, CSV, figures, and what the differences are worth.

    Finished runs are skipped and interrupted ones resumed: the same command goes on where it was stopped.
    """
    from megabatch.study.conduct import StudyRequest, conduct
    from megabatch.tune.arms import tune_arm

    overrides, values = changes(set_, data), tuple(vary or ())
    request = StudyRequest(
        target, values, overrides, seeds, baseline, jobs, output, collect, as_json, scale, only, earlier
    )
    raise typer.Exit(conduct(request, tune_arm))
