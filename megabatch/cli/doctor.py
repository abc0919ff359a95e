"""`megabatch doctor`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from megabatch.cli.options import Debug, Json, examples

app = typer.Typer()


@app.command(
    epilog=examples(
        "megabatch doctor",
        "torchrun --nproc-per-node 4 -m megabatch doctor",
        "srun megabatch doctor --self-test",
    )
)
def doctor(
    is_test: Annotated[
        bool, typer.Option("--self-test", help="Check everything that training needs, in about five minutes.")
    ] = False,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Local workers of the self-test; by default one per device.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", help="The page of the self-test.")] = Path("self_test.html"),
    debug: Debug = False,
    as_json: Json = False,
) -> None:
    """What this machine and this allocation can do.

    Under torchrun, srun or mpirun also: which rank is where, latency and bandwidth of each axis, slow links.
    The self-test sums, trains, loses a rank, and compares: on real devices, or on the CPU where there are none.
    """
    if is_test:
        from megabatch.bench.self_test import SelfTestRequest, self_test

        raise typer.Exit(self_test(SelfTestRequest(workers, output, as_json), os.environ))
    from megabatch.bench.doctor import examine_joined_world, examine_machine, print_findings

    findings, is_main = examine_joined_world(os.environ)
    if not is_main:
        return
    findings = examine_machine(os.environ) + findings
    print(json.dumps(findings)) if as_json else print_findings(findings)
