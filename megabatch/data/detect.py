"""What kind of set lies at a path, and which splits it has: so that commands need no more than the path."""

from __future__ import annotations

from pathlib import Path

from megabatch.data.sources import KINDS, Source, Split, open_source
from megabatch.errors import ConfigError, DataError, nearest

__all__ = ["detect_kind", "open_splits"]

SPLITS: tuple[Split, ...] = ("train", "val")


def detect_kind(path: Path) -> str:
    """The kind of the set at a path, by the names of its files.

    Raises:
        DataError: nothing there that is known.
    """
    if not path.exists():
        raise DataError(f"the data path {path} does not exist; give the folder that holds the images")
    for suffix in ("tar", "parquet", "raw"):
        if path.suffix == f".{suffix}" or (path.is_dir() and any(path.glob(f"*.{suffix}"))):
            return suffix
    if path.is_dir() and any((path / split).is_dir() for split in SPLITS):
        return "folder"
    if path.is_dir() and any(path.glob("*-idx3-ubyte*")):
        return "idx"
    raise DataError(
        f"{path} holds no *.tar, *.parquet, *.raw or idx files and no train/ or val/ folder; "
        "name the kind with --source"
    )


def open_splits(path: Path, kind: str | None = None, wanted: str = "") -> list[tuple[Split, Source]]:
    """The splits of a set, not decoded ahead: the wanted one, or all there are.

    A set without splits serves the same images as any; it is taken once, as train.

    Raises:
        ConfigError: an unknown kind or split.
        DataError: a set that cannot be opened.
    """
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"unknown data source '{kind}' (known: {', '.join(KINDS)}){nearest(kind, KINDS)}")
    kind = kind or detect_kind(path)
    if wanted and wanted not in SPLITS:
        raise ConfigError(f"split is '{wanted}'; it must be train or val")
    opened: list[tuple[Split, Source]] = []
    problem: DataError | None = None
    for split in SPLITS:
        if wanted in ("", split):
            try:
                opened.append((split, _open(kind, path, split)))
            except DataError as error:
                problem = error
    if problem is not None and (
        wanted or not opened or ("no shard with" not in str(problem) and "has no" not in str(problem))
    ):
        raise problem
    if len(opened) == 2 and _same_images(opened[0][1], opened[1][1]):
        return opened[:1]
    return opened


def _open(kind: str, path: Path, split: Split) -> Source:
    takes_limit = kind in ("folder", "parquet", "tar")
    return open_source(kind, path, split, **({"memory_limit_bytes": 0} if takes_limit else {}))


def _same_images(one: Source, other: Source) -> bool:
    names = [getattr(source, "name_of", None) for source in (one, other)]
    return len(one) == len(other) and names[0] is not None and names[1] is not None and names[0](0) == names[1](0)
