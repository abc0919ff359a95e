"""Where the priors of `megabatch.plan.fit` come from: they maximise the likelihood of rows of at most 64 workers.

    python -m benchmarks.plan_priors rows.csv [more.csv ...]

Families of one software stack with at least two different rows take part; rows that contain evaluation, other kinds
of training, systems without accelerators and larger ones do not. `jitter` is given (see --jitter): rows of at most 64
workers leave it open whether the slowest worker's delay shrinks with the local batch, and the likelihood printed for
several values shows that. Imports no torch.
"""

from __future__ import annotations

import argparse
import collections
from collections.abc import Mapping, Sequence

import numpy as np

from megabatch.plan.fit import PRIOR_PARTS, prior, row_features
from megabatch.plan.quantity import FORM
from megabatch.plan.rows import SystemRow, read_rows

__all__ = ["best_parts", "families_of", "log_likelihood"]

MOST_WORKERS = 64


def families_of(rows: Sequence[SystemRow]) -> list[list[SystemRow]]:
    """The rows by family and stack, where two of them differ in workers, nodes or batch."""
    found: dict[tuple[str, str], list[SystemRow]] = collections.defaultdict(list)
    for row in rows:
        usual = (
            not row.contains_evaluation and row.stack.endswith("closed") and row.accelerator not in ("n/a", "unknown")
        )
        if usual and row.world_size <= MOST_WORKERS:
            found[row.family, row.stack].append(row)
    return [
        family
        for family in found.values()
        if len({(row.world_size, row.num_nodes, row.local_batch) for row in family}) > 1
    ]


def log_likelihood(families: Sequence[Sequence[SystemRow]], parts: Mapping[str, float]) -> float:
    """Of all rows, each family with parameters of its own drawn from the prior; `parts["form"]` is the noise."""
    total = 0.0
    for family in families:
        mean, deviation = prior(family, parts)
        design = np.stack([row_features(row) for row in family])
        steps = np.array([row.step_seconds for row in family])
        covariance = (design * deviation**2) @ design.T + np.diag((parts["form"] * steps) ** 2)
        error = steps - design @ mean
        total -= 0.5 * float(np.linalg.slogdet(covariance)[1] + error @ np.linalg.solve(covariance, error))
    return total


def best_parts(families: Sequence[Sequence[SystemRow]], jitter: float) -> tuple[dict[str, float], float]:
    """The parts of the greatest likelihood, by a search along one after the other with ever smaller steps."""
    parts = {**PRIOR_PARTS, "form": FORM, "jitter": jitter}
    best = log_likelihood(families, parts)
    step = 0.5
    while step > 0.002:
        moved = False
        for name in ("fixed", "across", "scatter", "form"):
            for factor in (1 + step, 1 / (1 + step)):
                tried = {**parts, name: parts[name] * factor}
                value = log_likelihood(families, tried)
                if value > best + 1e-9:
                    parts, best, moved = tried, value, True
        step = step if moved else step / 2
    return parts, best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", metavar="ROWS.csv")
    parser.add_argument("--jitter", type=float, nargs="+", default=[0.001, 0.005, 0.01, 0.02], metavar="PART")
    options = parser.parse_args()
    families = [family for table in options.tables for family in families_of(read_rows(table)[0])]
    print(f"{len(families)} families, {sum(map(len, families))} rows of at most {MOST_WORKERS} workers")
    used = {**PRIOR_PARTS, "form": FORM}
    print(f"{'as used':<8} {_text(used)}  log-likelihood {log_likelihood(families, used):.2f}")
    for jitter in options.jitter:
        parts, value = best_parts(families, jitter)
        print(f"{'best':<8} {_text(parts)}  log-likelihood {value:.2f}")


def _text(parts: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {part:.2%}" for name, part in parts.items())


if __name__ == "__main__":
    main()
