"""The LARS step over ResNet-50's parameters, against torch's foreach SGD and against a loop over parameters.

    python -m benchmarks.lars_step [--rounds 15] [--threads 1,2] [--json]

Wanted: at most 1.5 times foreach SGD, at least 3 times as fast as the loop. `megabatch bench optimizer` prints the same
measurement for any network; this adds the verdict.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from megabatch.bench.optimizer import BASE, LOOP, bench_steps, result_lines

OURS = "megabatch LARS, paper"
MAX_OVER_SGD, MIN_UNDER_LOOP = 1.5, 3.0


def verdict(result: dict[str, Any]) -> dict[str, float]:
    """Medians of the ratios within rounds."""
    seconds = result["seconds"]
    pairs = zip(seconds[OURS], seconds[BASE], seconds[LOOP], strict=True)
    ratios = [(ours / base, loop / ours) for ours, base, loop in pairs]
    return {
        "over_foreach_sgd": statistics.median(one for one, _ in ratios),
        "under_loop": statistics.median(other for _, other in ratios),
        "bound_under_loop": statistics.median(
            loop / fused for loop, fused in zip(seconds[LOOP], seconds["torch SGD, fused"], strict=True)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for threads in map(int, options.threads.split(",")):
        result = bench_steps(options.model, options.rounds, threads)
        found = verdict(result)
        if options.json:
            print(json.dumps(result | found))
            continue
        print("\n".join(result_lines(result)))
        print(
            f"LARS step: {found['over_foreach_sgd']:.2f} times torch's foreach SGD (at most {MAX_OVER_SGD} wanted), "
            f"{found['under_loop']:.2f} times as fast as the loop (at least {MIN_UNDER_LOOP} wanted; torch's fused "
            f"SGD, which computes no norms, is {found['bound_under_loop']:.2f} times as fast as the loop)\n"
        )


if __name__ == "__main__":
    main()
