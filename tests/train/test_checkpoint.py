"""Checkpoints: whole or passed over and named, two copies while one is replaced, no code run."""

from __future__ import annotations

import hashlib
import io
import os
import threading
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megabatch.errors import CheckpointError, WriteError
from megabatch.files import write_atomically
from megabatch.train import checkpoint
from megabatch.train.checkpoint import FORMAT, CheckpointWriter, check_fits, decode, newest_whole, save_checkpoint
from tests.system.runs import read_checkpoint


def state(number: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((3,), float(number))}, "run": {"steps": number, "name": "x", "rate": 0.5}}


def save(folder: Path, *numbers: int, keep: int = 3, best: bool = False) -> None:
    for number in numbers:
        save_checkpoint(folder, state(number), number, keep, best=best)


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def steps(folder: Path) -> list[int]:
    return [int(path.stem.removeprefix("step-")) for path in sorted(folder.glob("step-*.pt"))]


def newest(folder: Path) -> tuple[int | None, list[str]]:
    said: list[str] = []
    data = newest_whole(folder, said.append)
    assert all("\n" not in line for line in said)
    return (None if data is None else decode(data, "here")["run"]["steps"]), said


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_what_is_saved_is_read_with_its_checksum_beside_it(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "deep" / "checkpoints", state(7), 7, keep=3)
    assert path.name == "step-00000007.pt"
    assert files(path.parent) == ["last", "step-00000007.pt", "step-00000007.pt.sha256"]
    assert (path.parent / "step-00000007.pt.sha256").read_text() == hashlib.sha256(path.read_bytes()).hexdigest() + "\n"
    for name in (path, path.parent / "last"):
        found = read_checkpoint(name)
        assert found["format"] == FORMAT
        assert found["run"] == state(7)["run"]
        assert torch.equal(found["model"]["w"], state(7)["model"]["w"])


def test_torch_reads_it_with_weights_only(tmp_path: Path) -> None:
    save(tmp_path, 1)
    found = torch.load(tmp_path / "last", weights_only=True)
    assert set(found) == {"format", "model", "run"}


def test_links_are_relative_so_that_a_run_folder_can_be_moved(tmp_path: Path) -> None:
    save(tmp_path / "a", 1, best=True)
    (tmp_path / "a").rename(tmp_path / "b")
    for link in ("last", "best"):
        assert read_checkpoint(tmp_path / "b" / link)["run"]["steps"] == 1


def test_the_newest_few_and_the_best_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2, best=True)
    save(tmp_path, 3, 4, 5, 6, keep=2)
    assert steps(tmp_path) == [2, 5, 6]
    assert read_checkpoint(tmp_path / "best")["run"]["steps"] == 2
    assert read_checkpoint(tmp_path / "last")["run"]["steps"] == 6
    save(tmp_path, 7, keep=2, best=True)
    assert steps(tmp_path) == [6, 7]
    assert sorted(tmp_path.glob("*.sha256")) == [tmp_path / f"step-0000000{n}.pt.sha256" for n in (6, 7)]


def test_the_newest_is_the_one_after_most_steps(tmp_path: Path) -> None:
    save(tmp_path, 9, 10, 99_999_999)
    assert newest(tmp_path) == (99_999_999, [])


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert newest(tmp_path) == (None, [])
    assert newest(tmp_path / "not there") == (None, [])


