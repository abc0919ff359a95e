"""How throughput grows with workers, against the ideal line."""

from __future__ import annotations

from collections.abc import Sequence

from megabatch.report.figure import ALGORITHM_COLORS, Axis, Figure, Missing, Series
from megabatch.report.run import Run
from megabatch.report.units import percent_text

__all__ = ["efficiency"]


def efficiency(runs: Sequence[Run]) -> Figure | Missing:
    """Images per second and worker, relative to the smallest world, per all-reduce algorithm."""
    key, title = "efficiency", "Scaling efficiency"
    by_algorithm: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        column = run.metrics.columns.get("images_per_second")
        speed = column.quantile(0.5) if column else None
        if run.world_size and speed:
            by_algorithm.setdefault(run.algorithm, {}).setdefault(run.world_size, []).append(speed)
    counts = {workers for speeds in by_algorithm.values() for workers in speeds}
    if len(counts) < 2:
        return Missing(key, title, "it takes runs with different numbers of workers: megabatch report RUN RUN ...")
    base = min(counts)
    base_speeds = [speed for speeds in by_algorithm.values() for speed in speeds.get(base, [])]
    per_worker = sum(base_speeds) / len(base_speeds) / base
    series = []
    for algorithm in sorted(by_algorithm):
        workers = sorted(by_algorithm[algorithm])
        parts = {count: [speed / count / per_worker for speed in by_algorithm[algorithm][count]] for count in workers}
        series.append(
            Series(
                algorithm,
                f"algorithm:{algorithm}" if algorithm in ALGORITHM_COLORS else "other",
                tuple(float(count) for count in workers),
                tuple(sum(parts[count]) / len(parts[count]) for count in workers),
                low=tuple(min(parts[count]) for count in workers),
                high=tuple(max(parts[count]) for count in workers),
                n=tuple(len(parts[count]) for count in workers),
                mark="line" if len(workers) > 1 else "points",
            )
        )
    ends = (float(min(counts)), float(max(counts)))
    series.append(Series("ideal", "ideal", ends, (1.0, 1.0), tag="ideal", dashed=True))
    most = max(counts)
    at_most = [
        values[0]
        for one in series[:-1]
        for values in [[y for x, y in zip(one.x, one.y, strict=True) if x == most]]
        if values
    ]
    title = f"{percent_text(max(at_most))} scaling efficiency at {most:,} workers" if at_most else title
    caption = (
        f"Median images/s of a run per worker, over that of {base} worker{'s' if base > 1 else ''}; bars from "
        "the lowest to the highest of n runs. The ideal line is every worker as fast as in the smallest world."
    )
    y = Axis("efficiency [%]", percent=True, from_zero=True)
    return Figure(key, title, caption, Axis("workers", "log2"), y, tuple(series))
