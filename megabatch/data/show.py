"""What `megabatch data pack`, `verify` and `bench data` do between the command line and the library: bars and
tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast, get_args

from megabatch.errors import ConfigError

__all__ = ["bench_and_show", "compare_and_show", "pack_and_show", "verify_and_show"]

SHOWN_BROKEN = 20


@contextmanager
def bar(what: str, total: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal, nothing elsewhere; the handle takes how many more are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


def pack_and_show(
    path: Path,
    output: Path,
    to: str,
    resize: int,
    quality: int,
    images_per_shard: int,
    max_broken_share: float,
    jobs: int,
    split: str,
    kind: str | None,
    as_json: bool,
) -> None:
    from megabatch.data.formats import open_splits
    from megabatch.data.pack import Format, Packing, default_jobs, pack

    if to not in get_args(Format):
        raise ConfigError(f"--to is '{to}'; it must be one of {', '.join(get_args(Format))}")
    packing = Packing(cast(Format, to), resize, quality, images_per_shard)
    counts: dict[str, Any] = {}
    for name, source in open_splits(path, kind, split):
        with bar(f"packing {name}", len(source), as_json) as progress:
            counts[name] = pack(source, output, name, packing, jobs or default_jobs(), progress, max_broken_share)
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


def verify_and_show(path: Path, split: str, kind: str | None, jobs: int, manifest: bool, as_json: bool) -> int:
    from megabatch.data.formats import detect_kind, open_splits
    from megabatch.data.pack import default_jobs
    from megabatch.data.verify import verify, write_manifest

    kind = kind or detect_kind(path)
    tables: dict[str, Any] = {}
    for name, source in open_splits(path, kind, split):
        with bar(f"verifying {name}", len(source), as_json) as progress:
            findings = verify(source, jobs or default_jobs(), progress)
        place = write_manifest(kind, path, name, source, findings) if manifest else None
        counts = findings.class_counts
        tables[name] = {
            "images": findings.num_images,
            "classes": source.num_classes,
            "smallest_class": int(counts.min()),
            "largest_class": int(counts.max()),
            "empty_classes": findings.empty_classes,
            "smallest_image": findings.smallest,
            "largest_image": findings.largest,
            "broken": [{"index": one.index, "name": one.name, "reason": one.reason} for one in findings.broken],
            "manifest": str(place) if place else None,
        }
    print(json.dumps(tables)) if as_json else _print_findings(tables)
    return 1 if any(table["broken"] for table in tables.values()) else 0


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


def compare_and_show(path: Path, split: str, kind: str | None) -> None:
    from megabatch.data.formats import detect_kind, open_splits
    from megabatch.data.verify import compare_checksums

    kind = kind or detect_kind(path)
    for name, _ in open_splits(path, kind, split):
        print(f"{name}: {compare_checksums(kind, path, name)} files are as the manifest says")


def bench_and_show(
    path: Path | None,
    kind: str | None,
    crop: str,
    alter: bool,
    image_size: int,
    decoder: str,
    reduce_jpeg: bool,
    num_images: int,
    rounds: int,
    need: float,
    as_json: bool,
) -> None:
    from megabatch.data.augment import Augmentation
    from megabatch.data.bench import measure_speed
    from megabatch.data.decode import Decoding, check_decoder
    from megabatch.data.formats import open_source, open_splits

    check_decoder(decoder)
    changes: dict[str, Any] = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4} if alter else {}
    crop_: Any = crop
    augmentation = Augmentation(crop=crop_, padding=4 if crop == "pad" else 0, flip=True, **changes)
    if path is None:
        source = open_source("generated", None, "train", num_images=max(num_images, 1000), image_size=image_size)
    else:
        source = open_splits(path, kind, "")[0][1]
    decoder_: Any = decoder
    speed = measure_speed(source, augmentation, image_size, Decoding(decoder_, reduce_jpeg), num_images, rounds)
    table = {"source": source.name, "image_size": image_size, **speed.as_table()}
    table |= {"needed_images_per_second": need, "cores": speed.cores_for(need)}
    if as_json:
        print(json.dumps(table))
        return
    print(f"{source.name}, {crop} crops of {image_size} px, decoder: {speed.decoder}")
    print(
        f"{speed.images_per_core_second:,.0f} images per core and second "
        f"({table['slowest_round']:,.0f} to {table['fastest_round']:,.0f} over {rounds} rounds of "
        f"{speed.images_per_round})"
    )
    for stage, microseconds in speed.microseconds.items():
        print(f"  {stage:8} {microseconds:8.0f} us an image")
    print(f"{need:,.0f} images a second need {speed.cores_for(need):.1f} cores, if cores scale")
