"""Images and labels in idx files: MNIST, Fashion-MNIST and whatever else is stored that way.

The format (Yann LeCun's description of MNIST): two zero bytes, a type byte (8 for unsigned bytes), the number
of dimensions, each dimension as a big-endian 32-bit number, then the values in C order. Files may be gzipped.

Fashion-MNIST, the small public set that the demo and the tests train on, is also found on this machine or fetched:
Xiao, Rasul and Vollgraf 2017 (arXiv 1708.07747), 60,000 + 10,000 images of 28x28, under the MIT licence. Whatever way
the files came, the SHA-256 of their uncompressed bytes decides.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from megabatch.data.jpeg import Pixels
from megabatch.data.sources import ImageArray, Split, existing_folder
from megabatch.errors import DataError, WriteError, first_line
from megabatch.files import default_cache, open_regular, read_bytes, write_atomically

UNSIGNED_BYTES = 8
FILE_PREFIX = {"train": "train", "val": "t10k"}

# SHA-256 of the uncompressed files. Debian's package carries the publisher's deflate streams behind another
# gzip header (no name, another time), so its .gz files do not match the published MD5 sums (8d4fb7e6...,
# 25c81989..., bef4ecab..., bb300cfd...); with the original name and time put back all four do. The content is
# the official one.
FASHION_MNIST_SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
LARGEST_FILE_BYTES = 64 * 2**20
_CHUNK_BYTES = 64 * 2**20

SYSTEM_FOLDER = Path("/usr/share/datasets/fashion-mnist")
DEBIAN_PACKAGE = "dataset-fashion-mnist"
OFFICIAL_URLS = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
)

PACKAGE_TIMEOUT_SECONDS = 300.0
SILENCE_TIMEOUT_SECONDS = 20.0
DOWNLOAD_TIMEOUT_SECONDS = 300.0

Files = dict[str, bytes]


def open_idx(path: Path, split: Split, *, num_classes: int | None = None) -> ImageArray:
    """The grey images of `train-images-idx3-ubyte[.gz]` and its labels, or those of `t10k-*` for val."""
    return _open(existing_folder(path), split, f"{path.name} {split}", num_classes)


def open_mnist(path: Path, split: Split, *, num_classes: int | None = 10) -> ImageArray:
    """MNIST's handwritten digits from a folder of its four files."""
    return _open(existing_folder(path), split, f"mnist {split}", num_classes)


def open_fashion_mnist(path: Path | None, split: Split, *, num_classes: int | None = 10) -> ImageArray:
    """Fashion-MNIST from a folder, or from where it lies on this machine; nothing is downloaded here."""
    folder = find_fashion_mnist(default_cache()) if path is None else existing_folder(path)
    return _open(folder, split, f"fashion-mnist {split}", num_classes)


def read_idx(path: Path, num_dims: int) -> Pixels:
    """The unsigned bytes of an idx file with `num_dims` dimensions, read-only; DataError when damaged."""
    magic, header_bytes = bytes([0, 0, UNSIGNED_BYTES, num_dims]), 4 + 4 * num_dims
    try:
        with open_regular(path) as file:
            stream = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            content = stream.read(header_bytes)
            dims = tuple(int.from_bytes(content[at : at + 4], "big") for at in range(4, header_bytes, 4))
            expected = header_bytes + math.prod(dims)
            if content[:4] == magic:
                while len(content) <= expected and (more := stream.read(_CHUNK_BYTES)):
                    content += more
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}; fetch the file again") from error
    if content[:4] != magic:
        raise DataError(
            f"{path} begins with {content[:4].hex() or 'nothing'}; an idx file of unsigned bytes with "
            f"{num_dims} dimensions begins with {magic.hex()}, so this is another kind of file"
        )
    if len(content) < header_bytes:
        raise DataError(f"{path} ends inside its header, after {len(content)} bytes; fetch the file again")
    if len(content) != expected:
        raise DataError(
            f"{path} has {len(content)} bytes but its header {'x'.join(map(str, dims))} needs {expected}; "
            "fetch the file again"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header_bytes).reshape(dims)


def _open(folder: Path, split: Split, name: str, num_classes: int | None) -> ImageArray:
    prefix = FILE_PREFIX[split]
    images = read_idx(_find(folder, f"{prefix}-images-idx3-ubyte"), num_dims=3)
    labels = read_idx(_find(folder, f"{prefix}-labels-idx1-ubyte"), num_dims=1)
    return ImageArray(name, images[..., None], labels, num_classes)


def _find(folder: Path, name: str) -> Path:
    if (path := _path_of(folder, name)) is not None:
        return path
    raise DataError(f"{folder} has neither {name} nor {name}.gz; give the folder that holds the four idx files")


class _UnavailableError(Exception):
    """One way to get the files failed; the message says why."""


def find_fashion_mnist(cache: Path) -> Path:
    """The folder on this machine that has the four files (not verified); DataError when there is none."""
    folders = (cache / "fashion-mnist", SYSTEM_FOLDER)
    for folder in folders:
        if all(_path_of(folder, name) for name in FASHION_MNIST_SHA256):
            return folder
    raise DataError(
        f"fashion-mnist is neither in {folders[0]} nor in {folders[1]}; "
        "fetch it with `megabatch data get fashion-mnist`, or give the folder that holds it"
    )


