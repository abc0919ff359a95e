"""Whether the threads of a process group are gone when the interpreter goes down, and a DDP loop ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOOP = """
import atexit, os, sys
from pathlib import Path

def count_threads():  # runs last: exit handlers run in the opposite order
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    print("threads of gloo:", sum("gloo" in name for name in names), flush=True)

atexit.register(count_threads)
import torch, torch.distributed as dist
{line}

def main():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    dist.destroy_process_group()

main()
"""

# DDP is freed after its process group, while a thread of the group still lets go of what an all-reduce held. With torch
# alone (without the two lines in the middle and at the end) this hangs within the first rounds.
FREED_LAST = """
import torch, torch.distributed as dist
from megabatch.comm.interpreter_exit import end_threads, hold_default_group

def one_round():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    hold_default_group()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.randn(2, 4)).sum().backward()
    dist.all_reduce(torch.ones(2), async_op=True).wait()
    dist.destroy_process_group()
    del model
    end_threads()

for _ in range(30):
    one_round()
print("ended")
"""


def threads_left(line: str) -> int:
    source = LOOP.format(line=line)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout.rpartition(":")[2])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at threads in /proc")
def test_threads_of_a_group_end_before_the_interpreter() -> None:
    assert threads_left("pass") > 0  # torch alone leaves them: the test can see them
    assert threads_left("import megabatch; megabatch.NoiseScale; megabatch.gradient_hook") == 0


def test_ddp_may_be_freed_after_its_group() -> None:
    done = subprocess.run([sys.executable, "-c", FREED_LAST], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "ended\n"
