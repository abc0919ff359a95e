"""What holds for every test: one compute thread, no deadlines, and which tests share a process of pytest-xdist."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest
import torch

# Several processes on few cores make each other slow otherwise.
torch.set_num_threads(1)

# An example may take any time on a busy machine.
hypothesis.settings.register_profile("patient", suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")

TESTS = Path(__file__).parent

# Tests of one file that share a run, a browser or a network: set up once, in one process.
TOGETHER = (
    *("test_batch_control", "test_collapse", "test_precision", "test_report_page", "test_resume"),
    "test_worker_counts",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests that share something, and begin with those that take long: nobody waits for the last one then."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
        if folder == "benchmarks_netlab":
            item.add_marker(pytest.mark.xdist_group("network"))  # namespaces and shapers of one machine
        elif folder == "system" and item.path.stem in TOGETHER:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    if item.get_closest_marker("slow"):
        return 0
    return 1 if "system" in item.path.parts or "benchmarks_netlab" in item.path.parts else 2
