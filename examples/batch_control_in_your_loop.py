"""A plain DDP loop in which megabatch decides the batch, keeps the noise scale, measures it, and finishes batch-norm.

    torchrun --nproc-per-node 2 examples/batch_control_in_your_loop.py --stages "0:64 0.5:160" --epochs 1

Random images, a small network: what matters is where the lines of megabatch stand. On any number of ranks the steps
are the same and hold the same images.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import megabatch

NUM_IMAGES, GHOST_BATCH, SEED = 500, 16, 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default="0:64 0.5:160")
    parser.add_argument("--epochs", type=float, default=1.0)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    images, labels = torch.randn(NUM_IMAGES, 3, 16, 16), torch.randint(0, 10, (NUM_IMAGES,))
    model = megabatch.build_model("resnet8", num_classes=10, in_channels=3, width=8)

    control = megabatch.BatchControl(
        options.stages,
        ghost_batch_size=GHOST_BATCH,
        samples_per_epoch=NUM_IMAGES,
        epochs=options.epochs,
        rank=rank,
        world_size=size,
        noise_rule="lr",
    )
    statistics = megabatch.GhostStatistics(model, momentum=0.1, variance="pooled")
    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    noise = megabatch.NoiseScale(ddp.parameters())
    ddp.register_comm_hook(None, noise.hook())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)

    for step in control:
        for group in optimizer.param_groups:
            group["lr"], group["momentum"] = step.keep_noise(0.05, 0.9)
        optimizer.zero_grad()
        noise.begin_step()
        loss_sum = torch.zeros(())
        # A rank for which this step has no ghost batch is idle: it makes one pass of weight zero, to stay in step.
        for positions in step.ghosts:
            _, samples = megabatch.sample_stream(SEED, NUM_IMAGES, positions.start, len(positions))
            synchronise = positions is step.ghosts[-1]
            with nullcontext() if synchronise else ddp.no_sync(), statistics.ghost(counts=not step.is_idle):
                loss = F.cross_entropy(ddp(images[samples]), labels[samples], reduction="sum")
                (loss * step.loss_weight).backward()
            noise.after_backward(len(positions), step.ghost_weight)
            loss_sum += loss.detach() * (not step.is_idle)
        scale = noise.end_step()
        optimizer.step()
        statistics.after_step()
        dist.all_reduce(loss_sum)
        if rank == 0:
            num_ghosts = 0 if step.is_idle else len(step.ghosts)
            words = "unknown" if scale is None else f"{scale:.0f} images"
            print(
                f"epoch {step.epoch:.3f}: {step.num_samples} images, {num_ghosts} ghosts here, "
                f"rate {optimizer.param_groups[0]['lr']:.3f}, loss {loss_sum.item() / step.num_samples:.5f}, "
                f"noise scale {words}",
                flush=True,
            )
    statistics.publish()  # the same batch-norm statistics on every rank: now evaluate and save
    dist.barrier()  # nobody leaves while another still listens
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
