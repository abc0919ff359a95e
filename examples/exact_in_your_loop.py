"""A plain DDP loop whose result has the same bits on any number of ranks.

    torchrun --nproc-per-node 3 examples/exact_in_your_loop.py --algorithm torus

The lines of megabatch: `exact=True` at the hook, `bind`, the loop over `attempts`, and `add_ghost` after each backward
pass. The loop must keep its side: a ghost batch is the same images whichever rank takes it, its loss is a mean over
those images, and batch-norm statistics are added up by `GhostStatistics`.
"""

from __future__ import annotations

import argparse
import hashlib
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import megabatch

NUM_GHOSTS, GHOST_BATCH_SIZE = 7, 16  # per step; 7 is divisible by neither 2 nor 3


def ghost_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels of ghost batch `number` of the run, on any rank."""
    generator = torch.Generator().manual_seed(number)
    images = torch.randn(GHOST_BATCH_SIZE, 3, 16, 16, generator=generator)
    return images, torch.randint(0, 10, (GHOST_BATCH_SIZE,), generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="torus")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)  # bits depend on the number of threads: it must be the same everywhere
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = megabatch.build_model("resnet8", num_classes=10, in_channels=3, width=8)
    statistics = megabatch.GhostStatistics(model, momentum=0.1)
    ddp = DistributedDataParallel(model, broadcast_buffers=False)  # GhostStatistics adds the statistics up
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9, nesterov=True)

    grid = megabatch.ProcessGrid.build()
    state, hook = megabatch.gradient_hook(grid, options.algorithm, exact=True)
    ddp.register_comm_hook(state, hook)
    assert state.exact is not None  # made by exact=True
    exact = state.exact.bind(ddp.parameters())

    mine = range(rank, NUM_GHOSTS, world_size)  # any split will do
    for step in range(options.steps):
        for _ in exact.attempts(NUM_GHOSTS):  # once, or again when the sum did not fit
            statistics.forget_step()
            # A rank without a ghost batch makes one pass of weight zero, to stay in step with the others.
            for position, number in enumerate(mine or [0]):
                images, labels = ghost_batch(step * NUM_GHOSTS + number)
                last = position == max(1, len(mine)) - 1
                counted = statistics.ghost() if mine else statistics.untouched()
                with nullcontext() if last else ddp.no_sync(), counted:
                    loss = F.cross_entropy(ddp(images), labels)  # the mean over the ghost batch
                    (loss * (1.0 if mine else 0.0)).backward()
                exact.add_ghost()
        optimizer.step()
        statistics.after_step()
    statistics.publish()

    tensors = [value.contiguous().numpy().tobytes() for value in model.state_dict().values()]
    if rank == 0:
        print(f"{world_size} ranks, {options.algorithm}: SHA-256 {hashlib.sha256(b''.join(tensors)).hexdigest()}")
    dist.barrier()  # nobody leaves while another still listens
    state.close()
    grid.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
