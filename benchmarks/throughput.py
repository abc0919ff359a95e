"""Images per second of whole training steps: `megabatch train` beside a bare DDP loop, accelerate and Lightning.

    python -m benchmarks.throughput [--repeats 6] [--rounds 4] [--block-seconds 3] [--workers 2] [--json FILE]

All train the network of the recipe `demo` on the same images in memory, in the same order, without augmentation, with
the same batch and ghost batches, one thread a rank; what the others do is in `throughput_peers`. Ours logs, measures
and shows its progress as always, and sums over its own all-reduce: once in floats, as the others do, once exactly, its
default. The losses of the first steps are compared: where they differ nothing is reported.

All contestants are started and then take turns of a few seconds: the others are stopped meanwhile (SIGSTOP), in an
order drawn anew. A ratio is between the medians of two blocks of one round. Two trainings may differ by some per cent
for as long as they live, so a repeat starts all of them anew. Printed are the median of all ratios, their 95 %
interval (by ranks of the repeats' medians where there are six repeats or more, else of the rounds), and n. `bare twin`
is the bare loop again: its ratio is noise, and no other is to be read finer than that.

Peers that are not installed are left out, and named.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.engine_overhead import Contestant, start_engine, start_torchrun, take_turns
from benchmarks.exact_cost import interval_of_median

OURS = {"megabatch, float sums": "float", "megabatch, exact sums": "exact"}
PEERS = {"bare": "bare", "bare twin": "bare", "accelerate": "accelerate", "lightning": "lightning"}
TARGETS = {"bare": 1.0, "accelerate": 1.1, "lightning": 1.1}
"""How many times the images per second of a peer ours is wanted to reach."""

SETTINGS = (
    *("train.epochs=100000", "train.evaluate_every_epochs=0", "checkpoint.every_epochs=0"),
    *("optimizer.lr=0.1", "train.threads_per_worker=1", "train.global_batch_size=1024"),
    *("data.augment.crop=none", "data.augment.flip=false"),
)
COMPARED_STEPS = 5
LOSS_TOLERANCE = 1e-3  # relative: rounding grows with the steps, another image would be seen at once
_ENOUGH = 6  # for an interval of 95 %

Rounds = Mapping[str, Sequence[float]]  # seconds a step in every round, by contestant


def installed(peers: Sequence[str]) -> tuple[list[str], list[str]]:
    """The peers that can take part, and those that are missing here."""
    there = [name for name in peers if PEERS[name] == "bare" or find_spec(PEERS[name]) is not None]
    return there, [name for name in peers if name not in there]


def run_repeat(
    folder: Path, workers: int, peers: Sequence[str], settings: Sequence[str], rounds: int, seconds: float, seed: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Start all, let them take turns: seconds a step by round, and the losses of the first steps, by contestant."""
    starts: dict[str, Callable[[], Contestant]] = {}
    logs: dict[str, Path] = {}
    for place, (name, sums) in enumerate(OURS.items()):
        run = folder / f"ours-{place}"
        starts[name], logs[name] = (
            partial(start_engine, workers, run, (*settings, f"comm.sums={sums}")),
            run / "metrics.jsonl",
        )
    words = [word for setting in settings for word in ("--set", setting)]
    for name in peers:
        logs[name] = folder / f"{name.replace(' ', '-')}.jsonl"
        starts[name] = partial(
            start_torchrun, workers, logs[name], ["benchmarks.throughput_peers", PEERS[name], *words]
        )
    medians = take_turns(rounds, seconds, list(starts.values()), seed)
    return dict(zip(starts, map(list, zip(*medians, strict=True)), strict=True)), {
        name: [float(json.loads(line)["loss"]) for line in log.read_bytes().split(b"\n")[:COMPARED_STEPS]]
        for name, log in logs.items()
    }


def largest_difference(losses: Mapping[str, Sequence[float]]) -> float:
    """Between the losses of any contestant and the first one's, relative, over all steps."""
    first = next(iter(losses.values()))
    return max(
        abs(other - wanted) / abs(wanted)
        for found in losses.values()
        for wanted, other in zip(first, found, strict=True)
    )


