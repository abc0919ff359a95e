"""accelerate with gradients over a 2D torus: one line, after `prepare`.

    torchrun --nproc-per-node 4 examples/accelerate_torus.py

`--plain` leaves the line out, to compare: the losses are the same up to rounding.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from megabatch.integrations.accelerate import use_torus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--bf16", action="store_true", help="gradients travel as bfloat16")
    options = parser.parse_args()
    grad_dtype = torch.bfloat16 if options.bf16 else None
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    images, labels = torch.randn(256, 3, 8, 8), torch.randint(0, 10, (256,))
    network = nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5, momentum=0.9)
    loader = DataLoader(TensorDataset(images, labels), batch_size=16)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    if not options.plain:
        use_torus(accelerator, network, grad_dtype=grad_dtype)

    for step, (batch, wanted) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(network(batch), wanted)
        accelerator.backward(loss)
        optimizer.step()
        if accelerator.is_main_process:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
    # In this order: DDP that is freed after its process group hangs now and then, waiting for a thread of the group.
    network, optimizer, loader = accelerator.free_memory(network, optimizer, loader)
    accelerator.end_training()


if __name__ == "__main__":
    main()
