from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from megabatch.data import shards
from megabatch.data.shards import TarMember, index_shards, list_members, open_tar, split_of_names, tar_header
from megabatch.data.sources import Source
from megabatch.data.storage import LocalFiles
from megabatch.errors import DataError
from tests.data.conftest import png_bytes, random_images, write_tar

IMAGE = random_images(3, [(6, 7)], 3)[0]
ENCODED = png_bytes(IMAGE)


def opened(folder: Path, *members: tuple[str, bytes]) -> Source:
    write_tar(folder / "train-0.tar", list(members))
    return open_tar(folder, "train")


def test_keys_labels_and_strangers(tmp_path: Path) -> None:
    source = opened(
        tmp_path,
        ("n01/a.b.png", ENCODED),  # webdataset cuts at the first dot: key n01/a, suffix b.png
        ("n01/x.PNG", ENCODED),
        ("n01/x.CLS", b" 4 \n"),
        ("n02/x.cls", b"1"),
        ("n02/x.txt", b"caption"),
        ("n02/x.jpeg", ENCODED),
        ("readme.md", b"hello"),
        (".hidden", b"hello"),
        ("y.json", b'{"cls": 2}'),
        ("y.webp", ENCODED),
    )
    assert source.labels.tolist() == [4, 1, 2]
    assert [source.name_of(i).split(" in ")[0] for i in range(3)] == ["n01/x.PNG", "n02/x.jpeg", "y.webp"]
    assert source.name_of(0).endswith("train-0.tar")
    for index in range(3):
        np.testing.assert_array_equal(source.read(index), IMAGE)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.png", ENCODED)], "sample 'a' has no .cls or .json member"),
        ([("a.cls", b"1")], "sample 'a' has 0 images, one is needed"),
        ([("a.png", ENCODED), ("a.jpg", ENCODED), ("a.cls", b"1")], "sample 'a' has 2 images"),
        ([("a.png", ENCODED), ("a.cls", b"cat")], "sample 'a' has the label 'cat' in .cls; an integer from 0"),
        ([("a.png", ENCODED), ("a.cls", b"")], "sample 'a' has the label '' in .cls"),
        ([("a.png", ENCODED), ("a.cls", b"\xff\xfe")], "sample 'a' has the label"),
        ([("a.png", ENCODED), ("a.json", b'{"label": 1.5}')], "in .json; an integer"),
        ([("a.png", ENCODED), ("a.json", b'{"label": true}')], "in .json; an integer"),
        ([("a.png", ENCODED), ("a.json", b"[3]")], "in .json; an integer"),
        ([("a.png", ENCODED), ("a.json", b'{"class": 1')], "in .json; an integer"),
        ([("a.png", ENCODED), ("a.cls", b"-1")], "label at index 0 .* is -1"),
        ([("a.png", ENCODED), ("a.cls", b"1099511627776")], "label at index 0 .* is 1099511627776"),
        ([("a.png", ENCODED), ("a.cls", b"9" * 30)], "in .cls; an integer"),
        ([("a.png", ENCODED), ("a.json", b'{"label": ' + b"[" * 5000)], "in .json; an integer"),
        ([("a.txt", b"text")], "has no images"),
        # The label of another image between the two: the shard was not sorted by name.
        ([("a.png", ENCODED), ("b.cls", b"1"), ("b.png", ENCODED), ("a.cls", b"1")], "sample 'a' has no .cls"),
    ],
)
def test_wrong_shards_are_explained(tmp_path: Path, members: list[tuple[str, bytes]], message: str) -> None:
    for _ in range(2):  # from the shard, and from the index if that was cached
        with pytest.raises(DataError, match=message):
            opened(tmp_path, *members)


def test_a_truncated_shard_is_refused_at_the_start(tmp_path: Path) -> None:
    opened(tmp_path, ("a.png", ENCODED), ("a.cls", b"1"))
    content = (tmp_path / "train-0.tar").read_bytes()
    (tmp_path / "train-0.tar").write_bytes(content[:700])
    with pytest.raises(DataError, match=r"train-0.tar is truncated: .*; fetch it again"):
        open_tar(tmp_path, "train")


