"""A small cluster and a small workload that the tests of the planner share."""

from __future__ import annotations

import os

import pytest

from benchmarks.simulators.simgrid import find_simgrid
from megabatch.plan.cluster import Cluster
from megabatch.plan.cluster_file import read_cluster
from megabatch.plan.estimate import Estimator
from megabatch.plan.fit import StepFit
from megabatch.plan.step import StepModel
from megabatch.plan.workload import Layer, Workload, model_layers
from megabatch.schedule.batch import parse_stages

CLUSTER = """
name = "laboratory"
workers_per_node = 4
nodes_per_rack = 34
[link.worker]
gigabytes_per_second = 50
latency_microseconds = 1
[link.nic]
gigabytes_per_second = 12.5
count_per_node = 2
efficiency = 0.92
latency_microseconds = 1.5
[link.rack]
oversubscription = 3
latency_microseconds = 1
[software]
latency_microseconds = 0
[compute]
model = "resnet50"
milliseconds_by_local_batch = { "16" = 26.0, "32" = 49.9, "64" = 98.0 }
[straggler]
relative_deviation = 0.01
"""


def laboratory(**replaced: str) -> Cluster:
    """The platform of the stored SimGrid results; `replaced` swaps texts of its file, key by key."""
    text = CLUSTER
    for old, new in replaced.items():
        text = text.replace(TEXTS[old], new)
    return read_cluster(text, "laboratory")


TEXTS = {
    "software": "[software]\nlatency_microseconds = 0",
    "compute": 'milliseconds_by_local_batch = { "16" = 26.0, "32" = 49.9, "64" = 98.0 }',
    "straggler": "relative_deviation = 0.01",
    "workers_per_node": "workers_per_node = 4",
    "nic_rate": "gigabytes_per_second = 12.5",
}


def workload(batch: int | str = 32768, ghost: int = 32, epochs: float = 90.0) -> Workload:
    """ResNet-50 on ImageNet, half precision on the wire."""
    layers, work = model_layers("resnet50")
    return Workload("test", "resnet50", layers, parse_stages(batch), ghost, epochs, bytes_per_parameter=2, work=work)


def steps(cluster: Cluster, load: Workload, fit: StepFit | None = None) -> StepModel:
    """Steps of the workload on the cluster."""
    return Estimator(cluster, load, fit=fit).step


def two_layers() -> tuple[Layer, ...]:
    """One million parameters, most of the work in the first layer."""
    return (Layer("first", 250_000, 0.75), Layer("last", 750_000, 0.25))


def need_simgrid() -> None:
    """Without SimGrid the test is skipped, in CI it fails."""
    if find_simgrid() is None:
        message = "no SimGrid here; `make simgrid` installs it, or says how"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
