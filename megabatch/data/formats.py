"""The formats of sets of images: how each is opened, how one is recognised at a path, which files hold a split."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from megabatch.data.folder import EXTENSIONS, FolderImages, empty_class_folders, is_flat_folder
from megabatch.data.generated import open_generated
from megabatch.data.idx import open_fashion_mnist, open_idx, open_mnist
from megabatch.data.raw import RawImages, raw_files
from megabatch.data.shards import open_remote_tar, open_tar, tar_files
from megabatch.data.sources import MEMORY_LIMIT_BYTES, EncodedImages, MissingSplitError, Source, Split, in_memory
from megabatch.data.storage import is_remote
from megabatch.errors import ConfigError, DataError, nearest, some_names

SPLITS: tuple[Split, ...] = get_args(Split)

KINDS = ("fashion-mnist", "folder", "generated", "idx", "mnist", "parquet", "raw", "tar")
_OPENERS: dict[str, Callable[..., Source]] = {
    "fashion-mnist": open_fashion_mnist,
    "folder": FolderImages,
    "generated": open_generated,
    "idx": open_idx,
    "mnist": open_mnist,
    "raw": RawImages,
    "tar": open_tar,
}


def open_source(
    kind: str,
    path: Path | str | None,
    split: Split,
    *,
    memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
    **options: Any,
) -> Source:
    """Opens one split of a set of images and checks its labels.

    Kinds and their options (all take `num_classes`): `fashion-mnist` (path, or None for where it is on this machine),
    `mnist` and `idx` (folder of idx files), `parquet` (`channels`, `image_column`, `label_column`), `folder` and `tar`
    (`channels`), `raw`, `generated` (no path; `num_images`, `image_size`, `channels`, `seed`).
    A set of one image size that needs no more than `memory_limit_bytes` is decoded at once; 0: none is.
    """
    _check_split(split)
    opener = _opener(kind)
    if isinstance(path, str) and is_remote(path):
        if kind != "tar":
            raise ConfigError(
                f"{path} is a remote address, which only tar shards can be read from; mount it for '{kind}'"
            )
        opener = open_remote_tar
    elif isinstance(path, str):
        path = Path(path)
    known = _options(opener)
    if "memory_limit_bytes" in known:
        options["memory_limit_bytes"] = memory_limit_bytes
    for option in options:
        if option not in known:
            raise ConfigError(
                f"data source '{kind}' has no option '{option}' (known: {', '.join(known)})" + nearest(option, known)
            )
    if options.get("channels", 3) not in (1, 3):
        raise ConfigError(f"channels is {options['channels']}; images have 1 (grey) or 3 (colour)")
    if kind == "generated":
        if path is not None:
            raise ConfigError(f"data source 'generated' takes no path, given {path}; leave the path out")
    elif path is None and kind != "fashion-mnist":
        raise DataError(
            f"data source '{kind}' needs a path and none was given; add --data FOLDER (in a recipe: data.path)"
        )
    source = opener(path, split, **options)
    return in_memory(source, memory_limit_bytes) if isinstance(source, EncodedImages) else source


def detect_kind(path: Path) -> str:
    """The kind of the set at a path, by the names of its files; DataError when nothing known is there."""
    if not path.exists():
        raise DataError(f"the data path {path} does not exist; give the folder that holds the images")
    for suffix in ("tar", "parquet", "raw"):
        if path.suffix == f".{suffix}" or (path.is_dir() and any(path.glob(f"*.{suffix}"))):
            return suffix
    if path.is_dir() and (any((path / split).is_dir() for split in SPLITS) or is_flat_folder(path)):
        return "folder"
    if path.is_dir() and any(path.glob("*-idx3-ubyte*")):
        return "idx"
    if path.is_dir() and (empty := empty_class_folders(path)):
        raise DataError(
            f"{path} has {len(empty)} folders and no image ({', '.join(EXTENSIONS)}) in any of them: "
            f"{some_names(empty)}; put the images of each class into its folder"
        )
    raise DataError(
        f"{path} holds no *.tar, *.parquet, *.raw or idx files, no train/ or val/ folder and no folders of images; "
        "arrange them in class folders, or name the kind: --source, of `train` --set data.source=KIND"
    )


def open_splits(path: Path, kind: str | None = None, wanted: str = "") -> list[tuple[Split, Source]]:
    """The splits of a set, not decoded ahead: the wanted one, or all there are.

    A set without splits serves the same images as any; it is taken once, as train.
    """
    if wanted:
        _check_split(wanted)
    kind = kind or detect_kind(path)
    opened: list[tuple[Split, Source]] = []
    missing: MissingSplitError | None = None
    for split in SPLITS:
        if wanted in ("", split):
            try:
                # Decoding ahead would be in vain for who looks at every image once.
                opened.append((split, open_source(kind, path, split, memory_limit_bytes=0)))
            except MissingSplitError as error:
                missing = error
    if missing is not None and not opened:
        raise missing
    images = [source for _, source in opened]
    if len(images) == 2 and len(images[0]) == len(images[1]) and images[0].name_of(0) == images[1].name_of(0):
        return opened[:1]
    return opened


def files_of(kind: str, path: Path, split: Split) -> list[Path]:
    """The files that hold a split; none for kinds that are not made of shards."""
    if kind == "parquet":
        from megabatch.data.parquet import choose_files

        return choose_files(path, split)[0]
    files = {"raw": raw_files, "tar": tar_files}.get(kind)
    return files(path, split) if files else []


def _opener(kind: str) -> Callable[..., Source]:
    if kind == "parquet":  # imported when asked for, because pyarrow is slow to load
        from megabatch.data.parquet import open_parquet

        return open_parquet
    if kind not in _OPENERS:
        raise ConfigError(f"unknown data source '{kind}' (known: {', '.join(KINDS)}){nearest(kind, KINDS)}")
    return _OPENERS[kind]


def _options(opener: Callable[..., Source]) -> list[str]:
    return [name for name, p in inspect.signature(opener).parameters.items() if p.kind is p.KEYWORD_ONLY]


def _check_split(split: str) -> None:
    if split not in SPLITS:
        raise ConfigError(f"split is '{split}'; it must be train or val")
