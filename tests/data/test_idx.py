from __future__ import annotations

import gzip
import hashlib
import http.server
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megabatch.data import idx
from megabatch.data.idx import find_fashion_mnist, get_fashion_mnist, open_fashion_mnist, open_idx, read_idx
from megabatch.errors import DataError
from megabatch.files import default_cache
from tests.data.conftest import idx_bytes, make_idx

VALUES = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)


@pytest.mark.parametrize("shape", [(24,), (2, 3, 4), (0, 5, 5), (1, 2, 3, 4)])
def test_round_trip(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    (tmp_path / "plain").write_bytes(idx_bytes(values))
    (tmp_path / "zipped.gz").write_bytes(gzip.compress(idx_bytes(values)))
    for name in ("plain", "zipped.gz"):
        np.testing.assert_array_equal(read_idx(tmp_path / name, num_dims=len(shape)), values)


def test_reads_a_file_written_out_by_hand(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes.fromhex("00000803 00000001 00000002 00000003 0a0b0c 0d0e0f"))
    assert read_idx(tmp_path / "x", num_dims=3).tolist() == [[[10, 11, 12], [13, 14, 15]]]


GOOD = idx_bytes(VALUES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with nothing; .* begins with 00000803"),
        (b"\x89PNG....", "begins with 89504e47"),
        (bytes([0, 0, 8, 1]) + GOOD[4:], "begins with 00000801"),  # dimensions of a label file
        (bytes([0, 0, 13, 3]) + GOOD[4:], "begins with 00000d03"),  # floats
        (GOOD[:10], "ends inside its header, after 10 bytes"),
        (GOOD[:-1], "has 39 bytes but its header 2x3x4 needs 40"),
        (GOOD + b"\0", "has 41 bytes but its header 2x3x4 needs 40"),
        (bytes([0, 0, 8, 3]) + b"\xff" * 12, "needs 79228162458924105385300197391"),
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_idx(tmp_path / "x", num_dims=3)
    (tmp_path / "x.gz").write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match=message):
        read_idx(tmp_path / "x.gz", num_dims=3)


def test_damaged_gzip(tmp_path: Path) -> None:
    zipped = gzip.compress(GOOD)
    flipped = bytearray(zipped)
    flipped[len(zipped) // 2] ^= 0xFF
    for content in (zipped[:-9], bytes(flipped), b"no gzip at all"):
        (tmp_path / "x.gz").write_bytes(content)
        with pytest.raises(DataError, match=r"cannot read .*x\.gz: .*; fetch the file again"):
            read_idx(tmp_path / "x.gz", num_dims=3)


def test_missing_file_is_named(tmp_path: Path) -> None:
    make_idx(tmp_path, "idx", zipped=True)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    assert len(open_idx(tmp_path, "train")) == 7
    with pytest.raises(DataError, match=r"has neither t10k-labels-idx1-ubyte nor t10k-labels-idx1-ubyte.gz"):
        open_idx(tmp_path, "val")


def test_label_count_mismatch(tmp_path: Path) -> None:
    make_idx(tmp_path, "idx", zipped=False)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(6, dtype=np.uint8)))
    with pytest.raises(DataError, match="has 7 images and 6 labels: the image at index 6 has no label"):
        open_idx(tmp_path, "train")


def test_fashion_mnist_without_a_path_is_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idx, "SYSTEM_FOLDER", tmp_path / "absent")
    monkeypatch.setenv("MEGABATCH_DATA", str(tmp_path))
    with pytest.raises(DataError, match="fetch it with `megabatch data get fashion-mnist`"):
        open_fashion_mnist(None, "train")
    (tmp_path / "fashion-mnist").mkdir()
    make_idx(tmp_path / "fashion-mnist", "fashion-mnist", zipped=False)
    source = open_fashion_mnist(None, "val")
    assert source.name == "fashion-mnist val"
    assert source.num_classes == 10


