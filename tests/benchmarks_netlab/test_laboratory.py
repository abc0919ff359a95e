"""A whole network on this machine: what ranks see, which way bytes go, and that nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.netlab import Laboratory, Network, check_ranks, laboratory, unavailable_reason
from benchmarks.netlab.namespaces import inside, processes_inside
from benchmarks.netlab.ranks import end_orphans
from benchmarks.netlab.traffic import round_trip_seconds, stream_rates
from megabatch.comm.grid import ProcessGrid
from megabatch.comm.hook import gradient_hook
from megabatch.errors import CommunicationError

reason = unavailable_reason()
if reason is None and not Path("/dev/net/tun").exists():
    reason = "no /dev/net/tun here"
pytestmark = [pytest.mark.root, pytest.mark.skipif(reason is not None, reason=str(reason))]

ROOT = Path(__file__).parents[2]
TWO_BY_TWO = Network(hosts=2, ranks_per_host=2, nic="rank", rate_mbit_per_second=200, latency_ms_one_way=5)


@pytest.fixture(scope="module")
def lab() -> Iterator[Laboratory]:
    with laboratory(TWO_BY_TWO, link="forwarder") as ready:
        yield ready


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_every_rank_finds_itself_on_its_host(lab: Laboratory) -> None:
    variables = "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR $GLOO_SOCKET_IFNAME"
    shaper = "tc qdisc show dev nic0 | cut -d ' ' -f 2,7,8"
    script = f'echo {variables} "$(cat /proc/sys/kernel/hostname)"; ip -4 -br address show nic0; {shaper}'
    completed = lab.run_ranks(["sh", "-c", script], {"EXTRA": "1"}, timeout_seconds=20)
    check_ranks(completed)
    assert [rank.stdout.split() for rank in completed] == [
        f"{rank} 4 {rank % 2} 2 {rank // 2} 10.77.0.1 nic0 10.77.{rank // 2}.1 "
        f"nic0 UNKNOWN 10.77.{rank // 2}.{rank % 2 + 1}/32 tbf rate 200Mbit".split()
        for rank in range(4)
    ]
    assert [rank.host for rank in completed] == [0, 0, 1, 1]


def test_latency_is_at_least_the_given_one_and_only_between_hosts(lab: Laboratory) -> None:
    assert min(round_trip_seconds(lab, 0, 2, count=5)) >= 0.0098  # 2 x 5 ms, each up to 0.1 ms early
    assert min(round_trip_seconds(lab, 0, 1, count=5)) < 0.005


def test_bytes_pass_the_nics_of_the_two_ranks_and_no_other(lab: Laboratory) -> None:
    kernel_before, forwarder_before = lab.nic_counters(), lab.links.health()["nics"]
    rate = stream_rates(lab, [(1, 3)], seconds=0.5)[0]
    time.sleep(0.5)  # what was queued when the stream closed
    nics = [now.since(then) for now, then in zip(lab.nic_counters(), kernel_before, strict=True)]
    assert rate <= 1.05 * 25e6 + 50_000 / 0.5  # never faster than the NIC and one burst
    assert nics[1].sent_bytes > 1_000_000
    assert nics[3].received_bytes > 1_000_000
    assert nics[0].sent_packets == nics[2].sent_packets == 0
    for counted, now, then in zip(nics, lab.links.health()["nics"], forwarder_before, strict=True):
        for name in ("sent_bytes", "sent_packets", "received_bytes", "received_packets"):
            assert now[name] - then[name] == getattr(counted, name)


def test_ranks_of_one_host_talk_past_the_nics(lab: Laboratory) -> None:
    before = lab.nic_counters()
    assert stream_rates(lab, [(0, 1)], seconds=0.2, warm_up_seconds=0.1)[0] > 0
    assert [now.since(then).sent_packets for now, then in zip(lab.nic_counters(), before, strict=True)] == [0] * 4


def test_a_slow_nic_is_slow_and_a_cut_host_is_silent() -> None:
    with laboratory(Network(2, 1, rate_mbit_per_second=0, latency_ms_one_way=1), link="forwarder") as lab:
        lab.limit_nic(0, 8)
        assert stream_rates(lab, [(0, 1)], seconds=0.5)[0] < 1.2e6
        lab.cut_host(1)
        with pytest.raises(CommunicationError, match=r"10\.77\.1\.1 did not answer"):
            round_trip_seconds(lab, 0, 1, count=1, timeout_seconds=0.5)
        lab.join_host(1)
        assert round_trip_seconds(lab, 0, 1, count=1)


def test_a_rank_that_hangs_is_ended_with_all_it_started(lab: Laboratory) -> None:
    script = "test $RANK = 3 || exit 0; setsid sleep 600 & exec sleep 600"
    completed = lab.run_ranks(["sh", "-c", script], timeout_seconds=1.0)
    assert [(rank.returncode, rank.timed_out) for rank in completed[:3]] == [(0, False)] * 3
    assert (completed[3].returncode, completed[3].timed_out) == (-signal.SIGKILL, True)
    assert processes_inside(lab.namespaces) == []
    with pytest.raises(CommunicationError, match="rank 3 on host 1 did not finish in time"):
        check_ranks(completed)


def test_a_failed_rank_is_named_with_the_end_of_its_stderr(lab: Laboratory) -> None:
    script = "test $RANK != 2 || { echo broken >&2; exit 3; }; sleep 600"
    start = time.monotonic()
    completed = lab.run_ranks(["sh", "-c", script], timeout_seconds=60, grace_seconds=0.1)
    assert time.monotonic() - start < 30
    with pytest.raises(CommunicationError, match=r"rank 2 on host 1 ended with 3.*ranks 0, 1, 3.*\nbroken"):
        check_ranks(completed)


def reduce_on_nic(rank: int, elements: int) -> tuple[float, str]:
    """Ranks 1 and 3, which are one column of the 2x2 grid, add their vectors; the others only take part in set-up."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    column = dist.new_group([1, 3])
    values = torch.full((elements,), float(rank))
    if rank in (1, 3):
        dist.all_reduce(values, group=column)
    dist.barrier()
    dist.destroy_process_group()
    return float(values.sum()) / elements, os.environ["NETLAB_ADDRESS"]


