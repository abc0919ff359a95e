"""Small sets of known images in every layout, and the way to the real ones."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from PIL import Image

from megabatch.data.formats import open_source
from megabatch.data.native import native
from megabatch.data.raw import write_raw_table
from megabatch.data.sources import Source

SPLITS = ("train", "val")


@dataclass
class ImageSet:
    """What `open_source` is given, and what must come out; `images` is None where only the rules are known."""

    kind: str
    path: Path | None
    channels: int
    num_classes: int
    labels: dict[str, list[int]]
    images: dict[str, list[NDArray[np.uint8]]] | None
    options: dict[str, Any] = field(default_factory=dict)


def idx_bytes(values: NDArray[np.uint8]) -> bytes:
    dims = b"".join(dim.to_bytes(4, "big") for dim in values.shape)
    return bytes([0, 0, 8, values.ndim]) + dims + values.tobytes()


def png_bytes(image: NDArray[np.uint8]) -> bytes:
    out = io.BytesIO()
    Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).save(out, "PNG")
    return out.getvalue()


def write_parquet(path: Path, encoded: list[bytes | None], labels: Any, rows_per_group: int = 3) -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    image = pa.array([{"bytes": item, "path": None} for item in encoded], type=kind)
    pq.write_table(pa.table({"image": image, "label": labels}), path, row_group_size=rows_per_group)


def random_images(seed: int, sizes: list[tuple[int, int]], channels: int) -> list[NDArray[np.uint8]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (*size, channels), dtype=np.uint8) for size in sizes]


def make_idx(folder: Path, kind: str, zipped: bool) -> ImageSet:
    labels = {"train": [3, 0, 9, 1, 1, 4, 2], "val": [9, 8, 0, 7]}
    images = {s: random_images(i, [(6, 5)] * len(labels[s]), 1) for i, s in enumerate(SPLITS)}
    for split, prefix in (("train", "train"), ("val", "t10k")):
        for name, values in (
            ("images-idx3-ubyte", np.stack(images[split])[..., 0]),
            ("labels-idx1-ubyte", np.array(labels[split], dtype=np.uint8)),
        ):
            content = idx_bytes(values)
            suffix = ".gz" if zipped else ""
            (folder / f"{prefix}-{name}{suffix}").write_bytes(gzip.compress(content) if zipped else content)
    return ImageSet(kind, folder, 1, 10, labels, images)


def make_parquet(folder: Path, sizes: dict[str, list[tuple[int, int]]], limit_bytes: int) -> ImageSet:
    images = {s: random_images(i, sizes[s], 3) for i, s in enumerate(SPLITS)}
    labels = {"train": [0, 2, 1, 2, 0, 1, 1, 2, 0, 0, 1], "val": [2, 1, 1, 0, 2]}
    for split, prefix in (("train", "train"), ("val", "test")):
        encoded: list[bytes | None] = [png_bytes(image) for image in images[split]]
        for part, rows in enumerate((slice(0, 4), slice(4, None))):
            name = f"{prefix}-{part:05}-of-00002.parquet"
            write_parquet(folder / name, encoded[rows], labels[split][rows])
    return ImageSet("parquet", folder, 3, 3, labels, images, {"memory_limit_bytes": limit_bytes})


def make_folder(folder: Path, sizes: dict[str, list[tuple[int, int]]], limit_bytes: int) -> ImageSet:
    images = {s: random_images(i, sizes[s], 3) for i, s in enumerate(SPLITS)}
    labels = {"train": [0] * 4 + [1] * 5 + [2] * 2, "val": [0, 0, 2, 2, 2]}
    names = ("ant", "bee", "cat")
    for split in SPLITS:
        for number, (image, label) in enumerate(zip(images[split], labels[split], strict=True)):
            place = folder / split / names[label] / f"{number:03}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(png_bytes(image))
        (folder / split / "notes.txt").write_text("a stray file")
        (folder / split / "ant" / "notes.txt").write_text("another one")
        (folder / split / ".hidden").mkdir()
    return ImageSet("folder", folder, 3, 3, labels, images, {"memory_limit_bytes": limit_bytes})


def write_tar(path: Path, members: list[tuple[str, bytes]], kind: int = tarfile.USTAR_FORMAT) -> None:
    with tarfile.open(path, "w", format=kind) as opened:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            opened.addfile(info, io.BytesIO(content))


def make_tar(folder: Path, sizes: dict[str, list[tuple[int, int]]], limit_bytes: int) -> ImageSet:
    images = {s: random_images(i, sizes[s], 3) for i, s in enumerate(SPLITS)}
    labels = {"train": [0, 2, 1, 2, 0, 1, 1, 2, 0, 0, 1], "val": [2, 1, 1, 0, 2]}
    for split in SPLITS:
        samples: list[list[tuple[str, bytes]]] = []
        for number, (image, label) in enumerate(zip(images[split], labels[split], strict=True)):
            written = (f"{number:04}.cls", f"{label}\n".encode())
            if number % 2:
                written = (f"{number:04}.json", f'{{"label": {label}, "who": "me"}}'.encode())
            samples.append([(f"{number:04}.png", png_bytes(image)), written, (f"{number:04}.txt", b"a caption")])
        for part, of_part in enumerate((samples[:4], samples[4:])):
            write_tar(folder / f"set-{split}-{part:04}.tar", [member for sample in of_part for member in sample])
    return ImageSet("tar", folder, 3, 3, labels, images, {"memory_limit_bytes": limit_bytes})


def make_raw(folder: Path, sizes: dict[str, list[tuple[int, int]]]) -> ImageSet:
    images = {s: random_images(i, sizes[s], 3) for i, s in enumerate(SPLITS)}
    labels = {"train": [0, 2, 1, 2, 0, 1, 1, 2, 0, 0, 1], "val": [2, 1, 1, 0, 2]}
    for split in SPLITS:
        for part, rows in enumerate((slice(0, 4), slice(4, None))):
            file = folder / f"{split}-{part:05}.raw"
            file.write_bytes(b"".join(image.tobytes() for image in images[split][rows]))
            shapes = [(image.shape[0], image.shape[1]) for image in images[split][rows]]
            write_raw_table(file, shapes, labels[split][rows], 3)
    return ImageSet("raw", folder, 3, 3, labels, images)


def make_generated(channels: int, limit_bytes: int) -> ImageSet:
    labels = {split: [i % 4 for i in range(11)] for split in SPLITS}
    options = {
        "num_images": 11,
        "image_size": 12,
        "channels": channels,
        "num_classes": 4,
        "memory_limit_bytes": limit_bytes,
    }
    return ImageSet("generated", None, channels, 4, labels, None, options)


ONE_SIZE = {"train": [(8, 7)] * 11, "val": [(8, 7)] * 5}
MANY_SIZES = {"train": [(8 + i % 4, 7 + i) for i in range(11)], "val": [(9, 9 + i) for i in range(5)]}

MAKERS: dict[str, Callable[[Path], ImageSet]] = {
    "idx": lambda folder: make_idx(folder, "idx", zipped=False),
    "idx-gz": lambda folder: make_idx(folder, "idx", zipped=True),
    "mnist": lambda folder: make_idx(folder, "mnist", zipped=True),
    "fashion-mnist": lambda folder: make_idx(folder, "fashion-mnist", zipped=True),
    "parquet-in-memory": lambda folder: make_parquet(folder, ONE_SIZE, 2**20),
    "parquet-on-demand": lambda folder: make_parquet(folder, ONE_SIZE, 0),
    "parquet-many-sizes": lambda folder: make_parquet(folder, MANY_SIZES, 2**20),
    "folder-in-memory": lambda folder: make_folder(folder, ONE_SIZE, 2**20),
    "folder-on-demand": lambda folder: make_folder(folder, ONE_SIZE, 0),
    "folder-many-sizes": lambda folder: make_folder(folder, MANY_SIZES, 2**20),
    "tar-in-memory": lambda folder: make_tar(folder, ONE_SIZE, 2**20),
    "tar-on-demand": lambda folder: make_tar(folder, ONE_SIZE, 0),
    "tar-many-sizes": lambda folder: make_tar(folder, MANY_SIZES, 2**20),
    "raw-one-size": lambda folder: make_raw(folder, ONE_SIZE),
    "raw-many-sizes": lambda folder: make_raw(folder, MANY_SIZES),
    "generated-in-memory": lambda folder: make_generated(3, 2**20),
    "generated-on-demand": lambda folder: make_generated(1, 0),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexes are cached in a folder of the test's own; the compiled helper stays where it is, once it is loaded."""
    native()
    monkeypatch.setenv("MEGABATCH_DATA", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(params=sorted(MAKERS))
def image_set(request: pytest.FixtureRequest, tmp_path: Path) -> ImageSet:
    """One small set of every kind and layout in turn."""
    return MAKERS[request.param](tmp_path)


@pytest.fixture(scope="session")
def real_data(pytestconfig: pytest.Config) -> Path:
    """The folder of real sets: $MEGABATCH_TEST_DATA, else shared/data beside the repository; else a skip."""
    given = os.environ.get("MEGABATCH_TEST_DATA")
    folder = Path(given) if given else pytestconfig.rootpath.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real images in {folder}; set MEGABATCH_TEST_DATA to the folder that holds them")
    return folder


@pytest.fixture(scope="session")
def cifar10(real_data: Path) -> Path:
    """CIFAR-10 as parquet; else a skip."""
    if not (real_data / "cifar10").is_dir():
        pytest.skip(f"no cifar10 in {real_data}; put its parquet files there")
    return real_data / "cifar10"


@pytest.fixture(scope="session")
def cifar10_val(cifar10: Path) -> Source:
    """The 10,000 test images of CIFAR-10, opened once: decoding them takes seconds."""
    return open_source("parquet", cifar10, "val")