FILES = {
    name: idx_bytes(np.full((2, 2, 2) if "images" in name else (2,), number, dtype=np.uint8))
    for number, name in enumerate(idx.FASHION_MNIST_SHA256)
}
NAMES = sorted(FILES)


@pytest.fixture(autouse=True)
def _sealed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A world with other checksums, without the installed package, without tools and without a network."""
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
    monkeypatch.setattr(idx, "FASHION_MNIST_SHA256", sums)
    monkeypatch.setattr(idx, "SYSTEM_FOLDER", tmp_path / "system" / "fashion-mnist")
    monkeypatch.setattr(idx, "OFFICIAL_URLS", ())
    (tmp_path / "tools").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "tools"))


def fill(folder: Path, files: dict[str, bytes], zipped: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)


def add_tool(tmp_path: Path, name: str, script: str) -> None:
    tool = tmp_path / "tools" / name
    tool.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
    tool.chmod(0o755)


def add_debian(tmp_path: Path, files: dict[str, bytes]) -> None:
    """A package manager whose package holds these files."""
    fill(tmp_path / "package", files)
    add_tool(tmp_path, "apt-get", 'case "$*" in *"download dataset-fashion-mnist") touch some.deb;; *) exit 9;; esac')
    inside = "/".join(idx.SYSTEM_FOLDER.parts[1:])
    add_tool(tmp_path, "dpkg-deb", f'[ "$1" = -x ] && mkdir -p "$3/{inside}" && cp {tmp_path}/package/* "$3/{inside}"')


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_default_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MEGABATCH_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache() == tmp_path / ".cache" / "megabatch"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert default_cache() == Path("/elsewhere/megabatch")
    monkeypatch.setenv("MEGABATCH_DATA", "~/images")
    assert default_cache() == tmp_path / "images"


@pytest.mark.parametrize("zipped", [True, False])
def test_the_cache_comes_first_and_nothing_is_fetched(tmp_path: Path, zipped: bool) -> None:
    fill(tmp_path / "cache" / "fashion-mnist", FILES, zipped)
    fill(idx.SYSTEM_FOLDER, FILES)
    lines: list[str] = []
    assert get_fashion_mnist(tmp_path / "cache", progress=lines.append) == tmp_path / "cache" / "fashion-mnist"
    assert find_fashion_mnist(tmp_path / "cache") == tmp_path / "cache" / "fashion-mnist"
    assert lines == []


def test_the_installed_package_is_used_where_it_lies(tmp_path: Path) -> None:
    fill(idx.SYSTEM_FOLDER, FILES)
    assert get_fashion_mnist(tmp_path / "cache") == idx.SYSTEM_FOLDER
    assert find_fashion_mnist(tmp_path / "cache") == idx.SYSTEM_FOLDER
    assert not (tmp_path / "cache").exists()


def test_the_package_is_downloaded_and_unpacked(tmp_path: Path) -> None:
    add_debian(tmp_path, FILES)
    lines: list[str] = []
    folder = get_fashion_mnist(tmp_path / "cache", progress=lines.append)
    assert contents(folder) == FILES  # uncompressed, and nothing left beside them
    assert [line.split(":")[0] for line in lines] == ["fashion-mnist"] * 2
    assert stat.S_IMODE((folder / NAMES[0]).stat().st_mode) == 0o644
    assert get_fashion_mnist(tmp_path / "cache") == folder


def test_damaged_files_in_the_cache_are_replaced(tmp_path: Path) -> None:
    fill(tmp_path / "cache" / "fashion-mnist", {**FILES, NAMES[0]: b"damaged"}, zipped=False)
    add_debian(tmp_path, FILES)
    assert contents(get_fashion_mnist(tmp_path / "cache")) == FILES


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A web server on this machine in the publisher's place; yields the folder that it serves."""
    folder = tmp_path / "site"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setattr(idx, "OFFICIAL_URLS", (f"http://127.0.0.1:{server.server_port}",))
        yield folder
        server.shutdown()
        thread.join(timeout=10)