def test_the_index_is_cached_and_follows_the_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(opened(tmp_path, ("a.png", ENCODED), ("a.cls", b"1"))) == 1
    with monkeypatch.context() as patch:
        patch.setattr(shards, "index_shards", lambda storage: pytest.fail("the index was made again"))
        assert len(open_tar(tmp_path, "train")) == 1
    changed = opened(tmp_path, ("a.png", ENCODED), ("a.cls", b"1"), ("b.png", ENCODED), ("b.cls", b"0"))
    assert changed.labels.tolist() == [1, 0]
    # The same size and another date: somebody wrote the file anew.
    write_tar(tmp_path / "train-0.tar", [("a.png", ENCODED), ("a.cls", b"3"), ("b.png", ENCODED), ("b.cls", b"2")])
    os.utime(tmp_path / "train-0.tar", ns=(0, 12345))
    assert open_tar(tmp_path, "train").labels.tolist() == [3, 2]


def test_many_shards_are_in_the_order_of_their_names(tmp_path: Path) -> None:
    for number in reversed(range(12)):
        members = [
            (f"{i}.png", ENCODED) if part else (f"{i}.cls", b"%d" % (10 * number + i))
            for i in range(3)
            for part in (0, 1)
        ]
        write_tar(tmp_path / f"x-{number:02}.tar", members, tarfile.PAX_FORMAT)
    index = index_shards(LocalFiles(sorted(tmp_path.glob("*.tar"))))
    assert index.labels.tolist() == [10 * number + i for number in range(12) for i in range(3)]
    assert index.shards.tolist() == [number for number in range(12) for _ in range(3)]


def test_one_file_serves_as_a_set(tmp_path: Path) -> None:
    opened(tmp_path, ("a.png", ENCODED), ("a.cls", b"1"))
    assert len(open_tar(tmp_path / "train-0.tar", "train")) == 1
    with pytest.raises(DataError, match="no shard with validation or valid or val or test"):
        open_tar(tmp_path / "train-0.tar", "val")


def test_names_decide_the_split() -> None:
    both = ["imagenet-train-000.tar", "imagenet-train-001.tar", "imagenet-validation-000.tar"]
    assert split_of_names(both, "train", "x") == set(both[:2])
    assert split_of_names(both, "val", "x") == {both[2]}
    assert split_of_names(["trainer-0.tar", "a-1.tar"], "val", "x") == {"trainer-0.tar", "a-1.tar"}
    assert split_of_names(["a-val-0.tar", "a-test-0.tar"], "val", "x") == {"a-val-0.tar"}
    with pytest.raises(DataError, match="x has no shard with train or training in its name"):
        split_of_names(["a-val-0.tar"], "train", "x")


def test_real_shards(real_data: Path) -> None:
    if not (real_data / "imagenette224").is_dir():
        pytest.skip(f"no imagenette224 in {real_data}")
    val = open_tar(real_data / "imagenette224", "val")
    assert len(val) == 2 * 982
    assert (val.num_classes, val.read(1963).shape) == (10, (224, 224, 3))
    assert len(open_tar(real_data / "imagenette224", "train")) == 4 * 1184


FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
CONTENTS = [("a.jpg", b"x" * 700), ("a.cls", b"3"), ("empty.jpg", b""), ("b/c.jpg", bytes(range(256)) * 300)]


def write(path: Path, kind: int, contents: list[tuple[str, bytes]], date: float = 0) -> None:
    with tarfile.open(path, "w", format=kind) as opened:
        for name, content in contents:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(content), date
            opened.addfile(info, io.BytesIO(content))


def listed(path: Path) -> list[TarMember]:
    return list(list_members(LocalFiles([path]), 0))


def by_tarfile(path: Path) -> list[TarMember]:
    with tarfile.open(path) as opened:
        return [TarMember(m.name, m.offset_data, m.size) for m in opened if m.isreg()]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("date", [0, 1234.5])
