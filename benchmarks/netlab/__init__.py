"""A network of many hosts on one Linux machine: real torchrun, real Gloo, real TCP over emulated links."""

from __future__ import annotations

from .laboratory import Laboratory, NicCounters, laboratory, unavailable_reason
from .network import NETWORKS, Network, Station, named_network
from .ranks import CompletedRank, check_ranks

__all__ = [
    "NETWORKS",
    "CompletedRank",
    "Laboratory",
    "Network",
    "NicCounters",
    "Station",
    "check_ranks",
    "laboratory",
    "named_network",
    "unavailable_reason",
]
