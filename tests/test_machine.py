"""Only usable cores are counted; C helpers are built once, and where they cannot be built the reason is told."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from megabatch import machine as module
from megabatch.machine import build, processor_name, usable_cores


def test_only_cores_that_this_process_may_use_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3, 5, 7}, raising=False)
    assert usable_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cores() == 64
    assert (usable_cores(shared_by=10), usable_cores(shared_by=100)) == (6, 1)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1


def test_the_processor_has_a_name_on_any_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert processor_name()
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: Fast One @ 3 GHz\nmodel name\t: Other\n")
    real = open
    monkeypatch.setattr("builtins.open", lambda _path, **options: real(tmp_path / "cpuinfo", **options))
    assert processor_name() == "Fast One @ 3 GHz"
    (tmp_path / "cpuinfo").unlink()
    assert processor_name()


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGABATCH_DATA", str(tmp_path / "cache"))
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return 42; }\n")
    return path


def test_it_is_built_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(source)
    assert ctypes.CDLL(str(first)).answer() == 42
    with monkeypatch.context() as patch:
        patch.setattr(module, "_compile", lambda *_: pytest.fail("built again"))
        assert build(source) == first
    source.write_text("int answer(void) { return 43; }\n")
    assert ctypes.CDLL(str(build(source))).answer() == 43


def test_without_a_compiler_or_with_one_that_fails(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OSError, match="no C compiler"):
        build(source)
    (tmp_path / "cc").write_text("#!/bin/sh\necho 'no such header' >&2\nexit 1\n")
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(OSError, match=r"cc could not compile answer.c: no such header"):
        build(source)
    assert [p.name for p in (tmp_path / "cache" / "native").iterdir()] == ["lock"]


def test_switched_off(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGABATCH_NATIVE", "0")
    with pytest.raises(OSError, match="MEGABATCH_NATIVE is 0"):
        build(source)