def test_a_damaged_newest_is_named_and_the_one_before_is_used(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    damage(tmp_path / "step-00000003.pt")
    found, said = newest(tmp_path)
    assert found == 2
    assert len(said) == 1
    assert "step-00000003.pt' is damaged" in said[0]
    with pytest.raises(CheckpointError, match="damaged"):
        read_checkpoint(tmp_path / "last")


@pytest.mark.parametrize("how", ["truncated", "empty", "no checksum", "wrong checksum", "binary checksum"])
def test_every_kind_of_damage_is_passed_over(tmp_path: Path, how: str) -> None:
    save(tmp_path, 1, 2)
    data, checksum = tmp_path / "step-00000002.pt", tmp_path / "step-00000002.pt.sha256"
    if how == "truncated":
        data.write_bytes(data.read_bytes()[:-1])
    elif how == "empty":
        data.write_bytes(b"")
    elif how == "no checksum":
        checksum.unlink()
    elif how == "wrong checksum":
        checksum.write_text("0" * 64)
    else:
        checksum.write_bytes(b"\xff" * 64)
    found, said = newest(tmp_path)
    assert found == 1
    assert len(said) == 1
    assert "step-00000002.pt" in said[0]


def test_when_none_is_whole_the_run_is_not_quietly_started_anew(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    for path in tmp_path.glob("step-*.pt"):
        damage(path)
    said: list[str] = []
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints") as caught:
        newest_whole(tmp_path, said.append)
    assert "\n" not in str(caught.value)
    assert len(said) == 2


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("victim", [".pt.sha256", ".pt"])
def test_a_kill_at_any_file_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str) -> None:
    """Killed while writing the checksum, or after it and before the data is in place."""
    save(tmp_path, 1)

    def kill_at(path: Path, content: bytes | str) -> None:
        if path.name.endswith(victim):
            (path.parent / f".{path.name}.123.part").write_bytes(b"half")
            raise Killed
        write_atomically(path, content)

    monkeypatch.setattr(checkpoint, "write_atomically", kill_at)
    with pytest.raises(Killed):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert newest(tmp_path) == (1, [])
    assert read_checkpoint(tmp_path / "last")["run"]["steps"] == 1
    # The next checkpoint clears away what was left.
    save(tmp_path, 3)
    assert newest(tmp_path) == (3, [])
    left = ["last", *(f"step-0000000{n}.pt{end}" for n in (1, 3) for end in ("", ".sha256"))]
    assert files(tmp_path) == sorted(left)


def test_a_kill_while_a_step_is_written_again_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, 2)

    def kill_at(path: Path, content: bytes | str) -> None:
        if path.name.endswith(".pt"):
            raise Killed
        write_atomically(path, content)

    monkeypatch.setattr(checkpoint, "write_atomically", kill_at)
    with pytest.raises(Killed):
        save_checkpoint(tmp_path, state(20), 2, 3)
    found, said = newest(tmp_path)
    assert found == 1
    assert len(said) == 1


def test_damaged_later_steps_do_not_push_out_the_whole_ones(tmp_path: Path) -> None:
    """A run resumed from step 1 because 20 and 30 are damaged must keep what it writes from then on."""
    save(tmp_path, 1, 20, 30)
    for number in (20, 30):
        damage(tmp_path / f"step-{number:08d}.pt")
    assert newest(tmp_path)[0] == 1
    for number in (2, 3, 4):
        save(tmp_path, number, keep=2)
        assert newest(tmp_path)[0] == number
        assert read_checkpoint(tmp_path / "last")["run"]["steps"] == number
    damage(tmp_path / "step-00000004.pt")
    assert newest(tmp_path)[0] == 3  # two whole copies, as was asked for


def test_another_format_is_one_line(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, {**state(1), "format": FORMAT + 1}, 1, 3)
    with pytest.raises(CheckpointError, match=f"has format {FORMAT + 1}, this version reads {FORMAT}") as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [[], [1], torch.zeros(3), "x", 1, None, {}, {"format": torch.zeros(2)}])
def test_content_of_another_kind_is_one_line(content: Any) -> None:
    out = io.BytesIO()
    torch.save(content, out)
    for data in (out.getvalue(), out.getvalue()[:-9], b""):
        with pytest.raises(CheckpointError) as caught:
            decode(data, "run")
        assert "\n" not in str(caught.value)


class Exploit:
    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.victim),))


def test_code_in_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    victim = tmp_path / "executed"
    path = tmp_path / "step-00000001.pt"
    torch.save({"format": FORMAT, "model": Exploit(victim)}, path)
    data = path.read_bytes()
    (tmp_path / "step-00000001.pt.sha256").write_text(hashlib.sha256(data).hexdigest())
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert not victim.exists()


MODEL = {"w": torch.zeros(3, 2), "b": torch.zeros(3)}


