"""Do faults change a run? Elastic runs of 4 workers under a seeded random schedule of faults.

    python -m benchmarks.chaos [--runs 20] [--faults 100] [--seed 1] [--quick]

Faults: kill -9 of any worker, of the main rank, of one inside an all-reduce, of the one that writes a checkpoint, of
two or of all at once; a worker stopped (SIGSTOP) for a moment; a worker, or the main rank, stopped for longer than
`comm.hang_seconds`; one more worker from a second command, and its death; a worker that leaves (SIGTERM); a stop of
the run and a resume; launcher and all workers killed, the newest checkpoint damaged, and a resume; a full disk (a small
file system of its own for root, else a limit on files of the main rank), and a resume.

Every second run trains with LARS, the others with SGD. Every third run is on two hosts of the network laboratory
(`benchmarks.netlab`, only for root), where the network of a host is cut for a moment, or for longer than
`comm.hang_seconds`. There are no second commands and no resumes there.

A run is good when it ends by itself, its weights have the SHA-256 of one undisturbed worker, the steps in
metrics.jsonl are 1 to N without gap or repetition, and no process or temporary file is left over. The seconds from a
kill to the next step finished by the others are measured on the way; a share of the machine's load is in them.

Results go to docs/results/chaos.json after each run; a run that is there is not made again (`--fresh` begins anew).
`--quick`: one short run, no file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.disturbed import (
    HANG_SECONDS,
    OPTIMIZERS,
    PATIENCE_SECONDS,
    STEPS,
    WORKERS,
    Disturbed,
    pid_of,
    undisturbed,
    weights_of,
)
from benchmarks.disturbed_hosts import HOSTS, NETWORK, DisturbedHosts
from benchmarks.netlab import laboratory, unavailable_reason

OUTPUT = Path(__file__).parents[1] / "docs" / "results" / "chaos.json"
# The kinds, and how often each comes. Those that end the run and resume it cost a start of all workers.
WEIGHTS = {
    "kill": 6,
    "kill the main rank": 6,
    "kill inside an all-reduce": 5,
    "kill while a checkpoint is written": 4,
    "kill two at once": 3,
    "kill every worker": 1,
    "pause": 3,
    "hang": 2,
    "hang the main rank": 2,
    "join": 3,
    "kill the one that joined": 2,
    "leave": 2,
    "stop and resume": 1,
    "kill all, damage the newest checkpoint, resume": 1,
    "full disk, resume": 2,
}
CUTS = {"cut a host off": 6, "cut a host off for a moment": 3}
WEIGHTS_ON_HOSTS = CUTS | {
    kind: weight
    for kind, weight in WEIGHTS.items()
    if not kind.endswith(("resume", "join", "joined")) and kind != "kill every worker"
}
KILLS = tuple(kind for kind in WEIGHTS if kind.startswith("kill") and "all," not in kind)


def disturb(run: Disturbed, kind: str, chance: random.Random) -> dict[str, Any] | None:
    """Do one thing to a run; what was done, None when the run ended before it could be."""
    begun: dict[str, Any] = {"kind": kind, "step": len(run.rows())}
    if kind in KILLS:
        return _kill(run, kind, chance, begun)
    if kind.startswith(("pause", "hang")):
        if not run.wait(lambda: len(run.members()) > 1):
            return None
        victim = chance.choice(run.members())
        if "main" in kind:
            victim = run.main_rank() or victim
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended, or have been replaced and killed
            victim.send_signal(signal.SIGSTOP)
            time.sleep(chance.uniform(0.1, 0.5) * HANG_SECONDS if kind == "pause" else 1.7 * HANG_SECONDS)
            victim.send_signal(signal.SIGCONT)
        return begun
    if kind == "leave":
        if not run.wait(lambda: len(run.members()) > 1):
            return None
        with contextlib.suppress(psutil.NoSuchProcess):
            chance.choice(run.members()).terminate()
        return begun
    if kind == "join":
        run.add_guest()
        return begun
    if kind in CUTS:
        assert isinstance(run, DisturbedHosts)
        host = chance.randint(1, HOSTS)
        run.lab.cut_host(host)
        time.sleep(chance.uniform(0.1, 0.5) * HANG_SECONDS if "moment" in kind else 2.0 * HANG_SECONDS)
        run.lab.join_host(host)
        return begun
    return _end_and_resume(run, kind, chance, begun)


def is_saving(folder: Path) -> bool:
    """Whether a part of a checkpoint lies there: it does so for about a millisecond."""
    return any(name.endswith(".part") for name in os.listdir(folder / "checkpoints"))


def _kill(run: Disturbed, kind: str, chance: random.Random, begun: dict[str, Any]) -> dict[str, Any] | None:
    if "every" in kind:  # nobody is left to note the loss; new workers go on from the checkpoint
        for victim in run.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        run.founders, run.noted = set(), len(run.changes())
        return begun
    num_victims = 2 if "two" in kind else 1
    if not run.wait(lambda: len(run.members()) > num_victims):
        return None
    members = run.members()
    victims = chance.sample(members, num_victims)
    held: psutil.Process | None = None
    if "joined" in kind:
        pids = {child.pid for guest in run.guests if guest.poll() is None for child in guest.children(recursive=True)}
        victims = [one for one in members if one.pid in pids] or victims
    if "main" in kind or "checkpoint" in kind:
        victims = [main] if (main := run.main_rank()) else victims
    if "checkpoint" in kind and not run.wait(lambda: is_saving(run.folder), pause=0.0002):
        return None
    if "all-reduce" in kind:  # nobody can end the sum while one of them is stopped
        held = chance.choice([one for one in members if one not in victims])
        with contextlib.suppress(psutil.NoSuchProcess):
            held.send_signal(signal.SIGSTOP)
        time.sleep(chance.uniform(0.2, 0.4))
    try:
        for victim in victims:
            victim.kill()
    except psutil.NoSuchProcess:
        return None
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            if held is not None:
                held.send_signal(signal.SIGCONT)
    began, known = time.monotonic(), len(run.changes())
    gone = {victim.pid for victim in victims}

    def step_of_loss() -> int | None:
        for change in run.changes()[known:]:
            gone.difference_update(map(pid_of, change["lost"]))
            if not gone:
                return int(change["step"])
        return None

    found: list[int] = []

    def went_on() -> bool:
        if not found and (step := step_of_loss()) is not None:
            found.append(step)
        return bool(found) and len(run.rows()) > found[0]

    if run.wait(went_on, 60.0):
        begun["seconds"] = time.monotonic() - began
    return begun


def _end_and_resume(run: Disturbed, kind: str, chance: random.Random, begun: dict[str, Any]) -> dict[str, Any] | None:
    """End all there is, harm what lies on the disk, and go on."""
    [launcher, *_] = [one for one in run.launchers if one.poll() is None] or [None]
    if launcher is None:
        return None
    main = run.main_rank()
    if run.has_small_disk and kind.startswith("full disk"):
        with run.full_disk(free_bytes=chance.choice((0, 4096, 65536))):
            run.wait(lambda: False)  # the run ends by itself
            begun["exit_code"] = launcher.poll()
    elif kind.startswith("full disk"):
        if main is None:
            return None
        hard = main.rlimit(resource.RLIMIT_FSIZE)[1]
        main.rlimit(resource.RLIMIT_FSIZE, (chance.choice((1, 4096, 16384)), hard))
    else:
        run.processes()
        for one in [launcher, *run.guests]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGTERM if kind.startswith("stop") else signal.SIGKILL)
    run.processes()
    if kind.startswith("full disk") and not run.has_small_disk:
        run.wait(lambda: main is None or not main.is_running())
        with contextlib.suppress(psutil.TimeoutExpired):
            launcher.wait(timeout=15)
        if launcher.poll() is None:  # the worker died of it, and others go on where the disk has room
            return begun
    with contextlib.suppress(psutil.TimeoutExpired):
        launcher.wait(timeout=PATIENCE_SECONDS)
    for guest in run.guests:
        if guest.poll() is None:
            guest.terminate()
            guest.wait(timeout=60)
    psutil.wait_procs(list(run.family), timeout=20)
    if (run.folder / "model.safetensors").exists():
        return None
    if "damage" in kind:
        newest = max((run.folder / "checkpoints").glob("step-*"), default=None, key=lambda path: path.stat().st_mtime)
        if newest is not None:
            content = bytearray(newest.read_bytes())
            content[len(content) // 2] ^= 0xFF
            newest.write_bytes(content[: chance.choice((len(content), len(content) // 3))])
    for path in run.temporary.glob("megabatch-*"):  # of a launcher that was killed itself
        subprocess.run(["rm", "-r", str(path)], check=True)
    run.launchers.remove(launcher)
    run.start(resume=True)
    return begun


def schedule(
    chance: random.Random, num_faults: int, steps: int, weights: dict[str, int]
) -> Iterator[tuple[int, float, str]]:
    """Which faults come at which steps, and how many seconds later; a run has at most one resume and one leave."""
    kinds = chance.choices(list(weights), list(weights.values()), k=num_faults)
    for word in ("resume", "leave"):
        for kind in [kind for kind in kinds if kind.endswith(word)][1:]:
            kinds[kinds.index(kind)] = "kill"
    between = steps * 0.8 / num_faults
    for number, kind in enumerate(kinds):
        yield int(5 + between * (number + chance.random())), chance.uniform(0.0, 0.2), kind


def make(
    scratch: Path,
    seed: str,
    faults: Iterable[tuple[int, float, str]],
    steps: int,
    wanted: str,
    *,
    optimizer: str = "sgd",
    on_hosts: bool = False,
) -> dict[str, Any]:
    """Make one run; what was done to it and what became of it. faults: as `schedule` says."""
    faults, settings = list(faults), OPTIMIZERS[optimizer]
    with contextlib.ExitStack() as stack:
        if on_hosts:
            run: Disturbed = DisturbedHosts(scratch, steps, settings, stack.enter_context(laboratory(NETWORK)))
        else:
            run = Disturbed(scratch, steps, settings)
        if os.geteuid() == 0 and any(kind.startswith("full disk") for _, _, kind in faults):
            stack.enter_context(run.on_small_disk())
        made = _make(run, random.Random(seed), faults, wanted)
    return {"optimizer": optimizer, "hosts": HOSTS if on_hosts else 1, **made}


def _make(
    run: Disturbed, chance: random.Random, faults: Iterable[tuple[int, float, str]], wanted: str
) -> dict[str, Any]:
    done, problem, began = [], "", time.monotonic()
    try:
        run.start()
        for step, delay, kind in faults:
            if not run.wait_for_step(step):
                break
            time.sleep(delay)
            if (fault := disturb(run, kind, chance)) is not None:
                done.append(fault)
        run.wait(lambda: False, 600.0)
    except TimeoutError as error:
        problem = f"{error}; "
        dump = run.temporary.parent / "stacks"
        for process in run.processes():
            subprocess.run(f"py-spy dump --pid {process.pid} >>{dump} 2>&1", shell=True, check=False)
    finally:  # whatever happens: launchers that nobody ends would go on
        left = run.end()
    problem += problem_of(run, left, wanted)
    return {"faults": done, "problem": problem, "seconds": time.monotonic() - began}


def problem_of(run: Disturbed, left: list[psutil.Process], wanted: str) -> str:
    """What is not as it must be."""
    found = []
    codes = [launcher.poll() for launcher in run.launchers]
    if any(codes):
        found.append(f"exit codes {codes}")
    if weights_of(run.folder) != wanted:
        found.append("other weights" if weights_of(run.folder) else "no model")
    try:
        steps = [json.loads(row)["step"] for row in run.rows()]
    except ValueError:
        steps = []
        found.append("a damaged row in metrics.jsonl")
    if steps != list(range(1, run.steps + 1)):
        found.append(f"rows of {len(steps)} steps, {len(set(steps))} different")
    if left:
        found.append(f"{len(left)} processes left over")
    files = [str(path) for path in (*run.folder.rglob("*.part"), *run.temporary.glob("megabatch-*"))]
    if files:
        found.append(f"left over {', '.join(files)}")
    return "; ".join(found)


def table(runs: dict[str, dict[str, Any]]) -> str:
    """The faults by kind, and how long it took to go on."""
    faults = [fault for run in runs.values() for fault in run["faults"]]
    lines = [f"{'fault':50} {'n':>4}  seconds to the next step: median (least to most)"]
    for kind, count in sorted(Counter(fault["kind"] for fault in faults).items(), key=lambda item: -item[1]):
        lines.append(
            f"{kind:50} {count:>4}  {spread([f['seconds'] for f in faults if f['kind'] == kind and 'seconds' in f])}"
        )
    lines.append(f"{'all':50} {len(faults):>4}  {spread([fault['seconds'] for fault in faults if 'seconds' in fault])}")
    of_kind = Counter((run["optimizer"], run["hosts"]) for run in runs.values())
    lines += [f"{count} runs with {name} on {hosts} host(s)" for (name, hosts), count in sorted(of_kind.items())]
    good = sum(not run["problem"] for run in runs.values())
    lines.append(f"{good} of {len(runs)} runs ended with the bits of the undisturbed one and left nothing over")
    lines += [f"  run {name}: {run['problem']}" for name, run in runs.items() if run["problem"]]
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    return (
        f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f}, n={len(values)})" if values else ""
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--faults", type=int, default=100, help="over all runs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--fresh", action="store_true", help="begin anew instead of going on with the file")
    parser.add_argument("--keep", type=Path, help="a folder where the runs stay, to look at")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    steps, num_runs, num_faults = options.steps, options.runs, options.faults
    if options.quick:
        num_runs, num_faults = 1, 5
    stored: dict[str, Any] = {"seed": options.seed, "steps": steps, "workers": WORKERS, "runs": {}}
    if OUTPUT.exists() and not (options.quick or options.fresh):
        before = json.loads(OUTPUT.read_text())
        stored = before if all(before[name] == stored[name] for name in ("seed", "steps", "workers")) else stored
    with tempfile.TemporaryDirectory() as temporary:
        scratch = options.keep or Path(temporary)
        wanted = {optimizer: undisturbed(scratch, steps, optimizer) for optimizer in OPTIMIZERS}
        for number in range(1, num_runs + 1):
            if str(number) in stored["runs"]:
                continue
            count = num_faults * number // num_runs - num_faults * (number - 1) // num_runs
            seed = f"{options.seed} {number}"
            on_hosts = number % 3 == 0 and not unavailable_reason()
            faults = schedule(random.Random(seed), count, steps, WEIGHTS_ON_HOSTS if on_hosts else WEIGHTS)
            optimizer = "lars" if number % 2 == 0 else "sgd"
            place = scratch / f"run-{number}"
            run = make(place, seed, faults, steps, wanted[optimizer], optimizer=optimizer, on_hosts=on_hosts)
            stored["runs"][str(number)] = run
            if not options.json:
                kinds = ", ".join(fault["kind"] for fault in run["faults"])
                where = f"{optimizer}, {run['hosts']} host(s)"
                print(
                    f"run {number}, {where}: {kinds}: {run['problem'] or 'equal'} ({run['seconds']:.0f} s)", flush=True
                )
            if not options.quick:
                OUTPUT.write_text(json.dumps(stored, indent=1) + "\n")
    print(json.dumps(stored) if options.json else table(stored["runs"]))
    sys.exit(1 if any(run["problem"] for run in stored["runs"].values()) else 0)


if __name__ == "__main__":
    main()
