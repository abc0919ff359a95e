"""`megabatch plan`."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated

import typer

from megabatch.cli.options import Debug, Json
from megabatch.errors import ConfigError

__all__ = ["app"]

app = typer.Typer()


@app.command(
    epilog="Examples: `megabatch plan mikami2018 --cluster abci --workers 1024` - "
    "`megabatch plan mikami2018 --cluster dgx-a100 --workers 64..4096 --target 75.9 --deadline 10min` - "
    "`megabatch plan mikami2018 --cluster dgx-a100 --calibrate rows.csv --family nvidia:dgxa100 "
    '--stack "2.0 mxnet closed"` - '
    "`megabatch plan demo --cluster this-machine --calibrate step.json --calibrate links.json --workers 4` - "
    "`megabatch plan --validate rows.csv` - `megabatch plan --compare runs/mine`"
)
def plan(
    ctx: typer.Context,
    recipe: Annotated[str | None, typer.Argument(help="A name from `megabatch recipes`, or a TOML file.")] = None,
    cluster: Annotated[
        str,
        typer.Option(help="A shipped cluster or a TOML file; alone it is shown with its sources, `list` names all."),
    ] = "",
    workers: Annotated[
        str | None, typer.Option(help="1024, 256,1024 or 64..4096; by default doubling up to the whole cluster.")
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="Top-1 in per cent: epochs by global batch instead of the recipe's own.")
    ] = None,
    study: Annotated[Path | None, typer.Option(help="CSV of `megabatch study`, for the epochs to the target.")] = None,
    calibrate: Annotated[
        list[str] | None, typer.Option(help="Rows of systems (CSV), a file of `megabatch bench`, or a run folder.")
    ] = None,
    family: Annotated[str, typer.Option(help="Of the calibration rows: organisation:accelerator.")] = "",
    stack: Annotated[str, typer.Option(help="Of the calibration rows: round, framework, division.")] = "",
    batch: Annotated[
        list[str] | None, typer.Option(help='Global batches to try, each 65536 or stages "0:32768 30:65536".')
    ] = None,
    algorithm: Annotated[list[str] | None, typer.Option(help="Only these all-reduce algorithms.")] = None,
    grid: Annotated[str | None, typer.Option(help="Only this grid, rows x columns.")] = None,
    bucket_mb: Annotated[float | None, typer.Option(min=0.1, help="Only this bucket size.")] = None,
    objective: Annotated[str, typer.Option(help="time or cost.")] = "time",
    deadline: Annotated[str | None, typer.Option(help="The cheapest that trains within 90s, 10min or 2h.")] = None,
    budget: Annotated[float | None, typer.Option(help="The fastest for at most this cost (or node hours).")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the recipe.")
    ] = None,
    scale: Annotated[str | None, typer.Option(metavar="NAME", help="As in `megabatch train`.")] = None,
    epochs: Annotated[float | None, typer.Option(metavar="E", help="As in `megabatch train`.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the plan for `megabatch train --plan`.")] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Draw time against cost, and the parts of a step: .svg, .png and .csv.")
    ] = None,
    validate: Annotated[Path | None, typer.Option(help="Predict known rows (CSV) and say how far off.")] = None,
    compare: Annotated[Path | None, typer.Option(help="A run that followed a plan: predicted and measured.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """How long a training takes on a cluster, what it costs, on which grid, and why; with 80 % intervals."""
    if validate is not None or compare is not None:
        _refuse_beside("--validate" if validate else "--compare", ctx)
    if validate is not None:
        from megabatch.plan.show import print_validation
        from megabatch.plan.validate import validate_rows

        result = validate_rows(validate)
        print(json.dumps(result.as_data())) if as_json else print_validation(result)
        return
    if compare is not None:
        from megabatch.plan.show import print_comparison
        from megabatch.report.plan_compare import compare as compare_run
        from megabatch.report.run import read_run

        comparison = compare_run(read_run(compare))
        print(json.dumps(comparison.as_data())) if as_json else print_comparison(comparison)
        return
    from megabatch.plan.cluster import cluster_names, load_cluster

    if cluster == "list":
        for name in cluster_names():
            print(f"{name:<14} {load_cluster(name).title}")
        return
    if _typed(ctx) == ["cluster"]:
        _show_cluster(cluster, as_json)
        return
    from megabatch.plan.plan_file import PlanRequest, run, write_plan

    answer = run(
        PlanRequest(
            recipe=recipe or "",
            cluster=cluster,
            workers=workers,
            target=target,
            study=study,
            calibrate=tuple(calibrate or ()),
            family=family,
            stack=stack,
            batches=tuple(batch or ()),
            algorithms=tuple(algorithm or ()),
            grid=grid,
            bucket_mb=bucket_mb,
            objective=objective,
            deadline=deadline,
            budget=budget,
            overrides=tuple(set_ or ()),
            scale=scale,
            epochs=epochs,
        )
    )
    data = answer.as_data()
    if output is not None:
        write_plan(output, data, answer.request.recipe)
    if figure is not None:
        from megabatch.plan.show import draw_plan

        draw_plan(answer.result, answer.evidence.cluster.name, figure)
    if as_json:
        print(json.dumps(data))
        return
    from megabatch.plan.show import print_plan

    print_plan(answer.result, answer.evidence, answer.workload)
    if output is not None:
        print(f"plan written; follow it with  megabatch train {answer.workload.name} --plan {output}")


def _typed(ctx: typer.Context) -> list[str]:
    """The parameters that stood on the command line, but for those that say how to answer."""
    sources = {name: getattr(ctx.get_parameter_source(name), "name", "") for name in ctx.params}
    return [name for name, source in sources.items() if source == "COMMANDLINE" and name not in ("as_json", "debug")]


def _refuse_beside(alone: str, ctx: typer.Context) -> None:
    """A word that would be ignored is a mistake of its writer's."""
    given = [name for name in _typed(ctx) if f"--{name}" != alone]
    if given:
        words = ", ".join(
            "the recipe" if name == "recipe" else f"--{name.strip('_').replace('_', '-')}" for name in given
        )
        raise ConfigError(f"{alone} looks at a file alone, but {words} was given too; leave that out")


def _show_cluster(name: str, as_json: bool) -> None:
    from megabatch.plan.cluster import cluster_text, read_cluster
    from megabatch.plan.cluster_file import cluster_as_data
    from megabatch.plan.show import print_cluster

    text, source = cluster_text(name)
    cluster, file = read_cluster(text, source), tomllib.loads(text)
    if as_json:
        print(json.dumps({"name": cluster.name, "values": cluster_as_data(file), "unknown": list(cluster.unknown)}))
    else:
        print_cluster(cluster, file)
