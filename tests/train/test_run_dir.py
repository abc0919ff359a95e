"""The run folder: one run at a time, never another run's, refused with a reason."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from megabatch import files
from megabatch.config import Config
from megabatch.errors import CheckpointError, ConfigError
from megabatch.recipes import load_config
from megabatch.train import run_dir
from megabatch.train.run_dir import (
    Recorded,
    changes_on_resume,
    check_output,
    config_of_run,
    default_output,
    hold,
    recorded_run,
)

SETTINGS = (
    "train.seed=0",
    "train.epochs=5",
    "train.global_batch_size=1024",
    "train.ghost_batch_size=64",
    "comm.grad_dtype=fp32",
)


def config(*overrides: str) -> Config:
    return load_config("demo", [*SETTINGS, *overrides])


def refused(folder: Path, given: Config, resume: bool = False) -> str:
    with pytest.raises(CheckpointError) as caught:
        check_output(folder, given, resume)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with hold(tmp_path / "run", config(), resume=False):
        pass
    return tmp_path / "run"


def test_a_default_folder_is_new_and_named_for_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "20260102-030405")
    assert default_output("demo") == Path("runs/demo-20260102-030405")
    assert default_output("my.net.v2") == Path("runs/my.net.v2-20260102-030405")
    for expected in ("demo-20260102-030405", "demo-20260102-030405-2", "demo-20260102-030405-3"):
        assert default_output("demo") == Path("runs") / expected
        default_output("demo").mkdir(parents=True)


def test_holding_makes_the_folder_and_saves_the_settings(run: Path) -> None:
    assert config_of_run(run) == config()
    assert sorted(os.listdir(run)) == [".lock", "config.toml"]


def test_a_new_folder_and_an_empty_one_are_fine(tmp_path: Path) -> None:
    check_output(tmp_path / "new", config(), resume=False)
    check_output(tmp_path, config(), resume=False)
    (tmp_path / ".lock").touch()  # a run that ended before it wrote anything
    check_output(tmp_path, config(), resume=True)
    assert os.listdir(tmp_path) == [".lock"]  # looking makes nothing


def test_a_folder_with_a_run_needs_resume(run: Path) -> None:
    assert "--resume" in refused(run, config())
    check_output(run, config(), resume=True)


@pytest.mark.parametrize(
    "override",
    [
        "train.threads_per_worker=1",
        "train.digest_every_steps=7",
        "train.audit_every_steps=7",
        "checkpoint.keep=5",
        "comm.bucket_mb=1",
        "data.path=elsewhere",
        "data.loader_threads=2",
        "data.loader_processes=2",
        "reference.time=later",
    ],
)
def test_what_does_not_change_the_computation_may_change(run: Path, override: str) -> None:
    check_output(run, config(override), resume=True)
    check_output(run, config(override), resume=True, same_result=True)


@pytest.mark.parametrize("override", ["train.max_steps=3", "optimizer.lr=0.3"])
def test_what_may_change_on_resume_changes_the_result(run: Path, override: str) -> None:
    check_output(run, config(override), resume=True)
    with pytest.raises(CheckpointError, match=override.partition("=")[0]):
        check_output(run, config(override), resume=True, same_result=True)


def test_a_changed_rate_is_told(run: Path) -> None:
    assert changes_on_resume(run, config("optimizer.weight_decay=0.1"), {}) == []
    (said,) = changes_on_resume(run, config("optimizer.lr=0.3"), {})
    assert said.startswith("changed        optimizer.lr from here on: ")
    assert said.endswith("-> 0.3")
    assert changes_on_resume(run / "nothing", config(), {}) == []


def test_what_bits_depend_on_is_told_when_it_changes(run: Path) -> None:
    versions = {"torch": "2.12", "python": "3.11"}
    before = {"threads_per_worker": 1, "versions": versions, "arithmetic": {"onednn": True}, "workers": 2, "hosts": []}
    now = {**before, "threads_per_worker": 2, "versions": {**versions, "torch": "2.13", "python": "3.12"}, "workers": 4}
    assert changes_on_resume(run, config(), now) == []  # nothing is known of before
    (run / "environment.json").write_text(json.dumps(before))
    assert changes_on_resume(run, config(), before) == []
    (said,) = changes_on_resume(run, config(), now | {"arithmetic": {"onednn": True, "MKL_CBWR": "AVX2"}})
    assert said == (
        "changed        arithmetic.MKL_CBWR unset -> AVX2, threads_per_worker 1 -> 2, versions.torch 2.12 -> 2.13: "
        "the last bits may differ from here on"
    )
    (run / "environment.json").write_text('{"threads_per_worker": ')
    assert changes_on_resume(run, config(), now) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.seed=1"], ["train.seed is 0, given 1;"]),
        (
            ["train.epochs=6", "train.global_batch_size=2048"],
            ["train.epochs is 5.0, given 6.0 (and 1 more)"],
        ),
        (["optimizer.weight_decay=0.1"], ["optimizer.weight_decay"]),
        (["model.width=8"], ["model.width is None, given 8"]),
        (["data.source=generated"], ["data.source"]),
        (["norm.momentum=1"], ["norm.momentum"]),
        (["comm.grad_dtype=fp16"], ["comm.grad_dtype is 'fp32', given 'fp16'"]),
    ],
)
def test_another_run_is_refused_by_the_first_setting_that_differs(
    run: Path, overrides: list[str], words: list[str]
) -> None:
    before = (run / "config.toml").read_bytes()
    said = refused(run, config(*overrides), resume=True)
    for word in [*words, str(run), "--output"]:
        assert word in said
    assert (run / "config.toml").read_bytes() == before


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    file = tmp_path / "file"
    file.touch()
    for folder, resume in ((tmp_path, False), (tmp_path, True), (file, False)):
        assert "is not a run folder" in refused(folder, config(), resume)
    assert sorted(os.listdir(tmp_path)) == ["file", "thesis.tex"]


def test_a_folder_without_settings_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a run folder"):
        config_of_run(tmp_path)


@pytest.mark.parametrize("content", [b"[train\n", b"\xff\xfe", b"[train]\nepoch = 3\n", b""])
def test_damaged_settings_are_one_line_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.toml").write_bytes(content)
    with pytest.raises((CheckpointError, ConfigError), match=r"config\.toml") as caught:
        config_of_run(tmp_path)
    assert "\n" not in str(caught.value)


def test_an_old_summary_goes_when_the_run_goes_on_and_stays_when_it_is_refused(run: Path) -> None:
    (run / "summary.json").write_text("{}")
    with pytest.raises(CheckpointError), hold(run, config(), resume=False):
        pass
    assert (run / "summary.json").exists()
    with hold(run, config(), resume=True):
        assert not (run / "summary.json").exists()


def test_two_runs_cannot_hold_one_folder(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_dir, "LOCK_SECONDS", 0.2)
    with (
        hold(run, config(), resume=True),
        pytest.raises(CheckpointError, match="in use by a run that is still going"),
        hold(run, config(), resume=True),
    ):
        pytest.fail("two runs held the folder")
    with hold(run, config(), resume=True):
        pass  # the failed attempt left nothing locked


def test_a_run_that_is_just_ending_is_waited_for(run: Path) -> None:
    with hold(run, config(), resume=True):
        entered = threading.Event()
        thread = threading.Thread(target=_hold_and_tell, args=(run, entered))
        thread.start()
        time.sleep(0.3)
        assert not entered.is_set()
    thread.join(timeout=10)
    assert entered.is_set()


def _hold_and_tell(run: Path, entered: threading.Event) -> None:
    with hold(run, config(), resume=True):
        entered.set()


def test_a_folder_that_another_run_took_during_the_wait_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs are given one new folder; the first ends within the second's wait. Its settings must survive."""
    real = files.lock

    def lock_late(path: Path, seconds: float) -> AbstractContextManager[bool]:
        monkeypatch.setattr(run_dir, "lock", real)
        with hold(path.parent, config("train.seed=1"), resume=False):
            pass
        return real(path, seconds)

    monkeypatch.setattr(run_dir, "lock", lock_late)
    with pytest.raises(CheckpointError), hold(tmp_path / "run", config("train.seed=2"), resume=False):
        pass
    assert config_of_run(tmp_path / "run").train.seed == 1


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with (
        pytest.raises(CheckpointError, match="cannot be written: Not a directory"),
        hold(tmp_path / "file" / "run", config(), resume=False),
    ):
        pass
    monkeypatch.setattr(run_dir, "write_atomically", full)
    with (
        pytest.raises(CheckpointError, match="cannot be written: No space left"),
        hold(tmp_path / "run", config(), resume=False),
    ):
        pass


