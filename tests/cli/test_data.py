"""`megabatch data pack`, `data verify` and `bench data`, from the command line to the files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megabatch.cli import app
from megabatch.errors import ConfigError, DataError
from tests.data.conftest import MANY_SIZES, make_folder


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_folder(tmp_path / "set", MANY_SIZES, 0)
    return tmp_path / "set"


def test_pack_verify_compare(folder: Path, tmp_path: Path) -> None:
    code, said = run("data", "pack", folder, tmp_path / "out", "--images-per-shard", 4)
    assert code == 0
    assert "train: 11 images" in said
    assert "in 3 files" in said
    assert "val: 5 images" in said
    code, said = run("data", "pack", folder, tmp_path / "out", "--images-per-shard", 4, "--json")
    assert json.loads(said)["train"]["kept_shards"] == 3
    code, said = run("data", "verify", tmp_path / "out")
    assert code == 0
    assert "3 classes of 2 to 5, 0 broken" in said
    assert "manifest: " in said
    code, said = run("data", "verify", tmp_path / "out", "--checksums")
    assert (code, "train: 3 files are as the manifest says" in said) == (0, True)
    shard = tmp_path / "out" / "train-00001.tar"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match=r"checksum of train-00001.tar differs"):
        run("data", "verify", tmp_path / "out", "--checksums")


def test_broken_images_are_shown_and_change_the_exit_code(folder: Path) -> None:
    (folder / "train" / "bee" / "005.png").write_bytes(b"")
    code, said = run("data", "verify", folder, "--no-manifest")
    assert code == 1
    assert "1 broken" in said
    assert "5: cannot decode the image" in said
    assert not list(folder.glob("megabatch-manifest*"))
    code, said = run("data", "verify", folder, "--split", "train", "--json")
    assert json.loads(said)["train"]["broken"][0]["index"] == 5
    assert (folder / "megabatch-manifest.train.json").exists()


@pytest.mark.parametrize("to", ["parquet", "raw"])
def test_other_formats(folder: Path, tmp_path: Path, to: str) -> None:
    code, said = run("data", "pack", folder, tmp_path / "out", "--to", to, "--split", "val")
    assert (code, said.startswith("val: 5 images")) == (0, True)
    assert list((tmp_path / "out").glob(f"val-*.{to}"))


def test_mistakes(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--to is 'zip'; it must be one of tar, parquet, raw"):
        run("data", "pack", folder, tmp_path / "out", "--to", "zip")
    with pytest.raises(DataError, match="does not exist"):
        run("data", "verify", tmp_path / "nowhere")


def test_bench(folder: Path) -> None:
    code, said = run(
        "bench", "data", folder, "--image-size", 16, "--images", 6, "--rounds", 2, "--need", 1000, "--alter"
    )
    assert code == 0
    for word in (
        "images per core and second",
        "read",
        "decode",
        "augment",
        "collate",
        "1,000 images a second need",
    ):
        assert word in said
    code, said = run("bench", "data", "--image-size", 16, "--images", 6, "--rounds", 2, "--crop", "pad", "--json")
    table = json.loads(said)
    assert table["cores"] == pytest.approx(2500 / table["images_per_core_second"])
