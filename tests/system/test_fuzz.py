"""Malformed files and words of every kind give one line and exit code 2: no traceback, no hang, no page of text.

A case is made by its number alone. `FUZZ_CASES=2000 FUZZ_FIRST=500 pytest tests/system/test_fuzz.py -k tar` runs a
campaign; a failure names its number, and `FUZZ_CASES=1 FUZZ_FIRST=<number>` repeats it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from megabatch.__main__ import main
from megabatch.comm.calibration import AxisCost, Calibration, MeasuredPoint, calibration_text
from megabatch.errors import LaunchError
from megabatch.use import verify
from megabatch.workers.local import check_count
from megabatch.workers.token import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from tests.data.conftest import idx_bytes, png_bytes, random_images
from tests.system.fuzz_words import KINDS, ONE_WORKER
from tests.system.malformed import Dice
from tests.system.runs import clean_environment, train_on_ranks

CASES = int(os.environ.get("FUZZ_CASES", "75"))
FIRST = int(os.environ.get("FUZZ_FIRST", "0"))
LIMIT_SECONDS = 60
LIMIT_BYTES = 6 * 2**30  # beyond what is in use: a table that asks for terabytes fails instead of filling the machine
LONGEST_LINE = 2000


class HangError(BaseException):
    """A command took longer than the limit."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whole file of every kind."""
    folder = tmp_path_factory.mktemp("good")
    made = random_images(1, [(12, 12)] * 6, 3)
    (folder / "image.png").write_bytes(png_bytes(made[0]))
    for split in ("train", "val"):
        for number, one in enumerate(made):
            place = folder / "folder" / split / f"class{number % 2}" / f"{number}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(png_bytes(one))
    for to in ("raw", "tar"):
        assert call("data", "pack", str(folder / "folder"), str(folder / to), "--to", to, "--jobs", "1")[0] == 0
    assert call("data", "verify", str(folder / "tar"))[0] == 0
    (folder / "idx").mkdir()
    grey = np.stack(made)[..., 0]
    for name in ("train", "t10k"):
        (folder / "idx" / f"{name}-images-idx3-ubyte").write_bytes(idx_bytes(grey))
        (folder / "idx" / f"{name}-labels-idx1-ubyte").write_bytes(idx_bytes(np.arange(6, dtype=np.uint8)))
    layers = [{"name": "conv1", "parameters": 176, "work": 0.4}, {"name": "fc", "parameters": 650, "work": 0.6}]
    rows = [{"local_batch": n, "seconds": n / 500, "deviation": 0.02, "iterations": 20} for n in (32, 64, 128)]
    step = {"megabatch_step_times": 1, "model": "resnet8", "device": "cpu", "threads": 1, "backward_share": 0.6}
    (folder / "step.json").write_text(json.dumps({**step, "layers": layers, "rows": rows}))
    axes = (AxisCost(0.001, 1e9, name="column", size=1), AxisCost(0.001, 1e9, name="row", size=2))
    points = (MeasuredPoint("torus", 2**20, 0.01), MeasuredPoint("ring", 2**20, 0.02))
    (folder / "links.json").write_text(calibration_text(Calibration("1x2", 1, "gloo", axes, points)))
    head = "round,org,system,division,accel,net,nodes,acc_per_node,N,gbs,local_b,img_s,step_ms,ttt_s,epochs,runs"
    lines = [f"2.0,A,x_mxnet,closed,CPU,x,{n},1,{n},{64 * n},64.0,{n * 500},{128 + n},1,35,5" for n in (1, 2, 4, 8)]
    (folder / "rows.csv").write_text("\n".join((head, *lines)) + "\n")
    lines = [f"{batch},{epochs},90.5" for batch, epochs in ((256, 5), (512, 5.5), (1024, 6), (2048, 8))]
    (folder / "study.csv").write_text("global_batch_size,epochs,top1\n" + "\n".join(lines) + "\n")
    words = ["--cluster", "this-machine", "--workers", "2", "--calibrate", str(folder / "step.json")]
    assert call("plan", "demo", *words, "--output", str(folder / "plan.json"))[0] == 0
    train_on_ranks(1, folder / "run", "train.epochs=1", "model.width=2")
    shutil.copy(folder / "plan.json", folder / "run" / "plan.json")
    return folder


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Time and memory of one command."""

    def too_long(number: int, frame: FrameType | None) -> None:
        raise HangError

    before = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    earlier = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(LIMIT_SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + LIMIT_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, earlier)


def call(*words: str) -> tuple[int, str, str]:
    """Run a command in this process: its exit code, what it said on stderr, and why that is no answer ("" if it is)."""
    if "RANK" in os.environ:  # a refused training leaves its threads to the end of its process
        done = subprocess.run(
            [sys.executable, "-m", "megabatch", *words],
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
        return done.returncode, done.stderr, _problem(done.returncode, done.stderr, words)
    out, err = io.StringIO(), io.StringIO()
    argv, sys.argv = sys.argv, ["megabatch", *words]
    try:
        with limits(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 99
    except HangError:
        return 99, "", f"hangs: {traceback.format_exc(limit=-4)[-700:]}"
    except BaseException:
        return 99, "", f"traceback: {traceback.format_exc(limit=-4)[-1200:]}"
    finally:
        sys.argv = argv
    return code, err.getvalue(), _problem(code, err.getvalue(), words)


def _problem(code: int, said: str, words: tuple[str, ...]) -> str:
    """Why the answer of a command is none; empty if it is one."""
    if code == 2 and (said.count("\n") != 1 or len(said.splitlines()) != 1 or not said.startswith("megabatch: ")):
        return f"not one line: {said[:700]!r}"
    if code == 2 and len(said) > LONGEST_LINE:
        return f"a line of {len(said)} characters: {said[:300]!r}"
    if code not in (0, 1, 2) or (code == 1 and words[:2] != ("data", "verify") and words[0] != "predict"):
        return f"exit code {code}: {said[-300:]!r}"
    return "" if "Traceback" not in said else f"traceback: {said[-700:]}"


def nobody_starts(count: int, work: Callable[..., object], *args: object, **options: object) -> int:
    """In place of the launchers: what they check first is checked."""
    check_count(count)
    if work is verify._recompute:
        raise LaunchError("workers are not started here")
    return 0


@pytest.mark.slow
@pytest.mark.timeout(60 + 30 * CASES)
@pytest.mark.parametrize("name", KINDS)
def test_malformed_input_is_one_line(name: str, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("train.entry.start_workers", "train.elastic_entry.start_elastic_workers", "use.verify.start_workers"):
        monkeypatch.setattr(f"megabatch.{place}", nobody_starts)
    monkeypatch.setattr("megabatch.workers.door._CONNECT_SECONDS", 0.1)
    for variable in os.environ.keys() - clean_environment().keys():
        monkeypatch.delenv(variable)
    monkeypatch.setenv("MEGABATCH_DATA", str(tmp_path / "cache"))
    failures, refused = [], 0
    for number in range(FIRST, FIRST + CASES):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        for variable in (*ONE_WORKER, TOKEN_VARIABLE, TOKEN_FILE_VARIABLE):
            os.environ.pop(variable, None)
        words = KINDS[name](Dice(f"{name} {number}"), folder, good)
        code, _, problem = call(*words)
        refused += code == 2
        if problem:
            shown = " ".join(word if len(word) < 80 else f"{word[:60]}... ({len(word)} characters)" for word in words)
            failures.append(f"{name} {number}: {shown}\n{problem}")
        monkeypatch.chdir(tmp_path)
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{name}: {CASES} cases, {refused} refused, {len(failures)} failures")
    assert not failures, f"{len(failures)} of {CASES}:\n\n" + "\n\n".join(failures[:20])
    assert refused >= CASES // 10, "the cases are not malformed"
