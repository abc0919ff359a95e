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

from megabatch.data import downloads
from megabatch.data.downloads import find_fashion_mnist, get_fashion_mnist
from megabatch.data.idx import open_fashion_mnist
from megabatch.data.storage import default_cache
from megabatch.errors import DataError
from tests.data.conftest import idx_bytes

FILES = {
    name: idx_bytes(np.full((2, 2, 2) if "images" in name else (2,), number, dtype=np.uint8))
    for number, name in enumerate(downloads.FASHION_MNIST_SHA256)
}
NAMES = sorted(FILES)


@pytest.fixture(autouse=True)
def _sealed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A world with other checksums, without the installed package, without tools and without a network."""
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
    monkeypatch.setattr(downloads, "FASHION_MNIST_SHA256", sums)
    monkeypatch.setattr(downloads, "SYSTEM_FOLDER", tmp_path / "system" / "fashion-mnist")
    monkeypatch.setattr(downloads, "OFFICIAL_URLS", ())
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
    inside = "/".join(downloads.SYSTEM_FOLDER.parts[1:])
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
    fill(downloads.SYSTEM_FOLDER, FILES)
    lines: list[str] = []
    assert get_fashion_mnist(tmp_path / "cache", progress=lines.append) == tmp_path / "cache" / "fashion-mnist"
    assert find_fashion_mnist(tmp_path / "cache") == tmp_path / "cache" / "fashion-mnist"
    assert lines == []


def test_the_installed_package_is_used_where_it_lies(tmp_path: Path) -> None:
    fill(downloads.SYSTEM_FOLDER, FILES)
    assert get_fashion_mnist(tmp_path / "cache") == downloads.SYSTEM_FOLDER
    assert find_fashion_mnist(tmp_path / "cache") == downloads.SYSTEM_FOLDER
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
        monkeypatch.setattr(downloads, "OFFICIAL_URLS", (f"http://127.0.0.1:{server.server_port}",))
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
    assert f"{downloads.OFFICIAL_URLS[0]}: {NAMES[2]} has a wrong checksum" in str(raised.value)
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
    monkeypatch.setattr(downloads, "LARGEST_FILE_BYTES", 10)
    with pytest.raises(DataError, match="more than 10 bytes"):
        get_fashion_mnist(tmp_path / "cache")
    monkeypatch.setattr(downloads, "LARGEST_FILE_BYTES", 2**20)
    monkeypatch.setattr(downloads, "DOWNLOAD_TIMEOUT_SECONDS", -1.0)
    with pytest.raises(DataError, match="not finished within"):
        get_fashion_mnist(tmp_path / "cache")


def test_every_failure_is_listed_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "OFFICIAL_URLS", ("http://127.0.0.1:9/nobody-listens",))
    with pytest.raises(DataError) as raised:
        get_fashion_mnist(tmp_path / "cache")
    message = str(raised.value)
    assert "\n" not in message
    first = next(iter(FILES))
    for part in (
        f"{tmp_path / 'cache' / 'fashion-mnist'}: {first} is not there",
        f"{downloads.SYSTEM_FOLDER}: {first} is not there",
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
    monkeypatch.setattr(downloads, "PACKAGE_TIMEOUT_SECONDS", 0.3)
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
