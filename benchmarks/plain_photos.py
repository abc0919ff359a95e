"""What a person writes without megabatch: ResNet-18 trained on class folders in plain torch, with timm if it is there.

    python -m benchmarks.plain_photos FOLDER STATE [--size 128] [--epochs 8] [--threads 2]

Pillow, a DataLoader, one batch-norm over the whole batch, SGD with warm-up and cosine; crops, rates and batch are those
of the recipe `photos`. STATE is written after every epoch; the same command goes on from it. The result is a line of
JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import megabatch
from benchmarks.import_timm import import_timm

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


class Photos(Dataset[tuple[Tensor, int]]):
    """Class folders; a random part, mirrored or not, or the centre for validation."""

    def __init__(self, folder: Path, size: int, training: bool) -> None:
        classes = sorted(path for path in folder.iterdir() if path.is_dir())
        self.files = [(file, label) for label, path in enumerate(classes) for file in sorted(path.iterdir())]
        self.num_classes, self.size, self.training = len(classes), size, training

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file, label = self.files[index]
        with Image.open(file) as opened:
            image = opened.convert("RGB")
        width, height = image.size
        if self.training:
            image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, self._part(width, height))
            if torch.rand(()) < 0.5:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        else:
            side = min(width, height) * 7 / 8
            left, top = (width - side) / 2, (height - side) / 2
            box = (left, top, left + side, top + side)
            image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box)
        pixels = torch.from_numpy(np.array(image)).float() / 255
        return ((pixels - MEAN) / STD).permute(2, 0, 1), label

    def _part(self, width: int, height: int) -> tuple[float, float, float, float]:
        for _ in range(10):
            share, stretch = torch.empty(2).uniform_(0, 1).tolist()
            area, aspect = width * height * (0.35 + 0.65 * share), (3 / 4) * (16 / 9) ** stretch
            box_width, box_height = math.sqrt(area * aspect), math.sqrt(area / aspect)
            if box_width <= width and box_height <= height:
                left, top = (torch.rand(2) * torch.tensor([width - box_width, height - box_height])).tolist()
                return left, top, left + box_width, top + box_height
        return 0.0, 0.0, float(width), float(height)


def make_network(num_classes: int) -> tuple[nn.Module, str]:
    """ResNet-18 and whose it is."""
    try:
        timm = import_timm()
    except Exception:  # missing, or broken beside this torch
        return megabatch.build_model("resnet18", num_classes=num_classes, in_channels=3), "megabatch (timm is missing)"
    network: nn.Module = timm.create_model("resnet18", num_classes=num_classes)
    return network, f"timm {timm.__version__}"


def train(folder: Path, state_file: Path, size: int, epochs: int, threads: int) -> dict[str, object]:
    """Top-1 on the validation images after so many epochs, with seconds of all parts of the run."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    training, validation = Photos(folder / "train", size, True), Photos(folder / "val", size, False)
    network, whose = make_network(training.num_classes)
    network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    batch = min(128, max(1, len(training) // 20))  # a twentieth of the images, as `photos` takes
    peak = 0.05 * batch / 128
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0, momentum=0.9, weight_decay=5e-4, nesterov=True)
    loader = DataLoader(training, batch_size=batch, shuffle=True, drop_last=True, num_workers=threads)
    total, warm_up = epochs * len(loader), max(1, epochs * len(loader) // 10)
    done, seconds = 0, 0.0
    if state_file.is_file():
        state = torch.load(state_file)
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        done, seconds = state["epochs"], state["seconds"]
    for epoch in range(done, epochs):
        begin = time.perf_counter()
        torch.manual_seed(epoch)
        for step, (images, labels) in enumerate(loader, start=epoch * len(loader)):
            share = (step - warm_up) / max(1, total - warm_up)
            falling = peak * 0.5 * (1 + math.cos(math.pi * max(0.0, share)))
            optimizer.param_groups[0]["lr"] = peak * (0.1 + 0.9 * step / warm_up) if step < warm_up else falling
            optimizer.zero_grad()
            F.cross_entropy(network(images), labels, label_smoothing=0.1).backward()
            optimizer.step()
        seconds += time.perf_counter() - begin
        state = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state | {"epochs": epoch + 1, "seconds": seconds}, state_file.with_suffix(".new"))
        state_file.with_suffix(".new").replace(state_file)
    network.eval()
    with torch.no_grad():
        batches = DataLoader(validation, batch_size=250, num_workers=threads)
        hits = sum(int((network(images).argmax(1) == labels).sum()) for images, labels in batches)
    return {
        "top1": hits / len(validation),
        "training_seconds": seconds,
        "network": whose,
        "val_images": len(validation),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("state", type=Path)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    print(json.dumps(train(options.folder, options.state, options.size, options.epochs, options.threads)))


if __name__ == "__main__":
    main()
