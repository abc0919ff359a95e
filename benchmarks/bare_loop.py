"""A plain DDP training loop, written by hand the way a careful PyTorch user writes it: the peer of engine_overhead.py.

Same network, same images, same batch, same ghost batches accumulated under `no_sync`, same augmentation (pad, random
crop, flip), same optimizer. No checkpoints, no evaluation, no logging but a line with the time.

    torchrun --nproc-per-node 2 -m benchmarks.bare_loop --steps 40 --output bare.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from megabatch.data.formats import open_source
from megabatch.model.registry import build_model


def augment(images: Tensor, padding: int) -> Tensor:
    """Random shift by up to `padding` and random flip, for [n, channels, height, width] uint8 images."""
    num, _, height, width = images.shape
    padded = F.pad(images, [padding] * 4)
    top = torch.randint(0, 2 * padding + 1, (num, 1, 1))
    left = torch.randint(0, 2 * padding + 1, (num, 1, 1))
    rows = top + torch.arange(height).view(1, -1, 1)
    columns = left + torch.arange(width).view(1, 1, -1)
    flipped = torch.where(torch.rand(num, 1, 1) < 0.5, columns.flip(2), columns)
    return padded[torch.arange(num).view(-1, 1, 1), :, rows, flipped].permute(0, 3, 1, 2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--global-batch-size", type=int, default=1024)
    parser.add_argument("--ghost-batch-size", type=int, default=64)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    source = open_source("fashion-mnist", None, "train")
    images = torch.from_numpy(source.images).permute(0, 3, 1, 2).contiguous()  # type: ignore[attr-defined]
    labels = torch.from_numpy(source.labels)
    network = build_model("resnet8", num_classes=10, in_channels=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = DistributedDataParallel(network, gradient_as_bucket_view=True)
    norms = {id(p) for m in network.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()}
    plain = [p for p in network.parameters() if id(p) not in norms]
    spared = [p for p in network.parameters() if id(p) in norms]
    optimizer = torch.optim.SGD(
        [{"params": plain, "weight_decay": 5e-4}, {"params": spared, "weight_decay": 0.0}],
        lr=0.1,
        momentum=0.9,
        nesterov=True,
    )
    per_rank = options.global_batch_size // size
    ghosts = per_rank // options.ghost_batch_size
    order = torch.randperm(len(labels))
    log = options.output.open("w") if rank == 0 else None
    for step in range(options.steps):
        start = (step * options.global_batch_size + rank * per_rank) % (len(labels) - options.global_batch_size)
        optimizer.zero_grad(set_to_none=True)
        for ghost in range(ghosts):
            chosen = order[start + ghost * options.ghost_batch_size : start + (ghost + 1) * options.ghost_batch_size]
            batch = augment(images[chosen], padding=2).float().div_(255).sub_(0.286).div_(0.353)
            batch = batch.contiguous(memory_format=torch.channels_last)
            with model.no_sync() if ghost < ghosts - 1 else nullcontext():
                loss = F.cross_entropy(model(batch), labels[chosen], label_smoothing=0.1) / ghosts
                loss.backward()
        optimizer.step()
        loss.item()
        if log is not None:
            print(json.dumps({"wall_seconds": time.perf_counter()}), file=log, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
