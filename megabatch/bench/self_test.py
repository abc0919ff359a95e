"""`megabatch doctor --self-test`: does everything that training needs work here? To run first on new machines.

All ranks of the world, a launcher's or local ones, do the same list. Each check compares with something that does not
depend on what it checks: sums with sums made on one rank's CPU, a training with the same one on a CPU without others.
A rank is killed in processes of its own, so that no launcher ends the job. Without accelerators the list is the same,
on the CPU and Gloo.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megabatch.bench.doctor import Finding, examine_machine, examine_world, print_findings
from megabatch.bench.step import StepBenchRequest, measure_steps
from megabatch.comm.allreduce import AllReducer
from megabatch.comm.calibration import predictions
from megabatch.comm.grid import ProcessGrid
from megabatch.comm.measure import calibrate, gather, on_main_rank_of, probe_device
from megabatch.comm.phases import ALGORITHMS, num_channels, phases
from megabatch.config import Config
from megabatch.errors import ConfigError, MegabatchError, first_line
from megabatch.files import write_atomically
from megabatch.recipes import load_config
from megabatch.report.page import page_of, whole_file
from megabatch.report.run import METRICS_FILE
from megabatch.report.sections import html_table
from megabatch.train.entry import train
from megabatch.workers.local import run_as_worker, start_workers
from megabatch.workers.meeting import join
from megabatch.workers.world import World, choose_device, num_accelerators, read_world

_TIMEOUT_SECONDS = 600.0
_LOSS_TIMEOUT_SECONDS = 30.0  # of the two ranks of which one is killed
_NOTICED_SECONDS = 60.0
_LOCAL_WORKERS = 4  # without accelerators
_LENGTHS = (1, 1_009, 250_000)
_STEPS = 6
_LOSS_TOLERANCE = 0.02  # relative; another device rounds otherwise, TF32 most of all
_TRAINING = (
    *("data.source=generated", "data.path=", "data.generated.num_train=512", "data.generated.num_val=64"),
    *("train.ghost_batch_size=16", "train.global_batch_size=64", "train.evaluate_every_epochs=0"),
    *("train.digest_every_steps=0", "checkpoint.every_epochs=0"),
)
_NO_DEVICES = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}  # of any maker
_ALONE = "from megabatch.bench import self_test; self_test.train_alone({folder!r})"
_LOSE = "from megabatch.bench import self_test; self_test.lose_a_rank()"


@dataclass(frozen=True)
class SelfTestRequest:
    """What the user typed after `megabatch doctor --self-test`."""

    workers: int | None = None
    output: Path = Path("self_test.html")
    as_json: bool = False


def self_test(request: SelfTestRequest, environ: Mapping[str, str]) -> int:
    """Run all checks in a launcher's world or in local workers; returns the exit code: 1 where one is red."""
    request = replace(request, output=request.output.absolute())
    if request.output.is_dir() or not request.output.parent.is_dir():
        raise ConfigError(f"--output '{request.output}' is not a file in an existing folder; give one")
    world = read_world(environ, alone=True)
    if world is not None:
        return run_as_worker(lambda: _test_in(world, request), world, environ)
    with tempfile.TemporaryDirectory(prefix="megabatch-") as folder:  # a worker's exit code would look like a failure
        verdict = Path(folder) / "verdict"
        start_workers(request.workers or num_accelerators() or _LOCAL_WORKERS, _start_work, request, str(verdict))
        return 0 if verdict.read_text() == "good" else 1


def _start_work(request: SelfTestRequest, verdict: str) -> int:
    """What a local worker does."""
    world = read_world(os.environ)
    assert world is not None
    code = run_as_worker(lambda: _test_in(world, request), world, os.environ)
    if world.is_main:
        Path(verdict).write_text("bad" if code else "good")
    return 0


def _test_in(world: World, request: SelfTestRequest) -> int:
    device, backend = choose_device("auto", world)
    torch.set_num_threads(1)
    with (
        join(world, backend, _TIMEOUT_SECONDS, device),
        ProcessGrid.build(timeout_seconds=_TIMEOUT_SECONDS) as grid,
    ):
        findings = examine_machine(os.environ) + checks(grid)
    bad = [finding["name"] for finding in findings if finding["good"] is False]
    if world.is_main:
        write_atomically(request.output, page(findings, world.size, backend))
        print(json.dumps(findings)) if request.as_json else print_findings(findings)
        if not request.as_json:
            print(f"{len(bad)} bad; attach {request.output} to a report of a problem")
    return 1 if bad else 0


def checks(grid: ProcessGrid) -> list[Finding]:
    """Every check that needs the world; all ranks must call it. What cannot be done at all is bad, too."""
    folder = on_main_rank_of(grid, lambda: tempfile.mkdtemp(prefix="megabatch-self-test-"))
    try:
        findings = [_done("sum", partial(_sums, grid, name), f"{name}: ") for name in _algorithms(grid)]
        findings += [_done("integers", partial(_integers, grid, name), f"{name}: ") for name in _algorithms(grid)]
        findings += examine_world(grid)
        findings.append(_done("training", lambda: _training(grid, Path(folder))))
        findings.append(_done("waits", lambda: _waits(grid, Path(folder))))
        findings.append(_done("killed rank", lambda: _told_by_main(grid, _killed_rank)))
    finally:
        if grid.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return findings


