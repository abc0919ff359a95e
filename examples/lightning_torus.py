"""Lightning with gradients over a 2D torus: one line, the callback.

    torchrun --nproc-per-node 4 examples/lightning_torus.py

`--plain` leaves the line out, to compare: the losses are the same up to rounding.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from megabatch.integrations.lightning import TorusCallback


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.network(images), labels)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            print(f"step {batch_idx}: loss {outputs['loss'].item():.6f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--bf16", action="store_true", help="gradients travel as bfloat16")
    options = parser.parse_args()
    grad_dtype = torch.bfloat16 if options.bf16 else None
    pl.seed_everything(0)
    images, labels = torch.randn(256, 3, 8, 8), torch.randint(0, 10, (256,))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[] if options.plain else [TorusCallback(grad_dtype=grad_dtype)],
    )
    trainer.fit(Classifier(), DataLoader(TensorDataset(images, labels), batch_size=16))


if __name__ == "__main__":
    main()