def test_the_same_model_fits() -> None:
    check_fits({"model": {name: value + 1 for name, value in MODEL.items()}}, MODEL, "here")


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ({"w": torch.zeros(3, 2)}, "for 'b' it has nothing, this model needs shape (3,)"),
        ({**MODEL, "c": torch.zeros(1)}, "for 'c' it has shape (1,), this model needs nothing"),
        ({**MODEL, "w": torch.zeros(4, 2)}, "for 'w' it has shape (4, 2), this model needs shape (3, 2)"),
        ({**MODEL, "b": torch.zeros(())}, "for 'b' it has shape (), this model needs shape (3,)"),
        ({}, "for 'w' it has nothing"),
    ],
)
def test_another_model_is_one_line(saved: dict[str, torch.Tensor], said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_fits({"model": saved}, MODEL, "run folder 'x'")
    assert str(caught.value).startswith("run folder 'x' holds another model")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_rank_that_comes_too_late_leaves_alone_what_is_newer(tmp_path: Path) -> None:
    """The main rank hung, another one wrote on; then the first one wakes up in the middle of its own writing."""
    save(tmp_path, 2, 4, 6)
    parts = [tmp_path / ".step-00000008.pt.0f.part", tmp_path / "step-00000008.pt.sha256"]
    for part in parts:  # the other one is at it
        part.touch()
    save(tmp_path, 3, best=True)
    assert all(part.exists() for part in parts)
    assert newest(tmp_path) == (6, [])
    assert os.readlink(tmp_path / "last") == "step-00000006.pt"
    assert not (tmp_path / "best").exists()


class _Disk:
    """Writes that wait until they are let through, and remember what they wrote."""

    def __init__(self) -> None:
        self.begun, self.may_go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.written: list[int] = []

    def write(self, step: int) -> None:
        self.begun.release()
        self.may_go_on.acquire()
        self.written.append(step)


def test_nobody_waits_for_a_slow_disk_and_a_newer_checkpoint_replaces_one_that_waits() -> None:
    disk = _Disk()
    with CheckpointWriter() as writer:
        writer.submit(lambda: disk.write(1), best=False)
        disk.begun.acquire()
        for step, best in ((2, False), (3, True), (4, False), (5, False)):
            writer.submit(partial(disk.write, step), best=best)
        assert disk.written == []  # and yet we got here
        for _ in range(3):
            disk.may_go_on.release()
        writer.flush()
        assert disk.written == [1, 3, 5]  # 2 and 4 were replaced; 3 is the best one so far
        writer.submit(lambda: disk.write(6), best=False)
        disk.may_go_on.release()
    assert disk.written == [1, 3, 5, 6]


def test_a_better_checkpoint_replaces_the_best_one_that_waits() -> None:
    disk = _Disk()
    with CheckpointWriter() as writer:
        writer.submit(lambda: disk.write(1), best=True)
        disk.begun.acquire()
        for step in (2, 3):
            writer.submit(partial(disk.write, step), best=True)
        disk.may_go_on.release()
        disk.may_go_on.release()
    assert disk.written == [1, 3]


def _full_disk() -> None:
    raise WriteError("no space")


def _fail_while_writing() -> None:
    with CheckpointWriter() as writer:
        writer.submit(_full_disk, best=False)
        raise KeyError


def test_what_went_wrong_in_the_background_is_raised_at_the_next_look() -> None:
    for look in (CheckpointWriter.flush, lambda writer: writer.submit(print, best=False)):
        writer = CheckpointWriter()
        writer.submit(_full_disk, best=False)
        wait([writer._pending[0][0]])
        for _ in range(2):  # it is not forgotten
            with pytest.raises(WriteError, match="no space"):
                writer.check()
        with pytest.raises(WriteError, match="no space"):
            look(writer)
    with pytest.raises(WriteError, match="no space"), CheckpointWriter() as writer:
        writer.submit(_full_disk, best=False)
    with pytest.raises(KeyError):  # what ends the run is the error to tell
        _fail_while_writing()


def test_a_rank_that_is_no_longer_the_main_one_drops_what_waits() -> None:
    disk = _Disk()
    with CheckpointWriter() as writer:
        writer.submit(lambda: disk.write(1), best=False)
        disk.begun.acquire()
        writer.submit(_full_disk, best=True)
        writer.forget()
        writer.flush()
        disk.may_go_on.release()
    assert disk.written == [1]
