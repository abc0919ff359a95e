"""Training loops of others that survive a killed worker, for the benchmarks of faults.

    torchrun ... -m benchmarks.peer_loops --torchrun FOLDER      a bare DDP loop, restarted from a saved state
    python -m benchmarks.peer_loops --torchft FOLDER             torchft's own manager; dead workers are started again

Both train the network of `benchmarks.disturbed` on random images, 10 per worker and step, and write a row with step and
images per step into FOLDER/metrics.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore

from benchmarks.disturbed import WORKERS
from megabatch.model.registry import build_model

IMAGES = 10  # per worker and step: 40 on four workers, as in `benchmarks.disturbed`
IMAGE_SIZE = 12
RESTART_SECONDS = 0.1  # how often the supervisor of torchft's workers looks
HEARTBEAT_TIMEOUT_MS = 700  # as megabatch's own lighthouse has it


def make_network() -> nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return build_model("resnet8", num_classes=10, in_channels=3, width=8)


def loss_of(model: nn.Module) -> torch.Tensor:
    images, labels = torch.randn(IMAGES, 3, IMAGE_SIZE, IMAGE_SIZE), torch.randint(10, (IMAGES,))
    return nn.functional.cross_entropy(model(images), labels)


def note(folder: Path, step: int, images: int) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "images": images}) + "\n")


def torchrun_loop(folder: Path) -> None:
    """A DDP loop as many write it: state saved after each step, loaded at the start."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    model = nn.parallel.DistributedDataParallel(make_network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    saved, step = folder / "state.pt", 0
    folder.mkdir(parents=True, exist_ok=True)
    if saved.exists():
        state = torch.load(saved)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while True:
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        step += 1
        if dist.get_rank() == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, folder / "part")
            os.replace(folder / "part", saved)
            note(folder, step, IMAGES * dist.get_world_size())


def torchft_loop(folder: Path, lighthouse: str) -> None:
    """One worker of torchft's own loop: its manager divides by whoever took part."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    network = make_network()
    inner = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, dict[str, object]]) -> None:
        network.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=3)),
        load_state_dict=load,
        state_dict=lambda: {"model": network.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=60),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"worker-{os.getpid()}-",
        hostname="127.0.0.1",
    )
    model = DistributedDataParallel(manager, network)
    optimizer = Optimizer(manager, inner)
    while True:
        before = manager.current_step()
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        if manager.current_step() > before and manager.participating_rank() == 0:
            note(folder, manager.current_step(), IMAGES * manager.num_participants())


def supervise_torchft(folder: Path) -> None:
    """Keep four workers of torchft's loop alive."""
    from torchft.coordination import LighthouseServer

    folder.mkdir(parents=True, exist_ok=True)
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100, heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS
    )
    address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
    words = [sys.executable, "-m", "benchmarks.peer_loops", "--torchft-worker", str(folder), "--lighthouse", address]
    workers = [subprocess.Popen(words) for _ in range(WORKERS)]
    while True:
        workers = [worker if worker.poll() is None else subprocess.Popen(words) for worker in workers]
        time.sleep(RESTART_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchrun", type=Path)
    parser.add_argument("--torchft", type=Path)
    parser.add_argument("--torchft-worker", type=Path)
    parser.add_argument("--lighthouse", default="")
    options = parser.parse_args()
    if options.torchrun:
        torchrun_loop(options.torchrun)
    elif options.torchft:
        supervise_torchft(options.torchft)
    elif options.torchft_worker:
        torchft_loop(options.torchft_worker, options.lighthouse)
    else:
        parser.error("give --torchrun FOLDER or --torchft FOLDER")


if __name__ == "__main__":
    main()
