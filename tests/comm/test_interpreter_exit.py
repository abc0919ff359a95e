"""Whether the threads of a process group are gone when the interpreter goes down."""

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


def threads_left(line: str) -> int:
    source = LOOP.format(line=line)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout.rpartition(":")[2])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at threads in /proc")
def test_threads_of_a_group_end_before_the_interpreter() -> None:
    assert threads_left("pass") > 0  # torch alone leaves them: the test can see them
    assert threads_left("import megabatch; megabatch.NoiseScale; megabatch.gradient_hook") == 0
