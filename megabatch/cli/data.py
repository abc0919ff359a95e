"""`megabatch data ...`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megabatch.cli.options import Debug, Json

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Get, pack and verify images to train on.")

Source = Annotated[
    str | None, typer.Option("--source", help="Kind of the set (folder, tar, parquet, ...); seen by its files.")
]
Jobs = Annotated[int, typer.Option(min=0, help="Threads; 0: one for each core.")]
Splits = Annotated[str, typer.Option(help="train or val; all by default.")]


@app.callback()
def _data() -> None:
    """Get, pack and verify images to train on."""


@app.command("get", epilog="Example: `megabatch data get fashion-mnist`")
def data_get(
    name: Annotated[str, typer.Argument(help="fashion-mnist")],
    debug: Debug = False,
) -> None:
    """Fetch a known small set, check it, and say where it is."""
    from megabatch.data.downloads import get_fashion_mnist
    from megabatch.data.storage import default_cache
    from megabatch.errors import DataError, nearest

    if name != "fashion-mnist":
        raise DataError(f"unknown set '{name}'{nearest(name, ['fashion-mnist'])}; known: fashion-mnist")
    print(f"{name}: {get_fashion_mnist(default_cache(), progress=print)}")


@app.command(
    "pack",
    epilog="Examples: `megabatch data pack imagenet shards` - "
    "`megabatch data pack imagenet small --resize 256 --quality 90` - "
    "`megabatch data pack imagenet pixels --to raw --resize 256`",
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
    from megabatch.data.show import pack_and_show

    pack_and_show(path, output, to, resize, quality, images_per_shard, max_broken_share, jobs, split, source, as_json)


@app.command(
    "verify",
    epilog="Examples: `megabatch data verify shards` - `megabatch data verify shards --checksums`",
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
    from megabatch.data.show import compare_and_show, verify_and_show

    if checksums:
        compare_and_show(path, split, source)
        return
    raise typer.Exit(verify_and_show(path, split, source, jobs, manifest, as_json))
