"""A plain DDP training loop with three lines of megabatch in it: grid, hook, parameter groups.

    torchrun --nproc-per-node 4 examples/torus_in_your_loop.py --grid 2x2

Random images, a small network, a few steps: what matters is where the three lines stand.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import megabatch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", default=None, help="rows x columns; by default one row per host")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = megabatch.build_model("resnet8", num_classes=10, in_channels=3)
    ddp = DistributedDataParallel(model)

    grid = megabatch.ProcessGrid.build(options.grid)
    ddp.register_comm_hook(*megabatch.gradient_hook(grid, algorithm="torus"))
    groups = megabatch.parameter_groups(model)  # batch-norm and biases apart: they are not decayed

    for group in groups:
        group["weight_decay"] = 5e-4 * group["decay_factor"]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    torch.manual_seed(dist.get_rank())  # every worker its own images
    for step in range(options.steps):
        images, labels = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp(images), labels)
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f} on a grid of {grid.shape.text}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