def get_fashion_mnist(cache: Path, progress: Callable[[str], None] = lambda line: None) -> Path:
    """The folder with the four verified files: as found on disk, else fetched into `cache`.

    Tried in turn: the cache, the installed Debian package, the Debian package downloaded but not installed,
    the publisher's sites. Every wait is bounded. `progress` gets a line for each way that is tried.

    Raises DataError listing each way and why it failed when there is none.
    """
    target = cache / "fashion-mnist"
    failures = []
    for folder in (target, SYSTEM_FOLDER):
        try:
            _read_verified(folder)
            return folder
        except _UnavailableError as error:
            failures.append(f"{folder}: {error}")
    ways: list[tuple[str, Callable[[], Files]]] = [(f"Debian package {DEBIAN_PACKAGE}", _from_debian)]
    ways += [(url, partial(_from_url, url)) for url in OFFICIAL_URLS]
    for way, fetch in ways:
        progress(f"fashion-mnist: trying {way}")
        try:
            files = fetch()
            target.mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                write_atomically(target / name, content)
            progress(f"fashion-mnist: stored in {target}")
            return target
        except _UnavailableError as error:
            failures.append(f"{way}: {error}")
        except (OSError, WriteError) as error:
            raise DataError(f"cannot write into {target}: {error}; set MEGABATCH_DATA to another folder") from error
    raise DataError(
        f"fashion-mnist cannot be had ({'; '.join(failures)}); put its four idx files into {target}, "
        "or use generated images"
    )


def _path_of(folder: Path, name: str) -> Path | None:
    """The file of that name, or its gzipped form; None when the folder has neither."""
    return next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)


def _read_verified(folder: Path) -> Files:
    """The four files of a folder, uncompressed, their checksums right."""
    files = {}
    for name in FASHION_MNIST_SHA256:
        path = _path_of(folder, name)
        if path is None:
            raise _UnavailableError(f"{name} is not there")
        try:
            content = read_bytes(path, LARGEST_FILE_BYTES)
        except OSError as error:
            raise _UnavailableError(str(error)) from error
        files[name] = _verified(name, content, gzipped=path.suffix == ".gz")
    return files


def _verified(name: str, content: bytes, *, gzipped: bool) -> bytes:
    """The uncompressed content; its checksum is right."""
    if gzipped:
        try:
            # A limit, because a hostile file of a few megabytes can unpack to many gigabytes.
            content = gzip.GzipFile(fileobj=io.BytesIO(content)).read(LARGEST_FILE_BYTES)
        except (OSError, EOFError, zlib.error) as error:
            raise _UnavailableError(f"{name}.gz is damaged ({error})") from error
    if hashlib.sha256(content).hexdigest() != FASHION_MNIST_SHA256[name]:
        raise _UnavailableError(f"{name} has a wrong checksum")
    return content


def _from_debian() -> Files:
    """Downloads Debian's package into a temporary folder and unpacks it there; needs no root."""
    with tempfile.TemporaryDirectory(prefix="megabatch-") as temporary:
        silence = f"{SILENCE_TIMEOUT_SECONDS:.0f}"
        options = [f"-oAcquire::{scheme}::Timeout={silence}" for scheme in ("http", "https")]
        _run(["apt-get", *options, "-oAcquire::Retries=1", "download", DEBIAN_PACKAGE], temporary)
        packages = sorted(Path(temporary).glob("*.deb"))
        if not packages:
            raise _UnavailableError("apt-get left no package behind")
        _run(["dpkg-deb", "-x", str(packages[0]), "unpacked"], temporary)
        return _read_verified(Path(temporary, "unpacked", *SYSTEM_FOLDER.parts[1:]))


def _run(command: list[str], folder: str) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PACKAGE_TIMEOUT_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise _UnavailableError(f"{command[0]} is not on this machine") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _UnavailableError(f"{command[0]}: {first_line(error)}") from error
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise _UnavailableError(
            f"{command[0]} failed with {done.returncode}: {lines[-1] if lines else 'no reason given'}"
        )


def _from_url(url: str) -> Files:
    deadline = time.monotonic() + DOWNLOAD_TIMEOUT_SECONDS
    return {
        name: _verified(name, _download(f"{url}/{name}.gz", deadline), gzipped=True) for name in FASHION_MNIST_SHA256
    }


def _download(url: str, deadline: float) -> bytes:
    """The bytes behind a URL; gives up on silence, at the deadline and on too many bytes."""
    content = bytearray()
    try:
        with urllib.request.urlopen(url, timeout=SILENCE_TIMEOUT_SECONDS) as response:
            while part := response.read1(2**20):
                content += part
                if time.monotonic() > deadline:
                    raise _UnavailableError(f"not finished within {DOWNLOAD_TIMEOUT_SECONDS:.0f} seconds")
                if len(content) > LARGEST_FILE_BYTES:
                    raise _UnavailableError(f"more than {LARGEST_FILE_BYTES} bytes")
    except OSError as error:  # URLError, time-outs and broken connections are all OSErrors
        raise _UnavailableError(first_line(error)) from error
    return bytes(content)