def compare(repeats: Sequence[Rounds], ours: str, peer: str) -> dict[str, Any]:
    """How many times the peer's images per second ours has: median, 95 % interval, least and most, n."""
    by_repeat = [[b / a for a, b in zip(rounds[ours], rounds[peer], strict=True)] for rounds in repeats]
    medians, every = [statistics.median(ratios) for ratios in by_repeat], [one for row in by_repeat for one in row]
    judged = medians if len(repeats) >= _ENOUGH else every
    return {
        "ours": ours,
        "peer": peer,
        "ratio": statistics.median(judged),
        "interval": list(interval_of_median(judged)),
        "interval_over": "repeats" if judged is medians else "rounds",
        "least": min(every),
        "most": max(every),
        "repeats": len(repeats),
        "rounds": len(by_repeat[0]),
        "enough": len(judged) >= _ENOUGH,
        "wanted": TARGETS.get(peer) if ours in OURS else None,
    }


def verdict(row: Mapping[str, Any]) -> str:
    """Whether the whole interval, a part of it, or nothing of it is where it was wanted."""
    low, high = row["interval"]
    if row["wanted"] is None:
        return "noise"
    if not row["enough"]:
        return "too few to say"
    return "reached" if low >= row["wanted"] else "not reached" if high < row["wanted"] else "undecided"


def lines_of(repeats: Sequence[Rounds], comparisons: Sequence[Mapping[str, Any]], batch: int) -> list[str]:
    lines = ["| contestant | ms a step, median [least-most] | images/s |", "| --- | --- | --- |"]
    for name in repeats[0]:
        seconds = [second for rounds in repeats for second in rounds[name]]
        middle = statistics.median(seconds)
        spread = f"{1e3 * middle:.1f} [{1e3 * min(seconds):.1f}-{1e3 * max(seconds):.1f}]"
        lines.append(f"| {name} | {spread} | {batch / middle:.0f} |")
    lines += ["", "| ours | over | images/s, ratio | 95 % interval | least-most | n | wanted | |"]
    lines.append(f"|{' --- |' * 8}")
    for row in comparisons:
        low, high = row["interval"]
        count = f"{row['repeats']} x {row['rounds']}"
        wanted = "-" if row["wanted"] is None else f">= {row['wanted']:g}"
        lines.append(
            f"| {row['ours']} | {row['peer']} | {row['ratio']:.3f} | {low:.3f}-{high:.3f} over {row['interval_over']} "
            f"| {row['least']:.3f}-{row['most']:.3f} | {count} | {wanted} | {verdict(row)} |"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=_ENOUGH, help="each with new processes")
    parser.add_argument("--rounds", type=int, default=4, help="in each repeat")
    parser.add_argument("--block-seconds", type=float, default=3.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--peers", default=",".join(PEERS), help="of " + ", ".join(PEERS))
    parser.add_argument("--set", action="append", default=[], help="a setting more, for everyone")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    options = parser.parse_args(argv)
    asked = options.peers.split(",")
    if unknown := [name for name in asked if name not in PEERS]:
        raise SystemExit(f"no peer is called '{unknown[0]}'; choose of {', '.join(PEERS)}")
    peers, missing = installed(asked)
    for name in missing:
        print(f"{name} is left out: it is not installed; pip install megabatch[{name}]", file=sys.stderr, flush=True)
    settings, repeats, worst = (*SETTINGS, *options.set), [], 0.0
    for number in range(options.repeats):
        with tempfile.TemporaryDirectory() as folder:
            rounds, losses = run_repeat(
                Path(folder), options.workers, peers, settings, options.rounds, options.block_seconds, number
            )
        worst = max(worst, largest_difference(losses))
        if not worst <= LOSS_TOLERANCE:
            raise SystemExit(f"they do not train the same, nothing is reported: {losses}")
        repeats.append(rounds)
        print(f"repeat {number + 1} of {options.repeats} done", file=sys.stderr, flush=True)
    pairs = [(ours, peer) for ours in OURS for peer in peers if peer != "bare twin"]
    pairs += [("bare twin", "bare")] * ({"bare", "bare twin"} <= set(peers))
    comparisons = [compare(repeats, ours, peer) for ours, peer in pairs]
    batch = next(int(one.partition("=")[2]) for one in reversed(settings) if one.startswith("train.global_batch_size="))
    print(
        f"{options.workers} ranks, {batch} images a step; losses of the first {COMPARED_STEPS} steps differ by "
        f"{worst:.1e} at most, relative"
    )
    print(*lines_of(repeats, comparisons, batch), sep="\n")
    if options.json:
        content = {
            "settings": list(settings),
            "workers": options.workers,
            "left_out": missing,
            "largest_loss_difference": worst,
            "comparisons": [{**row, "verdict": verdict(row)} for row in comparisons],
            "seconds_per_step": repeats,
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
