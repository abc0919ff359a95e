"""`megabatch plan`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megabatch.cli.options import Debug, Json, Set, examples, request_of
from megabatch.errors import ConfigError

if TYPE_CHECKING:
    from megabatch.plan.request import PlanRequest

app = typer.Typer()

# The sections of `megabatch plan --help`.
EVIDENCE = partial(typer.Option, rich_help_panel="What the prediction rests on")
SEARCH = partial(typer.Option, rich_help_panel="What is looked for, and among what")
ANSWER = partial(typer.Option, rich_help_panel="What is written besides")
INSTEAD = partial(typer.Option, rich_help_panel="Instead of a plan")


@app.command(
    epilog=examples(
        "megabatch plan mikami2018 --cluster abci --workers 1024",
        "megabatch plan mikami2018 --cluster dgx-a100 --workers 64..4096 --target 75.9 --deadline 10min",
        "megabatch plan mikami2018 --cluster dgx-a100 --calibrate rows.csv "
        '--family nvidia:dgxa100 --stack "2.0 mxnet closed"',
        "megabatch plan demo --cluster this-machine --calibrate step.json --calibrate links.json --workers 4",
        "megabatch plan --validate rows.csv",
        "megabatch plan --compare runs/mine",
    )
)
def plan(
    ctx: typer.Context,
    recipe: Annotated[str, typer.Argument(help="A name from `megabatch recipes`, or a TOML file.")] = "",
    cluster: Annotated[
        str,
        typer.Option(help="A shipped cluster or a TOML file; alone it is shown with its sources, `list` names all."),
    ] = "",
    workers: Annotated[
        str | None, typer.Option(help="1024, 256,1024 or 64..4096; by default doubling up to the whole cluster.")
    ] = None,
    overrides: Set = None,
    scale: Annotated[str | None, typer.Option(metavar="NAME", help="As in `megabatch train`.")] = None,
    epochs: Annotated[float | None, typer.Option(metavar="E", help="As in `megabatch train`.")] = None,
    target: Annotated[
        float | None,
        EVIDENCE("--target", help="Top-1 in per cent: epochs by global batch instead of the recipe's own."),
    ] = None,
    study: Annotated[
        Path | None, EVIDENCE("--study", help="CSV of `megabatch study`, for the epochs to the target.")
    ] = None,
    calibrate: Annotated[
        list[str] | None,
        EVIDENCE("--calibrate", help="Rows of systems (CSV), a file of `megabatch bench`, a folder of a run or study."),
    ] = None,
    family: Annotated[str, EVIDENCE("--family", help="Of the calibration rows: organisation:accelerator.")] = "",
    stack: Annotated[str, EVIDENCE("--stack", help="Of the calibration rows: round, framework, division.")] = "",
    objective: Annotated[str, SEARCH("--objective", help="time or cost.")] = "time",
    deadline: Annotated[
        str | None, SEARCH("--deadline", help="The cheapest that trains within 90s, 10min or 2h.")
    ] = None,
    budget: Annotated[
        float | None, SEARCH("--budget", help="The fastest for at most this cost (or node hours).")
    ] = None,
    batches: Annotated[
        list[str] | None, SEARCH("--batch", help='Global batches to try, each 65536 or stages "0:32768 30:65536".')
    ] = None,
    algorithms: Annotated[list[str] | None, SEARCH("--algorithm", help="Only these all-reduce algorithms.")] = None,
    grid: Annotated[str | None, SEARCH("--grid", help="Only this grid, rows x columns.")] = None,
    bucket_mb: Annotated[float | None, SEARCH("--bucket-mb", min=0.1, help="Only this bucket size.")] = None,
    output: Annotated[Path | None, ANSWER("--output", help="Write the plan for `megabatch train --plan`.")] = None,
    figure: Annotated[
        Path | None, ANSWER("--figure", help="Draw time against cost, and the parts of a step: .svg, .png and .csv.")
    ] = None,
    validate: Annotated[
        Path | None, INSTEAD("--validate", help="Predict known rows (CSV) and say how far off.")
    ] = None,
    compare: Annotated[
        Path | None, INSTEAD("--compare", help="A run that followed a plan: predicted and measured.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """How long a training takes on a cluster, what it costs, on which grid, and why; with 80 % intervals."""
    typed = _typed(ctx)
    if validate is not None:
        _validate(validate, typed, as_json)
    elif compare is not None:
        _compare(compare, typed, as_json)
    elif cluster == "list":
        _list_clusters()
    elif typed == ["--cluster"]:
        _show_cluster(cluster, as_json)
    else:
        from megabatch.plan.request import PlanRequest

        _plan(request_of(PlanRequest, ctx), output, figure, as_json)


def _typed(ctx: typer.Context) -> list[str]:
    """What stood on the command line, but for the options that say how to answer."""
    typed = [
        one for one in ctx.command.params if getattr(ctx.get_parameter_source(one.name), "name", "") == "COMMANDLINE"
    ]
    names = ["the recipe" if one.name == "recipe" else one.opts[0] for one in typed]
    return [name for name in names if name not in ("--json", "--debug")]


def _refuse_beside(alone: str, typed: list[str]) -> None:
    """A word that would be ignored is a mistake of its writer's."""
    if given := [name for name in typed if name != alone]:
        raise ConfigError(f"{alone} looks at a file alone, but {', '.join(given)} was given too; leave that out")


def _validate(rows: Path, typed: list[str], as_json: bool) -> None:
    from megabatch.plan.show import print_validation
    from megabatch.plan.validate import validate_rows

    _refuse_beside("--validate", typed)
    result = validate_rows(rows)
    print(json.dumps(result.as_data())) if as_json else print_validation(result)


def _compare(run: Path, typed: list[str], as_json: bool) -> None:
    from megabatch.plan.show import print_comparison
    from megabatch.report.plan_compare import compare
    from megabatch.report.run import read_run

    _refuse_beside("--compare", typed)
    result = compare(read_run(run))
    print(json.dumps(result.as_data())) if as_json else print_comparison(result)


def _list_clusters() -> None:
    from megabatch.plan.cluster_file import cluster_names, load_cluster

    for name in cluster_names():
        print(f"{name:<14} {load_cluster(name).title}")


def _show_cluster(name: str, as_json: bool) -> None:
    from megabatch.plan.cluster_file import cluster_as_data, cluster_text, read_cluster
    from megabatch.plan.show import print_cluster

    text, source = cluster_text(name)
    cluster, values = read_cluster(text, source), cluster_as_data(text)
    if as_json:
        print(json.dumps({"name": cluster.name, "values": values, "unknown": list(cluster.unknown)}))
    else:
        print_cluster(cluster, values)


def _plan(request: PlanRequest, output: Path | None, figure: Path | None, as_json: bool) -> None:
    from megabatch.plan.plan_file import write_plan
    from megabatch.plan.request import run
    from megabatch.plan.show import draw_plan, print_plan

    answer = run(request)
    data = answer.as_data()
    if output is not None:
        write_plan(output, data, request.recipe)
    if figure is not None:
        draw_plan(answer.result, answer.evidence.cluster.name, figure)
    if as_json:
        print(json.dumps(data))
        return
    print_plan(answer.result, answer.evidence, answer.workload, epochs_from=answer.epochs_from)
    if output is not None:
        print(f"plan written; follow it with  megabatch train {answer.workload.name} --plan {output}")