def test_members_are_those_of_tarfile(tmp_path: Path, kind: str, date: float) -> None:
    """A date with a fraction makes every member of a pax file carry an extended header, as webdataset's writer does."""
    long_name = [("deep/" * 18 + "n" * 60 + ".jpg", b"long")]
    write(tmp_path / "x.tar", FORMATS[kind], CONTENTS + long_name + CONTENTS, date)
    found = listed(tmp_path / "x.tar")
    assert found == by_tarfile(tmp_path / "x.tar")
    content = (tmp_path / "x.tar").read_bytes()
    assert [content[m.offset : m.offset + m.num_bytes] for m in found[:4]] == [data for _, data in CONTENTS]


def test_folders_are_passed_over_and_links_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as opened:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        opened.addfile(folder)
        opened.addfile(tarfile.TarInfo("a.cls"))
    assert [member.name for member in listed(tmp_path / "x.tar")] == ["a.cls"]
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE):
        with tarfile.open(tmp_path / "x.tar", "w") as opened:
            link = tarfile.TarInfo("../../passwd")
            link.type, link.linkname = kind, "/etc/passwd"
            opened.addfile(link)
        with pytest.raises(DataError, match=r"x.tar has ../../passwd, a link or a device"):
            listed(tmp_path / "x.tar")


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "x.tar", FORMATS[kind], CONTENTS, 1234.5)
    whole = (tmp_path / "x.tar").read_bytes()
    end = max(m.offset + -(-m.num_bytes // 512) * 512 for m in listed(tmp_path / "x.tar"))
    for cut in [*range(0, end + 1, 512), 100, 700, end - 1, end + 511]:
        (tmp_path / "x.tar").write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"x.tar is truncated: .*; fetch it again"):
            listed(tmp_path / "x.tar")
    (tmp_path / "x.tar").write_bytes(whole[: end + 512])
    assert len(listed(tmp_path / "x.tar")) == 4


def test_damage_is_found_by_the_checksum(tmp_path: Path) -> None:
    write(tmp_path / "x.tar", tarfile.USTAR_FORMAT, CONTENTS)
    content = bytearray((tmp_path / "x.tar").read_bytes())
    second = 512 + 1024
    content[second + 3] ^= 1
    (tmp_path / "x.tar").write_bytes(content)
    with pytest.raises(DataError, match=f"damaged tar header at byte {second}"):
        listed(tmp_path / "x.tar")
    (tmp_path / "x.tar").write_bytes(b"\x89PNG" + bytes(range(1, 255)) * 40)
    with pytest.raises(DataError, match="no tar header at byte 0; it is not a tar file"):
        listed(tmp_path / "x.tar")


@pytest.mark.parametrize(
    "record", [b"x", b"9999 path=a\n", b"0 path=a\n", b"11 size=-3\n", b"9 size=x\n", b"38 size=" + b"9" * 29 + b"\n"]
)
def test_damaged_pax_records_are_refused(tmp_path: Path, record: bytes) -> None:
    header = bytearray(tar_header("p", len(record)))
    header[156:157] = b"x"
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    body = bytes(header) + record.ljust(512, b"\0") + tar_header("a.cls", 0) + bytes(1024)
    (tmp_path / "x.tar").write_bytes(body)
    with pytest.raises(DataError, match="damaged pax record"):
        listed(tmp_path / "x.tar")


def test_headers_written_here_are_read_by_tarfile(tmp_path: Path) -> None:
    content = b"hello"
    (tmp_path / "x.tar").write_bytes(tar_header("000001.cls", 5) + content.ljust(512, b"\0") + bytes(1024))
    with tarfile.open(tmp_path / "x.tar") as opened:
        (member,) = opened.getmembers()
        assert (member.name, member.size, member.mode, member.mtime, member.uid) == ("000001.cls", 5, 0o644, 0, 0)
        read = opened.extractfile(member)
        assert read is not None
        assert read.read() == content
    assert listed(tmp_path / "x.tar") == [TarMember("000001.cls", 512, 5)]