def test_gloo_sends_through_the_nic_of_the_rank(lab: Laboratory) -> None:
    before = lab.nic_counters()
    results = lab.fork_ranks(reduce_on_nic, 500_003, timeout_seconds=60)
    assert [value for value, _ in results] == [0.0, 4.0, 2.0, 4.0]
    assert [address for _, address in results] == [f"10.77.{rank // 2}.{rank % 2 + 1}" for rank in range(4)]
    sent = [now.since(then).sent_bytes for now, then in zip(lab.nic_counters(), before, strict=True)]
    assert min(sent[1], sent[3]) > 2_000_000  # a ring of two sends N bytes each
    assert max(sent[0], sent[2]) < 200_000  # the store and the set-up only


def train_until_it_breaks(rank: int, folder: Path) -> tuple[str, float]:
    """Average buckets over a 2x2 grid for ever; (the reason it ended, seconds since the last that was good)."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    grid = ProcessGrid.build(timeout_seconds=3)
    assert grid.shape.text == "2x2"
    assert grid.separate_links
    state, _ = gradient_hook(grid)
    last_good = time.monotonic()
    for step in range(100_000):
        try:
            futures = [state.reduce_buffer(torch.ones(numel), index) for index, numel in enumerate((1000, 200_000))]
            for future in futures:
                future.wait()
        except CommunicationError as error:
            return str(error), time.monotonic() - last_good
        last_good = time.monotonic()
        if step == 3:
            (folder / str(rank)).touch()
    return "nothing broke", 0.0


@pytest.mark.parametrize("host", [0, 1])
def test_a_host_cut_off_mid_run_ends_every_rank_with_a_reason(host: int, tmp_path: Path) -> None:
    """Packets just vanish: no connection is closed. Host 0 holds the job's key-value store, host 1 does not."""
    with laboratory(TWO_BY_TWO, link="forwarder") as lab:

        def cut_when_all_train() -> None:
            if eventually(lambda: len(list(tmp_path.iterdir())) == 4, seconds=60):
                lab.cut_host(host)

        cutter = threading.Thread(target=cut_when_all_train)
        cutter.start()
        answers = lab.fork_ranks(train_until_it_breaks, tmp_path, timeout_seconds=120)
        cutter.join()
    for rank, (reason, seconds) in enumerate(answers):
        assert re.match(rf"rank {rank}, bucket [01], (row|column) [a-z-]+: ", reason), reason
        assert "\n" not in reason
        assert seconds < 30, reason  # the timeout of 3 s, then at most 6 s to hear the others, on a busy machine
    # Ranks on the store's side hear each other and name those they cannot hear; the other side is on its own.
    for reason, _ in answers[:2]:
        assert "not heard from: ranks 2, 3;" in reason, answers


def fail_on_rank_one(rank: int) -> int:
    if rank == 1:
        raise ValueError("one is broken")
    return rank


def test_an_exception_in_a_forked_rank_comes_back_with_its_number(lab: Laboratory) -> None:
    with pytest.raises(CommunicationError, match=r"rank 1: Traceback(.|\n)*ValueError: one is broken"):
        lab.fork_ranks(fail_on_rank_one)


def test_an_exception_inside_leaves_nothing() -> None:
    with pytest.raises(ZeroDivisionError), laboratory(TWO_BY_TWO, link="forwarder") as lab:  # noqa: PT012
        with inside(lab.namespaces[0]):
            own = subprocess.Popen(["sleep", "600"])
        forwarder_pid = lab.links.forwarder.pid  # type: ignore[attr-defined]
        assert running(forwarder_pid)
        _ = 1 / 0
    assert own.wait(timeout=10) == -signal.SIGKILL
    assert not running(forwarder_pid)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_laboratory_that_is_killed_takes_everything_along(how: signal.Signals, tmp_path: Path) -> None:
    script = f"setsid sh -c 'echo $$ > {tmp_path}/grandchild; exec sleep 600' & echo $$ > {tmp_path}/$RANK; sleep 600"
    command = [sys.executable, "-m", "benchmarks.netlab", "--hosts", "2", "--ranks-per-host", "1"]
    with subprocess.Popen([*command, "--", "sh", "-c", script], cwd=ROOT, stderr=subprocess.DEVNULL) as owner:
        files = [tmp_path / "0", tmp_path / "1", tmp_path / "grandchild"]
        assert eventually(lambda: all(f.exists() and f.read_text().strip() for f in files), seconds=20)
        children = _children(owner.pid)
        owner.send_signal(how)
        assert owner.wait(timeout=20) == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(how, -signal.SIGKILL)
    ranks = [int(f.read_text()) for f in files[:2]]
    assert set(ranks) < set(children)  # the forwarder is the other one
    assert eventually(lambda: not any(map(running, children)))
    if how == signal.SIGKILL:
        assert int(files[2].read_text()) in end_orphans()  # nobody was left to end what a rank had started
    assert eventually(lambda: not running(int(files[2].read_text())))


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]
