"""Decodes every image of a set, lists the broken ones, counts the classes, and writes down what was there.

`megabatch data verify` writes `megabatch-manifest.<split>.json` into the set's folder: files with checksums, labels,
broken images. At the start of a run the set is compared with it as far as that takes no time: the names and sizes of
the files, the checksum of each file's first and last 64 KiB, the number of images and the checksum of all labels. The
checksums of whole files are compared by `megabatch data verify --checksums`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megabatch.data.batches import Broken
from megabatch.data.formats import files_of
from megabatch.data.randomness import Ints
from megabatch.data.sources import Source, Split
from megabatch.errors import DataError
from megabatch.files import open_regular, parse_json, read_text, write_json

FORMAT = 1
EDGE_BYTES = 64 * 1024
_CHUNK_IMAGES = 64
_CHECKSUM_THREADS = 4


@dataclass(frozen=True)
class Findings:
    """What a look at every image brought. Sizes are height x width."""

    num_images: int
    class_counts: Ints
    smallest: tuple[int, int]
    largest: tuple[int, int]
    broken: tuple[Broken, ...]

    def as_table(self) -> dict[str, Any]:
        return {
            "images": self.num_images,
            "classes": len(self.class_counts),
            "smallest_class": int(self.class_counts.min()),
            "largest_class": int(self.class_counts.max()),
            "empty_classes": np.flatnonzero(self.class_counts == 0).tolist(),
            "smallest_image": self.smallest,
            "largest_image": self.largest,
            "broken": [asdict(one) for one in self.broken],
        }


def verify(source: Source, jobs: int, progress: Callable[[int], None] = lambda count: None) -> Findings:
    """Decode all images by `jobs` threads; `progress` hears how many were done."""

    def look(start: int) -> tuple[list[tuple[int, int]], list[Broken]]:
        sizes, broken = [], []
        for index in range(start, min(start + _CHUNK_IMAGES, len(source))):
            try:
                height, width, _ = source.read(index).shape
                sizes.append((height, width))
            except DataError as error:
                broken.append(Broken(index, source.name_of(index), str(error)))
        return sizes, broken

    smallest, largest, all_broken = (2**31, 2**31), (0, 0), list[Broken]()
    with ThreadPoolExecutor(jobs) as pool:
        for sizes, broken in pool.map(look, range(0, len(source), _CHUNK_IMAGES)):
            all_broken += broken
            for size in sizes:
                smallest = min(smallest, size, key=lambda s: s[0] * s[1])
                largest = max(largest, size, key=lambda s: s[0] * s[1])
            progress(len(sizes) + len(broken))
    counts = np.bincount(source.labels, minlength=source.num_classes)
    if not largest[0]:
        smallest = largest
    return Findings(len(source), counts, smallest, largest, tuple(all_broken))


def manifest_path(path: Path, split: Split) -> Path:
    return (path if path.is_dir() else path.parent) / f"megabatch-manifest.{split}.json"


def write_manifest(kind: str, path: Path, split: Split, source: Source, findings: Findings) -> Path:
    """Write down what was found; returns where."""
    with ThreadPoolExecutor(_CHECKSUM_THREADS) as pool:
        files = list(pool.map(_describe, files_of(kind, path, split)))
    table = {
        "format": FORMAT,
        "kind": kind,
        "num_images": len(source),
        "num_classes": source.num_classes,
        "labels_sha256": labels_sha256(source),
        "class_counts": findings.class_counts.tolist(),
        "files": files,
        "broken": [asdict(one) for one in findings.broken],
    }
    place = manifest_path(path, split)
    write_json(place, table)
    return place


def check_manifest(kind: str, path: Path, split: Split, source: Source) -> str:
    """Compare a set with its manifest, if it has one; returns a line for the log, or an empty one. Raises DataError."""
    place = manifest_path(path, split)
    if not place.is_file():
        return ""
    table = _read(place)
    if table["kind"] != kind:
        return ""
    _same(place, "number of images", len(source), table["num_images"])
    _same(place, "checksum of the labels", labels_sha256(source), table["labels_sha256"])
    files = files_of(kind, path, split)
    _same(place, "list of files", [file.name for file in files], [entry["name"] for entry in table["files"]])
    for file, entry in zip(files, table["files"], strict=True):
        _same(place, f"size of {file.name}", file.stat().st_size, entry["num_bytes"])
        _same(place, f"checksum of the ends of {file.name}", _edges_sum(file), entry["edges_sha256"])
    broken = f", {len(table['broken'])} of them broken" if table["broken"] else ""
    return f"{source.name}: {len(source):,} images as verified{broken}"


def compare_checksums(kind: str, path: Path, split: Split) -> int:
    """Compare the content of every file with the manifest; returns how many files there are."""
    place = manifest_path(path, split)
    if not place.is_file():
        raise DataError(f"{place} does not exist; write it with `megabatch data verify` first")
    table, files = _read(place), files_of(kind, path, split)
    _same(place, "list of files", [file.name for file in files], [entry["name"] for entry in table["files"]])
    with ThreadPoolExecutor(_CHECKSUM_THREADS) as pool:
        for file, entry, found in zip(files, table["files"], pool.map(_whole_sum, files), strict=True):
            _same(place, f"checksum of {file.name}", found, entry["sha256"])
    return len(files)


def labels_sha256(source: Source) -> str:
    return hashlib.sha256(source.labels.astype("<i8").tobytes()).hexdigest()


def _read(place: Path) -> dict[str, Any]:
    try:
        table = parse_json(read_text(place))
        if table["format"] != FORMAT or not isinstance(table["files"], list) or not isinstance(table["broken"], list):
            raise ValueError(f"format {table['format']}")
        _ = [table[key] for key in ("kind", "num_images", "labels_sha256")]
        _ = [entry[key] for entry in table["files"] for key in ("name", "num_bytes", "sha256", "edges_sha256")]
        return dict(table)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"cannot read the manifest {place}: {error}; write it again with `megabatch data verify`"
        ) from error


def _same(place: Path, what: str, found: Any, stated: Any) -> None:
    if found != stated:
        short = "" if isinstance(found, list) else f" ({found}, the manifest says {stated})"
        raise DataError(
            f"the {what} differs from {place}{short}; restore the set, or write the manifest again with "
            "`megabatch data verify`"
        )


def _describe(file: Path) -> dict[str, Any]:
    return {
        "name": file.name,
        "num_bytes": file.stat().st_size,
        "sha256": _whole_sum(file),
        "edges_sha256": _edges_sum(file),
    }


def _whole_sum(file: Path) -> str:
    with open_regular(file) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _edges_sum(file: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(file) as opened:
        digest.update(opened.read(EDGE_BYTES))
        opened.seek(max(0, file.stat().st_size - EDGE_BYTES))
        digest.update(opened.read(EDGE_BYTES))
    return digest.hexdigest()
