"""`megabatch verify`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from megabatch.cli.options import DataOfRun, Debug, Set, changes, examples

app = typer.Typer()


@app.command(
    epilog=examples(
        "megabatch verify runs/mine",
        "megabatch verify runs/mine --steps 40:60 --workers 2",
        "megabatch verify runs/mine --steps 0:100",
        "torchrun --nproc-per-node 4 -m megabatch verify runs/mine",
    )
)
def verify(
    run: Annotated[Path, typer.Argument(help="The folder of a run; it is only read.")],
    steps: Annotated[
        str,
        typer.Option(
            metavar="A:B",
            help="From the checkpoint at or before step A (0: the start of the run) to step B; "
            "by default from the oldest checkpoint to the last digest.",
        ),
    ] = "",
    workers: Annotated[int | None, typer.Option(min=1, help="Local workers to start, as for `train`.")] = None,
    data: DataOfRun = None,
    set_: Set = None,
    debug: Debug = False,
) -> None:
    """Compute a stretch of a run again and say whether the bits are those recorded; exit code 1 if not.

    Compared are the digests of the weights in metrics.jsonl, and the losses of the steps. Any number of workers and
    any all-reduce algorithm give the same bits; other processors, threads or versions may not, and are said.
    """
    from megabatch.use.verify import verify_run

    found = verify_run(run, steps, workers, changes(set_, data), os.environ, debug)
    if found is None:
        return
    for line in (*found.notes, found.line):
        print(line)
    raise typer.Exit(1 if found.difference else 0)
