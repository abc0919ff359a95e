"""What measuring the noise scale costs: time per step of `megabatch train` with it over without.

    python -m benchmarks.noise_scale_cost [--rounds 12] [--block-seconds 3] [--workers 2] [--every 1]

Two runs of the demo's network on Fashion-MNIST, equal but for `batch_control.measure_every_steps`, are started once
and then take turns of a few seconds, as in `engine_overhead`. A round's ratio is between the medians of its two blocks,
next to each other in time. `--every 0` compares a run with its own twin and shows what ratio is noise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.engine_overhead import SETTINGS, start_engine, take_turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--block-seconds", type=float, default=3.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = (*SETTINGS, f"batch_control.measure_every_steps={options.every}")
        medians = take_turns(
            options.rounds,
            options.block_seconds,
            (
                lambda: start_engine(options.workers, Path(folder) / "with", measured),
                lambda: start_engine(options.workers, Path(folder) / "without"),
            ),
        )
    ratios = sorted(one / other for one, other in medians)
    result = {
        "ratio_median": statistics.median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
        "rounds": len(ratios),
        "seconds_per_step_with": statistics.median(one for one, _ in medians),
        "seconds_per_step_without": statistics.median(other for _, other in medians),
        "workers": options.workers,
        "every_steps": options.every,
    }
    if options.json:
        print(json.dumps(result))
        return
    for number, (one, other) in enumerate(medians, start=1):
        print(f"round {number:2}: with {one:.4f} s, without {other:.4f} s a step, ratio {one / other:.3f}")
    print(
        f"measured every {options.every} steps / not measured: median {result['ratio_median']:.3f} "
        f"[{ratios[0]:.3f} - {ratios[-1]:.3f}], n = {len(ratios)} rounds, {options.workers} workers"
    )


if __name__ == "__main__":
    main()
