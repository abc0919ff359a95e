"""`megabatch data ...`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from megabatch.cli.options import Debug, Json, examples

SHOWN_BROKEN = 20
MOST_JOBS = 32

app = typer.Typer(no_args_is_help=True, help="Get, pack and verify images to train on.")

Source = Annotated[
    str | None, typer.Option("--source", help="Kind of the set (folder, tar, parquet, ...); seen by its files.")
]
Jobs = Annotated[int, typer.Option(min=0, help="Threads; 0: one for each core.")]
Splits = Annotated[str, typer.Option(help="train or val; all by default.")]


@app.command(
    "get",
    epilog=examples(
        "megabatch data get fashion-mnist",
    ),
)
def data_get(
    name: Annotated[str, typer.Argument(help="fashion-mnist")],
    debug: Debug = False,
) -> None:
    """Fetch a known small set, check it, and say where it is."""
    from megabatch.data.idx import get_fashion_mnist
    from megabatch.errors import DataError, nearest
    from megabatch.files import default_cache

    if name != "fashion-mnist":
        raise DataError(f"unknown set '{name}'{nearest(name, ['fashion-mnist'])}; known: fashion-mnist")
    print(f"{name}: {get_fashion_mnist(default_cache(), progress=print)}")


@app.command(
    "pack",
    epilog=examples(
        "megabatch data pack imagenet shards",
        "megabatch data pack imagenet small --resize 256 --quality 90",
        "megabatch data pack imagenet pixels --to raw --resize 256",
    ),
)
def data_pack(
    path: Annotated[Path, typer.Argument(help="The set to pack: a folder of class folders, shards, ...")],
    output: Annotated[Path, typer.Argument(help="The folder to write to; a pack that was interrupted there goes on.")],
    to: Annotated[str, typer.Option(help="tar, parquet or raw (decoded pixels, memory-mapped).")] = "tar",
    resize: Annotated[int, typer.Option(min=0, help="Make the shorter side this many pixels; 0: leave it.")] = 0,
    quality: Annotated[int, typer.Option(min=0, max=100, help="Of images encoded anew; 0: JPEG 90.")] = 0,
    images_per_shard: Annotated[int, typer.Option(min=1, help="Samples in a file.")] = 1000,
    max_broken_share: Annotated[float, typer.Option(min=0, max=1, help="More broken images stop it.")] = 0.001,
    jobs: Jobs = 0,
    split: Splits = "",
    source: Source = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a set as tar shards, parquet or raw pixels: in parallel, resumable, always the same bytes."""
    from megabatch.data.formats import open_splits
    from megabatch.data.pack import Format, Packing, pack
    from megabatch.errors import ConfigError

    if to not in get_args(Format):
        raise ConfigError(f"--to is '{to}'; it must be one of {', '.join(get_args(Format))}")
    packing = Packing(cast(Format, to), resize, quality, images_per_shard)
    counts: dict[str, Any] = {}
    for name, images in open_splits(path, source, split):
        with _bar(f"packing {name}", len(images), as_json) as progress:
            counts[name] = pack(images, output, name, packing, jobs or _default_jobs(), progress, max_broken_share)
    if as_json:
        print(json.dumps(counts))
        return
    for packed, found in counts.items():
        kept = f", {found['kept_shards']} of them from before" if found["kept_shards"] else ""
        broken = f", {found['broken']} broken left out" if found["broken"] else ""
        print(
            f"{packed}: {found['images']:,} images, {found['bytes'] / 1e6:,.1f} MB in {found['shards']} files"
            f"{kept}{broken}"
        )


@app.command(
    "verify",
    epilog=examples(
        "megabatch data verify shards",
        "megabatch data verify shards --checksums",
    ),
)
def data_verify(
    path: Annotated[Path, typer.Argument(help="The set to look through.")],
    checksums: Annotated[bool, typer.Option("--checksums", help="Compare files with the manifest instead.")] = False,
    manifest: Annotated[bool, typer.Option(help="Write the manifest that training compares the set with.")] = True,
    jobs: Jobs = 0,
    split: Splits = "",
    source: Source = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Decode every image, list the broken ones, count the classes, write a manifest. Exit 1 when some are broken."""
    from megabatch.data.formats import detect_kind, open_splits
    from megabatch.data.verify import compare_checksums, verify, write_manifest

    kind = source or detect_kind(path)
    splits = open_splits(path, kind, split)
    if checksums:
        for name, _ in splits:
            print(f"{name}: {compare_checksums(kind, path, name)} files are as the manifest says")
        return
    tables: dict[str, Any] = {}
    for name, images in splits:
        with _bar(f"verifying {name}", len(images), as_json) as progress:
            findings = verify(images, jobs or _default_jobs(), progress)
        place = write_manifest(kind, path, name, images, findings) if manifest else None
        tables[name] = findings.as_table() | {"manifest": str(place) if place else None}
    print(json.dumps(tables)) if as_json else _print_findings(tables)
    raise typer.Exit(1 if any(table["broken"] for table in tables.values()) else 0)


def _print_findings(tables: dict[str, Any]) -> None:
    for name, table in tables.items():
        smallest, largest = (f"{width}x{height}" for height, width in (table["smallest_image"], table["largest_image"]))
        print(
            f"{name}: {table['images']:,} images from {smallest} to {largest}, {table['classes']} classes of "
            f"{table['smallest_class']} to {table['largest_class']}, {len(table['broken'])} broken"
        )
        if table["empty_classes"]:
            print(f"  classes without an image: {', '.join(map(str, table['empty_classes'][:SHOWN_BROKEN]))}")
        for one in table["broken"][:SHOWN_BROKEN]:
            print(f"  {one['index']}: {one['reason']}")
        if len(table["broken"]) > SHOWN_BROKEN:
            print(f"  and {len(table['broken']) - SHOWN_BROKEN} more; see --json")
        if table["manifest"]:
            print(f"  manifest: {table['manifest']}")


@contextmanager
def _bar(what: str, total: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal, nothing elsewhere; the handle takes how many more are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


def _default_jobs() -> int:
    from megabatch.machine import usable_cores

    return min(MOST_JOBS, usable_cores())
