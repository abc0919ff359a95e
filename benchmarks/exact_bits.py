"""Does a recipe give the same bits on any number of workers? SHA-256 of all that runs leave behind, side by side.

    python -m benchmarks.exact_bits [--steps 60] [--quick] [--json]

Trains `demo` (batch-norm, augmentation, label smoothing, momentum, its own rates) on 1 to 8 workers by every algorithm,
then variants of the recipe on fewer worlds: other optimizers, batches that grow, branches, other buckets, segments
and loaders, runs stopped and resumed on another number of workers. All runs of one recipe must leave the same
weights, optimizer, statistics, shifts, evaluation, losses, gradient norms and batch decisions. Two controls show that
a difference would be seen: sums in floats, and two threads per worker, whose bits must differ.

Results go to docs/results/exact_bits.json after each run. A run that is in the file is not made again; `--fresh`
begins anew. `--quick` takes few steps of a small network and writes no file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.small_run import SMALL_RUN
from megabatch.train.checkpoint import decode, read_whole

OUTPUT = Path(__file__).parents[1] / "docs" / "results" / "exact_bits.json"
WORLDS, ALGORITHMS = (1, 2, 3, 4, 5, 8), ("backend", "ring", "torus", "hierarchical", "auto")
LR = "optimizer.lr=[{{until_epoch=0.2, shape='linear', start={0}, end={1}}}, {{until_epoch=8, start={1}}}]"
RECIPES: dict[str, tuple[str, ...]] = {
    "demo": (),
    "LARS": ("optimizer.name=lars", "optimizer.lars.trust_coefficient=0.02", LR.format(0.2, 4.0)),
    "RMSprop warm-up": (
        *("optimizer.name=rmsprop_warmup", "optimizer.nesterov=false", LR.format(0.05, 0.4)),
        *("optimizer.rmsprop_warmup.center_epoch=0.25", "optimizer.rmsprop_warmup.period_epochs=0.25"),
    ),
    "batch stages": ("train.global_batch_size=0:192 0.1:512 0.3:704", "batch_control.noise_rule=lr"),
    "collapse branch": ("collapse.at_epochs=[0.15]", "collapse.epochs=0.15", "train.epochs=8"),
    "adaptive batch": (
        *("train.global_batch_size=256", "batch_control.adaptive.max_global_batch_size=1024"),
        *("batch_control.adaptive.threshold=0.02", "batch_control.adaptive.patience=4"),
        *("batch_control.adaptive.from_epoch=0", "batch_control.adaptive.lead_steps=4"),
    ),
    "pooled, exact statistics": ("norm.momentum=1", "norm.variance=pooled", "norm.exact_batches=16"),
    "bf16 passes": ("train.precision=bf16",),
}


@dataclass(frozen=True)
class Case:
    """One run: a recipe on a world, or on several in turn, each going on where the last has stopped."""

    recipe: str
    workers: tuple[int, ...]
    algorithm: str = "torus"
    grid: str = ""
    settings: tuple[str, ...] = ()
    segment_bytes: int = 0  # 0: the default; no setting of a recipe, so ranks are started another way
    buckets_in_flight: int = 0
    differs: str = ""  # a control: why its bits are not those of the others

    @property
    def name(self) -> str:
        words = [" then ".join(map(str, self.workers)), self.algorithm, self.grid, *self.settings]
        words += [f"segments of {self.segment_bytes} bytes"] * bool(self.segment_bytes)
        words += [f"{self.buckets_in_flight} buckets in flight"] * bool(self.buckets_in_flight)
        return f"{self.recipe}: " + ", ".join(word for word in words if word)


def cases(worlds: tuple[int, ...] = WORLDS, algorithms: tuple[str, ...] = ALGORITHMS) -> Iterator[Case]:
    """All of them; the first of each recipe is what the others are compared with. What tells most comes first."""
    yield Case("demo", (1,), "backend")
    yield from (Case("demo", (workers,)) for workers in worlds if workers > 1)
    others = ("halving_doubling", "two_way_torus", "direct", "exchange")
    yield from (Case("demo", (4,), algorithm) for algorithm in (*algorithms, *others) if algorithm != "torus")
    yield from (Case("demo", workers) for workers in ((2, 3), (4, 1), (1, 5), (3, 8, 2)))
    for recipe in list(RECIPES)[1:]:
        yield Case(recipe, (1,), "backend")
        yield from (Case(recipe, (workers,), algorithm) for workers, algorithm in ((2, "ring"), (3, "torus")))
        yield Case(recipe, (3, 2))
    yield from (Case("demo", (4,), grid=grid) for grid in ("1x4", "4x1"))
    yield from (Case("demo", (3,), settings=(f"comm.bucket_mb={size}",)) for size in (0.01, 0.1))
    yield from (
        Case("demo", (3,), "ring", segment_bytes=size, settings=("comm.bucket_mb=0.1",)) for size in (512, 65536)
    )
    yield from (Case("demo", (4,), buckets_in_flight=count, settings=("comm.bucket_mb=0.01",)) for count in (1, 2, 5))
    yield from (Case("demo", (2,), settings=(f"data.loader_processes={count}",)) for count in (1, 2))
    yield Case("demo", (2,), settings=("train.evaluation_batch_size=250", "data.loader_threads=3"))
    for workers in (1, 2, 3):
        settings = ("comm.sums=float",)
        yield Case("demo", (workers,), "ring", settings=settings, differs="sums in floats")
    yield Case("demo", (1,), "backend", settings=("train.threads_per_worker=2",), differs="two threads")
    for workers in worlds:
        if workers not in (1, 4):
            yield from (Case("demo", (workers,), algorithm) for algorithm in algorithms if algorithm != "torus")


def quick_cases() -> Iterator[Case]:
    yield Case("demo", (1,), "backend")
    yield from (Case("demo", (workers,), algorithm) for workers in (2, 3) for algorithm in ("ring", "torus"))
    yield Case("demo", (2, 3))
    yield Case("demo", (3,), "ring", segment_bytes=64, buckets_in_flight=1, settings=("comm.bucket_mb=0.001",))
    yield Case("demo", (2,), "ring", settings=("comm.sums=float",), differs="sums in floats")


def run(case: Case, steps: int, folder: Path, base: tuple[str, ...] = ()) -> dict[str, Any]:
    """Train, and say what the run has left behind."""
    common = [*base, *RECIPES[case.recipe], *case.settings, f"comm.algorithm={case.algorithm}", "log.to=[]"]
    common += ["checkpoint.every_epochs=0", "checkpoint.every_steps=25", "train.evaluate_every_epochs=0.25"]
    for part, workers in enumerate(case.workers, start=1):
        last_step = steps * part // len(case.workers)
        settings = [word for one in [*common, f"train.max_steps={last_step}"] for word in ("--set", one)]
        words = ["--output", str(folder), *settings, *(["--grid", case.grid] if case.grid else [])]
        words += ["--resume"] * (part > 1)
        if case.segment_bytes or case.buckets_in_flight:
            launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(workers), "-m"]
            hidden = [str(case.segment_bytes), str(case.buckets_in_flight)]
            command = [*launcher, "benchmarks.exact_bits", "--hidden", *hidden, "train", "demo", *words]
        else:
            command = ["megabatch", "train", "demo", "--workers", str(workers), *words]
        done = subprocess.run(
            [sys.executable, "-m", *command], capture_output=True, text=True, timeout=1800, check=False
        )
        if done.returncode:
            raise SystemExit(f"{case.name} failed:\n{done.stdout}{done.stderr}")
    return left_behind(folder)


def left_behind(folder: Path) -> dict[str, Any]:
    """What a finished run has computed, without times and without the world: digests, and a few numbers to read."""
    saved = decode(read_whole(folder / "checkpoints" / "last"), str(folder))
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # A run that stops evaluates what it leaves: one evaluation more, of the weights that all have at that step.
    state = {k: v for k, v in saved["run"].items() if not k.endswith("_seconds") and not k.startswith("best_")}
    columns = [k for k in rows[0] if not k.endswith(("_seconds", "_per_second")) and not k.startswith("val_")]
    results = {name: summary[name] for name in ("steps", "samples", "top1", "top5", "val_loss", "members")}
    members = [path.read_bytes() for path in sorted(folder.glob("members/*"))]
    return {
        "weights": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        "members": [hashlib.sha256(data).hexdigest() for data in members],
        **{
            name: digest(saved[name])
            for name in ("model", "optimizer", "statistics", "exact", "ema", "noise", "adaptive")
        },
        "state": digest(state),
        "rows": digest([{name: row[name] for name in columns} for row in rows]),
        "evaluations": {str(row["step"]): [row["val_top1"], row["val_loss"]] for row in rows if "val_top1" in row},
        "results": digest(results),
        "top1": summary["top1"],
        "val_loss": summary["val_loss"],
        "last_loss": rows[-1]["loss"],
        "last_gradient_norm": rows[-1]["gradient_norm"],
        "global_batch_sizes": sorted({row["global_batch_size"] for row in rows}),
        "repeated_steps": saved["exact"]["repeats"] if saved["exact"] else None,
    }


def digest(value: Any) -> str:
    """SHA-256 of plain values and tensors, nested as they like."""
    found = hashlib.sha256()

    def take(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.update(f"{value.dtype} {tuple(value.shape)} ".encode())
            found.update(value.detach().contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            found.update(f"dict {len(value)} ".encode())
            for key in value:
                take(key)
                take(value[key])
        elif isinstance(value, (list, tuple)):
            found.update(f"list {len(value)} ".encode())
            for item in value:
                take(item)
        else:
            found.update(f"{value!r} ".encode())

    take(value)
    return found.hexdigest()[:16]


def verdict(case: Case, found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Which parts differ from the reference of the recipe."""
    different = [name for name in wanted if found[name] != wanted[name] and name != "evaluations"]
    if any(found["evaluations"].get(step) != result for step, result in wanted["evaluations"].items()):
        different.append("evaluations")
    if case.differs:
        return f"differs, as it must ({case.differs})" if different else f"EQUAL although {case.differs}"
    return "DIFFERENT: " + ", ".join(different) if different else "equal"


