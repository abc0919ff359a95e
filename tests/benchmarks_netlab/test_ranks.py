"""How ranks and torchrun agents are told who they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.netlab import Network, check_ranks, laboratory, unavailable_reason
from benchmarks.netlab.ranks import OWNER_VARIABLE, end_orphans, owner_tag, rank_environment

reason = unavailable_reason()
linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
SMOKE = Path(__file__).parents[2] / "benchmarks" / "netlab" / "smoke_allreduce.py"


@linux_only
def test_a_rank_is_told_what_torchrun_would_tell_it() -> None:
    network = Network(hosts=4, ranks_per_host=4, nic="rank")
    environment = rank_environment(network, 6, 29501)
    assert environment.pop(OWNER_VARIABLE) == owner_tag()
    assert environment == {
        "RANK": "6",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.77.0.1",
        "MASTER_PORT": "29501",
        "GLOO_SOCKET_IFNAME": "nic0",
        "NETLAB_ADDRESS": "10.77.1.3",
    }


@linux_only
def test_only_processes_of_a_dead_laboratory_are_orphans() -> None:
    pid_namespace, _, start = owner_tag().split(":")
    tags = {
        "of a live laboratory": owner_tag(),
        "of a dead one": f"{pid_namespace}:{2**22 + 1}:1",
        "of a dead one whose id is in use again": f"{pid_namespace}:{os.getpid()}:{int(start) - 1}",
        "of another pid namespace": f"1:{2**22 + 1}:1",
        "not a tag": "x",
    }
    sleepers = {
        name: subprocess.Popen(["sleep", "60"], env={**os.environ, OWNER_VARIABLE: tag}) for name, tag in tags.items()
    }
    try:
        ended = end_orphans()
        expected = {sleepers["of a dead one"].pid, sleepers["of a dead one whose id is in use again"].pid}
        assert {sleeper.pid for sleeper in sleepers.values()} & set(ended) == expected
    finally:
        for sleeper in sleepers.values():
            sleeper.kill()
            sleeper.wait(timeout=10)


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.skipif(reason is not None, reason=str(reason))
def test_real_torchrun_agents_find_each_other_and_workers_use_their_own_nic() -> None:
    network = Network(hosts=2, ranks_per_host=2, nic="rank", rate_mbit_per_second=200, latency_ms_one_way=1)
    with laboratory(network) as lab:
        argv = ["python", str(SMOKE), "--bytes", "2000004", "--repeats", "1"]
        completed = lab.run_torchrun(argv, timeout_seconds=100)
        sent = [nic.sent_bytes for nic in lab.nic_counters()]
    check_ranks(completed, argv)
    assert [agent.host for agent in completed] == [0, 1]
    assert '"bytes": 2000004' in completed[0].stdout
    # A flat ring of 0-1-2-3 leaves each host on one NIC only: either 1 -> 2 and 3 -> 0, or the other way round.
    assert min(max(sent[0], sent[1]), max(sent[2], sent[3])) > 2_500_000
    assert max(min(sent[0], sent[1]), min(sent[2], sent[3])) < 1_000_000
