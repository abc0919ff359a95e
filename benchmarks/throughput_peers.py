"""Training loops of others, as their users write them: the peers of `benchmarks.throughput`.

    torchrun --nproc-per-node 2 -m benchmarks.throughput_peers accelerate --output rows.jsonl [--set ...]

Network, images, their order, ghost batches, loss and optimizer are those of the recipe `demo` with the same `--set`;
the loop is torch's (`bare`), accelerate's or Lightning's. What costs time and is not asked for is off: no logger, no
progress bar, no checkpoint, no evaluation, no loader between the images in memory and the network. Gradients of ghost
batches are added up without communication, and DDP keeps them as views of its buckets. The loss of the first steps is
that of all ranks, to compare with the others; later that of the main rank.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.throughput import COMPARED_STEPS
from megabatch.config import Config
from megabatch.data.randomness import epoch_order
from megabatch.optim.groups import parameter_groups
from megabatch.recipes import load_config
from megabatch.train.components import build_network
from megabatch.train.feed import open_images


@dataclass
class Work:
    """What is the same for every loop, on one rank of so many."""

    config: Config
    rank: int
    world_size: int
    output: Path

    def __post_init__(self) -> None:
        source, _ = open_images(self.config)
        self.images = torch.from_numpy(source.images)  # type: ignore[attr-defined]
        self.labels = torch.from_numpy(source.labels)
        self.network = build_network(self.config, source.num_classes, source.channels, torch.device("cpu"))
        self.ghost_batch_size = self.config.train.ghost_batch_size
        self.images_per_rank = int(self.config.train.global_batch_size) // self.world_size
        self.ghosts = self.images_per_rank // self.ghost_batch_size
        self._steps = 0
        self._file = self.output.open("w") if self.rank == 0 else None

    def optimizer(self) -> torch.optim.Optimizer:
        settings = self.config.optimizer
        assert isinstance(settings.weight_decay, float)
        assert isinstance(settings.momentum, float)
        assert isinstance(settings.lr, float)
        groups = parameter_groups(self.network, weight_decay=settings.weight_decay)
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, nesterov=settings.nesterov)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's ghost batches without end, the first pass in the order of megabatch."""
        order = torch.from_numpy(epoch_order(self.config.train.seed, 0, len(self.labels)))
        mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (self.config.data.mean, self.config.data.std))
        step_images, start = self.images_per_rank * self.world_size, self.rank * self.images_per_rank
        while True:
            for first in range(0, len(order) - step_images + 1, step_images):
                for chosen in order[first + start : first + start + self.images_per_rank].split(self.ghost_batch_size):
                    images = self.images[chosen].permute(0, 3, 1, 2).float()  # channels last
                    yield images.div_(255).sub_(mean).div_(std), self.labels[chosen]

    def loss_of(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(images), labels, label_smoothing=self.config.train.label_smoothing)

    def note(self, loss: Tensor) -> None:
        """A step has ended. loss: the mean over this rank's images."""
        self._steps += 1
        if self._steps <= COMPARED_STEPS:
            dist.all_reduce(loss)
            loss /= self.world_size
        number = loss.item()
        if self._file is not None:
            print(json.dumps({"wall_seconds": time.perf_counter(), "loss": number}), file=self._file, flush=True)


def run_bare(work: Work) -> None:
    model, optimizer = DistributedDataParallel(work.network, gradient_as_bucket_view=True), work.optimizer()
    batches = work.batches()
    while True:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for ghost in range(work.ghosts):
            images, labels = next(batches)
            with model.no_sync() if ghost < work.ghosts - 1 else nullcontext():
                loss = work.loss_of(model, images, labels) / work.ghosts
                loss.backward()
            total += loss.detach()
        optimizer.step()
        work.note(total)


def run_accelerate(work: Work) -> None:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=work.ghosts, kwargs_handlers=[ddp])
    model, optimizer = accelerator.prepare(work.network, work.optimizer())
    total = torch.zeros(())
    for images, labels in work.batches():
        with accelerator.accumulate(model):
            loss = work.loss_of(model, images, labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        total += loss.detach() / work.ghosts
        if accelerator.sync_gradients:
            work.note(total)
            total = torch.zeros(())


def run_lightning(work: Work) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy

    class Training(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = work.network
            self.total = torch.zeros(())

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            loss = work.loss_of(self.network, *batch)
            self.total += loss.detach() / work.ghosts
            return loss

        def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
            if (batch_idx + 1) % work.ghosts == 0:
                work.note(self.total)
                self.total = torch.zeros(())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return work.optimizer()

    class Batches:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return work.batches()

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=work.world_size,
        strategy=DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True),
        max_epochs=-1,
        accumulate_grad_batches=work.ghosts,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Training(), Batches())


LOOPS = {"bare": run_bare, "accelerate": run_accelerate, "lightning": run_lightning}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loop", choices=LOOPS)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # advice of Lightning about loaders
    torch.set_num_threads(1)
    if options.loop == "bare":
        dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    LOOPS[options.loop](Work(load_config("demo", options.set), rank, world_size, options.output))


if __name__ == "__main__":
    main()