def test_the_publishers_site_comes_last(tmp_path: Path, site: Path) -> None:
    fill(site, FILES)
    lines: list[str] = []
    assert contents(get_fashion_mnist(tmp_path / "cache", progress=lines.append)) == FILES
    assert ["Debian package" in line for line in lines] == [True, False, False]


def test_wrong_content_is_never_stored(tmp_path: Path, site: Path) -> None:
    fill(site, {**FILES, NAMES[2]: b"something else"})
    add_debian(tmp_path, {**FILES, NAMES[1]: b"something else"})
    with pytest.raises(DataError) as raised:
        get_fashion_mnist(tmp_path / "cache")
    assert f"Debian package dataset-fashion-mnist: {NAMES[1]} has a wrong checksum" in str(raised.value)
    assert f"{idx.OFFICIAL_URLS[0]}: {NAMES[2]} has a wrong checksum" in str(raised.value)
    assert not (tmp_path / "cache").exists()


def test_damaged_and_missing_downloads(tmp_path: Path, site: Path) -> None:
    fill(site, FILES)
    (site / f"{NAMES[3]}.gz").write_bytes(gzip.compress(FILES[NAMES[3]])[:-9])
    with pytest.raises(DataError, match=rf"{NAMES[3]}\.gz is damaged"):
        get_fashion_mnist(tmp_path / "cache")
    (site / f"{NAMES[3]}.gz").unlink()
    with pytest.raises(DataError, match=r"HTTP Error 404"):
        get_fashion_mnist(tmp_path / "cache")


def test_endless_downloads_are_cut(tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(site, FILES)
    monkeypatch.setattr(idx, "LARGEST_FILE_BYTES", 10)
    with pytest.raises(DataError, match="more than 10 bytes"):
        get_fashion_mnist(tmp_path / "cache")
    monkeypatch.setattr(idx, "LARGEST_FILE_BYTES", 2**20)
    monkeypatch.setattr(idx, "DOWNLOAD_TIMEOUT_SECONDS", -1.0)
    with pytest.raises(DataError, match="not finished within"):
        get_fashion_mnist(tmp_path / "cache")


def test_every_failure_is_listed_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idx, "OFFICIAL_URLS", ("http://127.0.0.1:9/nobody-listens",))
    with pytest.raises(DataError) as raised:
        get_fashion_mnist(tmp_path / "cache")
    message = str(raised.value)
    assert "\n" not in message
    first = next(iter(FILES))
    for part in (
        f"{tmp_path / 'cache' / 'fashion-mnist'}: {first} is not there",
        f"{idx.SYSTEM_FOLDER}: {first} is not there",
        "Debian package dataset-fashion-mnist: apt-get is not on this machine",
        "nobody-listens: ",
        "or use generated images",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo noise >&2; echo 'E: Unable to locate package' >&2; exit 100", "failed with 100: E: Unable to locate"),
        ("exit 3", "apt-get failed with 3: no reason given"),
        ("exit 0", "apt-get left no package behind"),
        ("touch x.deb", "dpkg-deb is not on this machine"),
        ("exec sleep 30", "apt-get: .*timed out after 0.3"),
    ],
)
def test_reasons_of_the_package_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    monkeypatch.setattr(idx, "PACKAGE_TIMEOUT_SECONDS", 0.3)
    add_tool(tmp_path, "apt-get", script)
    with pytest.raises(DataError, match=reason):
        get_fashion_mnist(tmp_path / "cache")


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    add_debian(tmp_path, FILES)
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot write into .*; set MEGABATCH_DATA to another folder"):
        get_fashion_mnist(tmp_path / "cache")


def test_the_real_files_when_they_are_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    try:
        find_fashion_mnist(default_cache())
    except DataError as error:
        pytest.skip(str(error))
    folder = get_fashion_mnist(default_cache())
    for split, count in (("train", 60_000), ("val", 10_000)):
        source = open_fashion_mnist(folder, split)  # type: ignore[arg-type]
        assert source.images.shape == (count, 28, 28, 1)
        assert np.bincount(source.labels).tolist() == [count // 10] * 10