def conditions(steps: int) -> dict[str, Any]:
    """What bits do depend on."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = models[0].split(":")[1].strip() if models else platform.processor()
    return {"steps": steps, "torch": torch.__version__, "processor": processor, "threads_per_worker": 1}


def text_of(stored: dict[str, Any]) -> str:
    """JSON with a line for each run."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(found)}" for name, found in stored["runs"].items())
    return f'{{"conditions": {json.dumps(stored["conditions"])}, "runs": {{\n{lines}\n}}}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=0, help="60, or 12 with --quick")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--fresh", action="store_true", help="begin anew instead of going on with the file")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    steps = options.steps or (12 if options.quick else 60)
    stored: dict[str, Any] = {"conditions": conditions(steps), "runs": {}}
    if OUTPUT.exists() and not (options.quick or options.fresh):
        before = json.loads(OUTPUT.read_text())
        stored = before if before["conditions"] == stored["conditions"] else stored
    wanted: dict[str, dict[str, Any]] = {}
    bad = 0
    for case in quick_cases() if options.quick else cases():
        if case.name not in stored["runs"]:
            with tempfile.TemporaryDirectory() as folder:
                stored["runs"][case.name] = run(case, steps, Path(folder) / "run", SMALL_RUN if options.quick else ())
            if not options.quick:
                OUTPUT.write_text(text_of(stored))
        found = stored["runs"][case.name]
        outcome = verdict(case, found, wanted.setdefault(case.recipe, found))
        bad += outcome.startswith(("DIFFERENT", "EQUAL"))
        if not options.json:
            print(f"{case.name:70} {found['weights'][:12]}  {outcome}", flush=True)
    if options.json:
        print(json.dumps({**stored, "unexpected": bad}))
    else:
        print(f"{len(stored['runs'])} runs of {steps} steps, {bad} with unexpected bits")
    sys.exit(1 if bad else 0)


def train_as_rank(segment_bytes: int, buckets_in_flight: int, words: list[str]) -> None:
    """`megabatch train` with what no recipe can say, as a rank under torchrun."""
    from megabatch.__main__ import main as megabatch
    from megabatch.comm.allreduce import AllReducer
    from megabatch.comm.hook import gradient_hook

    sys.argv = ["megabatch", *words]
    for function, name, value in (
        (AllReducer.__init__, "segment_bytes", segment_bytes),
        (gradient_hook, "buckets_in_flight", buckets_in_flight),
    ):
        assert function.__kwdefaults__ is not None
        assert name in function.__kwdefaults__
        if value:
            function.__kwdefaults__[name] = value
    megabatch()


if __name__ == "__main__":
    if "--hidden" in sys.argv:
        position = sys.argv.index("--hidden")
        train_as_rank(int(sys.argv[position + 1]), int(sys.argv[position + 2]), sys.argv[position + 3 :])
    else:
        main()
