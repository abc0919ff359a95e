"""Against Python's own tarfile, in all the formats that it writes."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from megabatch.data.storage import LocalFiles
from megabatch.data.tar import Member, list_members, tar_header
from megabatch.errors import DataError

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
CONTENTS = [("a.jpg", b"x" * 700), ("a.cls", b"3"), ("empty.jpg", b""), ("b/c.jpg", bytes(range(256)) * 300)]


def write(path: Path, kind: int, contents: list[tuple[str, bytes]], date: float = 0) -> None:
    with tarfile.open(path, "w", format=kind) as opened:
        for name, content in contents:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(content), date
            opened.addfile(info, io.BytesIO(content))


def listed(path: Path) -> list[Member]:
    return list(list_members(LocalFiles([path]), 0))


def by_tarfile(path: Path) -> list[Member]:
    with tarfile.open(path) as opened:
        return [Member(m.name, m.offset_data, m.size) for m in opened if m.isreg()]


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


@pytest.mark.parametrize("record", [b"x", b"9999 path=a\n", b"0 path=a\n", b"11 size=-3\n"])
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
    assert listed(tmp_path / "x.tar") == [Member("000001.cls", 512, 5)]
