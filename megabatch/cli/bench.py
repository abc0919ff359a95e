"""`megabatch bench ...`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from megabatch.cli.options import Debug, Json, Recipe, Set, examples

if TYPE_CHECKING:
    from megabatch.bench.step import StepBenchRequest

app = typer.Typer(no_args_is_help=True, help="Measure the machines at hand.")


@app.command(
    "allreduce",
    epilog=examples(
        "megabatch bench allreduce --workers 4 --grid 2x2",
        "torchrun --nnodes 4 --nproc-per-node 4 ... -m megabatch bench allreduce --output calibration.json",
    ),
)
def bench_allreduce(
    sizes: Annotated[str, typer.Option(help="Message sizes, separated by commas.")] = "1KB,100KB,1MB,10MB",
    algorithms: Annotated[str, typer.Option(help="Names separated by commas; all by default.")] = "",
    iterations: Annotated[int, typer.Option(min=1, help="Rounds that count, per size.")] = 20,
    workers: Annotated[int | None, typer.Option(min=2, help="Local workers to start.")] = None,
    grid: Annotated[str | None, typer.Option(help="Rows x columns, for example 2x2.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write a calibration file.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Time all-reduce algorithms by message size, p50 and p95 over all ranks, against the backend's own."""
    from megabatch.bench.allreduce import BenchRequest
    from megabatch.bench.allreduce import bench_allreduce as run

    raise typer.Exit(run(BenchRequest(sizes, algorithms, iterations, workers, grid, output, as_json), os.environ))


@app.command(
    "step",
    epilog=examples(
        "megabatch bench step demo --output step.json",
        "megabatch bench step demo --workers 4 --batches 32,64,128 --output step.json",
    ),
)
def bench_step(
    recipe: Recipe,
    batches: Annotated[str, typer.Option(help="Local batches, such as 16,32; around the ghost batch by default.")] = "",
    iterations: Annotated[int, typer.Option(min=3, help="Steps that count, per batch.")] = 10,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Local workers that compute at the same time, as in a run.")
    ] = None,
    set_: Set = None,
    output: Annotated[Path | None, typer.Option(help="Write a file for `megabatch plan --calibrate`.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Time training steps by local batch, without data and communication: what `megabatch plan` starts from."""
    from megabatch.bench.step import StepBenchRequest, bench_steps, parse_batches
    from megabatch.recipes import load_config

    config = load_config(recipe, set_ or [])
    parsed = parse_batches(batches, config.train.ghost_batch_size)
    request = StepBenchRequest(config, parsed, iterations, workers, output and output.absolute(), as_json)
    raise typer.Exit(bench_steps(request, _tell_steps, os.environ))


def _tell_steps(request: StepBenchRequest, result: dict[str, Any]) -> None:
    from megabatch.files import write_atomically
    from megabatch.plan.compute import step_times_from_data, step_times_text

    times = step_times_from_data(result, "the measurement")
    if request.output is not None:
        write_atomically(request.output, step_times_text(times))
    if request.as_json:
        print(json.dumps(result))
        return
    print(f"{times.model} on {times.device}, {times.threads} threads, {result.get('workers', 1)} workers at a time")
    for row in times.rows:
        print(
            f"  {row.local_batch:>6} images {1e3 * row.seconds:>10.2f} ms +- {row.deviation:.1%}"
            f" {row.local_batch / row.seconds:>10,.0f} images/s  n = {row.iterations}"
        )
    print(f"  backward pass {times.backward_share:.0%} of a step")


@app.command(
    "optimizer",
    epilog=examples(
        "megabatch bench optimizer",
        "megabatch bench optimizer --model resnet20 --threads 2",
    ),
)
def bench_optimizer(
    model: Annotated[str, typer.Option(help="A network whose parameters are stepped.")] = "resnet50",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count; each times every optimizer once.")] = 15,
    threads: Annotated[int, typer.Option(min=1, help="Threads of a CPU.")] = 1,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Time one step of LARS and RMSprop warm-up over a network's parameters, against torch's SGD and a plain loop."""
    from megabatch.bench.optimizer import bench_steps, result_lines

    result = bench_steps(model, rounds, threads)
    print(json.dumps(result) if as_json else "\n".join(result_lines(result)))


@app.command(
    "data",
    epilog=examples(
        "megabatch bench data shards",
        "megabatch bench data shards --need 20000 --decoder opencv",
        "megabatch bench data --image-size 32 --crop pad  # generated images",
    ),
)
def bench_data(
    path: Annotated[Path | None, typer.Argument(help="The set to read; generated images when left out.")] = None,
    source: Annotated[str | None, typer.Option(help="Kind of the set; seen by its files.")] = None,
    crop: Annotated[str, typer.Option(help="resized, pad or none.")] = "resized",
    alter: Annotated[bool, typer.Option("--alter", help="Also change brightness, contrast and saturation.")] = False,
    image_size: Annotated[int, typer.Option(min=8, help="Pixels on a side.")] = 224,
    decoder: Annotated[str, typer.Option(help="auto, pillow or opencv.")] = "auto",
    reduce_jpeg: Annotated[bool, typer.Option("--reduce-jpeg", help="Decode at 1/2, 1/4, 1/8 where possible.")] = False,
    images: Annotated[int, typer.Option(min=1, help="Images a round.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 5,
    need: Annotated[float, typer.Option(min=1, help="Images a second to be fed.")] = 2500,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Images per core and second: time of read, decode, augment, collate; cores that a rate needs."""
    from megabatch.bench.data import bench_images, result_lines
    from megabatch.data.augment import Augmentation, Crop
    from megabatch.data.decode import DecoderName, Decoding, check_decoder
    from megabatch.errors import ConfigError

    check_decoder(decoder)
    if crop not in get_args(Crop):
        raise ConfigError(f"--crop is '{crop}'; it must be one of {', '.join(get_args(Crop))}")
    decoding = Decoding(cast(DecoderName, decoder), reduce_jpeg)
    strength = 0.4 if alter else 0.0
    augmentation = Augmentation(
        crop=cast(Crop, crop),
        padding=4 if crop == "pad" else 0,
        flip=True,
        brightness=strength,
        contrast=strength,
        saturation=strength,
    )
    result = bench_images(path, source, augmentation, image_size, decoding, images, rounds, need)
    print(json.dumps(result) if as_json else "\n".join(result_lines(result)))