def _done(name: str, check: Callable[[], tuple[bool | None, str]], of: str = "") -> Finding:
    try:
        good, text = check()
    except (MegabatchError, OSError, subprocess.SubprocessError) as error:
        good, text = False, first_line(error)
    return {"name": name, "good": good, "text": of + text}


def _algorithms(grid: ProcessGrid) -> list[str]:
    on_cpu = probe_device(grid).type == "cpu"
    return [name for name in ALGORITHMS if on_cpu or num_channels(phases(name, grid.shape)) == 1]


def _sums(grid: ProcessGrid, algorithm: str) -> tuple[bool, str]:
    """Sums of random floats against sums in float64, within what rounding can do."""
    worst = 0.0
    for numel in _LENGTHS:
        terms = torch.stack([_random(rank, numel) for rank in range(grid.world_size)])
        tensor = terms[grid.rank].to(probe_device(grid), copy=True)
        _reduce(grid, algorithm, tensor)
        bound = grid.world_size * torch.finfo(torch.float32).eps * terms.double().abs().sum(dim=0)
        off = (tensor.cpu().double() - terms.double().sum(dim=0)).abs() / bound
        worst = max(worst, float(off.nan_to_num(nan=torch.inf).max()))
    worst = max(value for (value,) in gather(grid, [worst]))
    return worst <= 1, f"off by at most {worst:.2g} of what rounding may do, {_numbers()} elements"


def _integers(grid: ProcessGrid, algorithm: str) -> tuple[bool, str]:
    """Gradients as integers, made and summed on the device, against those of the CPU: every bit."""
    wrong = 0
    for numel in _LENGTHS:
        terms = torch.stack([(_random(rank, numel) * 2**20).round().to(torch.int32) for rank in range(grid.world_size)])
        tensor = (_random(grid.rank, numel).to(probe_device(grid)) * 2**20).round().to(torch.int32)
        _reduce(grid, algorithm, tensor)
        wrong += int((tensor.cpu() != terms.sum(dim=0, dtype=torch.int32)).sum())
    wrong = int(sum(count for (count,) in gather(grid, [float(wrong)])))
    return wrong == 0, f"{wrong} integers differ from the CPU's, {_numbers()} elements"


def _reduce(grid: ProcessGrid, algorithm: str, tensor: torch.Tensor) -> None:
    reducer = AllReducer(grid, algorithm)
    try:
        reducer.run(tensor)
    finally:
        reducer.close()


def _random(rank: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank + 1))


def _numbers() -> str:
    return " / ".join(f"{numel:,}" for numel in _LENGTHS)


def _training(grid: ProcessGrid, folder: Path) -> tuple[bool, str]:
    """A short training in this world against the same one on a CPU alone."""
    planned = planned_seconds(grid)
    _train(folder / "world", _STEPS, "exact")

    def compare() -> tuple[bool, str]:
        _python(_ALONE.format(folder=str(folder / "alone")), _NO_DEVICES)
        here, alone = _rows(folder / "world"), _rows(folder / "alone")
        seconds = statistics.median(row["step_seconds"] for row in here[1:])
        took = f"a step takes {1e3 * seconds:.3g} ms (median of {len(here) - 1}), {seconds / planned:.2g} times "
        took += f"the {1e3 * planned:.3g} ms of passes and all-reduce one after the other, as the plan adds them up"
        if probe_device(grid).type == "cpu":
            same = here[-1]["weights_digest"] == alone[-1]["weights_digest"] and len(here) == _STEPS
            return same, f"{'the same bits' if same else 'other bits'} as one worker after {len(here)} steps; {took}"
        off = max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(here, alone, strict=True))
        return off <= _LOSS_TOLERANCE, f"losses of {len(here)} steps are off by at most {off:.2%} of the CPU's; {took}"

    good, text = _told_by_main(grid, compare)
    return bool(good), text


def planned_seconds(grid: ProcessGrid) -> float:
    """A step of the short training by what a plan starts from, measured here: passes, and an all-reduce behind them.

    Every rank must call it; the slowest rank's passes count.
    """
    config = _config(_STEPS, "float")
    ghost = config.train.ghost_batch_size
    num_ghosts = int(config.train.global_batch_size) // ghost
    measured = measure_steps(StepBenchRequest(config, (ghost,), iterations=5), probe_device(grid), dist.barrier)
    passes = max(seconds for (seconds,) in gather(grid, [measured["rows"][0]["seconds"]]))
    seconds = passes * math.ceil(num_ghosts / grid.world_size)
    if grid.world_size > 1:
        num_parameters = sum(layer["parameters"] for layer in measured["layers"])
        seconds += min(one.seconds for one in predictions(calibrate(grid), grid.shape, 4.0 * num_parameters))
    return seconds


