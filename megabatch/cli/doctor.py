"""`megabatch doctor`."""

from __future__ import annotations

import json
import os

import typer

from megabatch.cli.options import Debug, Json, examples

app = typer.Typer()


@app.command(
    epilog=examples(
        "megabatch doctor",
        "torchrun --nproc-per-node 4 -m megabatch doctor",
    )
)
def doctor(debug: Debug = False, as_json: Json = False) -> None:
    """What this machine and this allocation can do.

    Under torchrun, srun or mpirun also: which rank is where, latency and bandwidth of each axis, slow links.
    """
    from megabatch.bench.doctor import examine_joined_world, examine_machine, print_findings

    findings, is_main = examine_joined_world(os.environ)
    if not is_main:
        return
    findings = examine_machine(os.environ) + findings
    print(json.dumps(findings)) if as_json else print_findings(findings)