def test_an_error_of_the_run_itself_passes_through_and_releases_the_folder(run: Path) -> None:
    with pytest.raises(OSError, match="mine"), hold(run, config(), resume=True):
        raise OSError(5, "mine")
    with hold(run, config(), resume=True):
        pass


def test_a_run_remembers_its_local_workers_but_not_those_of_a_cluster(tmp_path: Path) -> None:
    assert recorded_run(tmp_path) is None
    (tmp_path / "config.toml").write_text("x = 1")
    recipe = str(tmp_path / "config.toml")
    assert recorded_run(tmp_path) == Recorded(tmp_path, recipe)
    for launcher, expected in (("megabatch", (4, "2x2")), ("srun", (None, None))):
        files.write_json(tmp_path / "environment.json", {"launcher": launcher, "workers": 4, "grid": [2, 2]})
        assert recorded_run(tmp_path) == Recorded(tmp_path, recipe, *expected)
    for damaged in ({"launcher": "megabatch", "workers": -1, "grid": [2, 2]}, {"launcher": "megabatch", "workers": 4}):
        files.write_json(tmp_path / "environment.json", damaged)
        assert recorded_run(tmp_path) == Recorded(tmp_path, recipe)
    (tmp_path / "environment.json").write_text("{")
    assert recorded_run(tmp_path) == Recorded(tmp_path, recipe)


def test_members_are_listed_in_the_order_in_which_they_were_made(tmp_path: Path) -> None:
    for member in (1, 2, 10):
        run_dir.write_member(tmp_path, member, b"weights")
        assert (tmp_path / run_dir.member_file(member)).read_bytes() == b"weights"
    assert [path.stem for path in run_dir.member_paths(tmp_path)] == ["member-1", "member-2", "member-10"]
    assert run_dir.member_paths(tmp_path / "nowhere") == []
