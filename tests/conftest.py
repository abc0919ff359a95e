"""What holds for every test: one compute thread, no deadlines, and which tests share a process of pytest-xdist."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# Several processes on few cores make each other slow otherwise.
torch.set_num_threads(1)

# An example may take any time on a busy machine.
hypothesis.settings.register_profile("patient", suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")

# Files whose tests share a run that takes seconds, or a browser: set up once, in one process.
TOGETHER = (
    "accelerator/test_accelerator.py",
    *("system/test_batch_control.py", "system/test_collapse.py", "system/test_elastic.py", "system/test_fuzz.py"),
    *("system/test_precision.py", "system/test_report_page.py", "system/test_resume.py"),
    *("system/test_worker_counts.py", "use/test_verify.py", "comm/test_exact.py", "model/test_norm.py"),
)


def group_of(nodeid: str) -> str:
    """Tests with the same answer run in one process: a test alone, a file of `TOGETHER`, or the network's."""
    path = nodeid.partition("::")[0].removeprefix("tests/")
    if path.startswith("benchmarks_netlab/") or path == "benchmarks/test_tune_hosts.py":
        return "network"  # namespaces and shapers of one machine
    return path if path in TOGETHER else nodeid


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """What `--dist loadgroup` promises; pytest-xdist 3.8 does not see its own groups with pytest 9.2."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GroupScheduling:
    return GroupScheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with tests that take long: nobody waits for the last one then."""
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    if item.get_closest_marker("slow"):
        return 0
    return 1 if "system" in item.path.parts or "benchmarks_netlab" in item.path.parts else 2