def _waits(grid: ProcessGrid, folder: Path) -> tuple[bool | None, str]:
    """What more steps wait for, of what torch notes: what surrounds the steps drops out of the difference."""
    if probe_device(grid).type == "cpu":
        return None, "no accelerator: there is nothing to wait for"
    few = count_waits(lambda: _train(folder / "few", _STEPS, "float"))
    many = count_waits(lambda: _train(folder / "many", 2 * _STEPS, "float"))
    each = max(value for (value,) in gather(grid, [(many - few) / _STEPS]))
    return each < 0.5, f"{each:.2g} waits for the device in a step, besides the late read; none is right"


def count_waits(action: Callable[[], object]) -> int:
    """How often the host waits for a CUDA device meanwhile, as far as torch notes it."""
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            action()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(one.message) for one in noted)


def _train(folder: Path, num_steps: int, sums: str) -> None:
    with redirect_stdout(io.StringIO()):
        train(_config(num_steps, sums), output=folder)


def _config(num_steps: int, sums: str) -> Config:
    return load_config("demo", [*_TRAINING, f"train.max_steps={num_steps}", f"comm.sums={sums}"])


def train_alone(folder: str) -> None:
    """The short training in this process alone."""
    _train(Path(folder), _STEPS, "exact")


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()]


def _killed_rank() -> tuple[bool, str]:
    """One of two ranks is killed in the middle of its work: how soon does the other end, and what does it say?"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    meeting = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    devices = {} if num_accelerators() > 1 else _NO_DEVICES
    both = [_start(_LOSE, {**meeting, **devices, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
    survivor, victim = both
    with survivor, victim:  # to the end of both
        try:
            victim.wait(_TIMEOUT_SECONDS / 4)
            killed_at = time.monotonic()
            _, said = survivor.communicate(timeout=2 * _NOTICED_SECONDS)
        except subprocess.TimeoutExpired:
            return False, f"the other rank did not end within {2 * _NOTICED_SECONDS:g} s"
        finally:
            for process in both:
                process.kill()
    seconds, last = time.monotonic() - killed_at, (said.strip().splitlines() or ["nothing"])[-1]
    good = victim.returncode == -signal.SIGKILL and survivor.returncode != 0 and seconds <= _NOTICED_SECONDS
    ended = f"the other ended {seconds:.1f} s later with exit code {survivor.returncode}, saying: {last[:300]}"
    return good, f"on the CPU: {ended}" if devices else ended


def lose_a_rank() -> None:
    """Reduce without end, as one of two ranks; rank 1 is killed after a few rounds."""
    world = read_world(os.environ)
    assert world is not None
    sys.exit(run_as_worker(lambda: _reduce_until_killed(world), world, os.environ))


def _reduce_until_killed(world: World) -> int:
    device, backend = choose_device("auto", world)
    with (
        join(world, backend, _LOSS_TIMEOUT_SECONDS, device),
        ProcessGrid.build("1x2", timeout_seconds=_LOSS_TIMEOUT_SECONDS) as grid,
    ):
        tensor = torch.zeros(250_000, device=probe_device(grid))
        for count in itertools.count():
            if world.rank == 1 and count == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            _reduce(grid, "torus", tensor)
            tensor.cpu()  # waits for the device
    return 0


def _told_by_main(grid: ProcessGrid, check: Callable[[], tuple[bool | None, str]]) -> tuple[bool | None, str]:
    """What the check of the main rank found, on every rank."""
    found = json.loads(on_main_rank_of(grid, lambda: json.dumps(_done("", check))))
    return found["good"], found["text"]


def _start(code: str, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """A Python of its own, which finds no launcher in its environment but the one given."""
    launchers = ("MEGABATCH_LAUNCHED", "MEGABATCH_TOKEN", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith((*launchers, *names))}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**inherited, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _python(code: str, environment: Mapping[str, str]) -> None:
    with _start(code, environment) as process:
        try:
            _, said = process.communicate(timeout=_TIMEOUT_SECONDS / 2)
        finally:
            process.kill()
    if process.returncode:
        raise MegabatchError(f"a process of its own ended with {process.returncode}: {said.strip().splitlines()[-1:]}")


def page(findings: list[Finding], num_workers: int, backend: str) -> str:
    """The findings as a file to read and to send."""
    bad = sum(finding["good"] is False for finding in findings)
    title = f"{bad} of {len(findings)} checks are bad" if bad else "All checks are good"
    words = {True: "good", False: "bad", None: "-"}
    rows = [(finding["name"], words[finding["good"]], finding["text"]) for finding in findings]
    chips = {word: f'<td><span class="chip {word}">{word}</span></td>' for word in ("good", "bad")}
    table = html_table("Checks", ("check", "verdict", "found"), rows, numeric=False)
    for word, colored in chips.items():
        table = table.replace(f"<td>{word}</td>", colored)
    head = f'<h1 id="claim-title">{escape(title)}</h1><p class="soft">{num_workers} workers, {escape(backend)}</p>'
    parts = {"claim": head, "checks": f'<h2 id="checks-title">Checks</h2>{table}'}
    kind = "bad" if bad else "good"
    return whole_file(page_of(title, parts, []), "self-test", kind, kind, made_by="megabatch doctor --self-test")
