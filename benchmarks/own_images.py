"""The recipe `photos` on a folder of images, beside a plain PyTorch script with the same budget of epochs.

    python -m benchmarks.own_images --data FOLDER [--size 128] [--epochs 20]

FOLDER has `train/` and `val/` with class folders. The peer is what a person writes without megabatch: Pillow, a
DataLoader, one batch-norm over the whole batch, SGD with warm-up and cosine; the same network, crops, rates and batch.
Both run at the same time on one thread each, so that a busy machine slows both alike; processor seconds tell what each
took.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import megabatch
from megabatch.recipes import load_config

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


def train_plainly(folder: Path, size: int, epochs: float) -> float:
    """Top-1 on the validation images."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    train, val = Photos(folder / "train", size, True), Photos(folder / "val", size, False)
    network = megabatch.build_model("resnet18", num_classes=train.num_classes, in_channels=3)
    network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0, momentum=0.9, weight_decay=5e-4, nesterov=True)
    loader = DataLoader(train, batch_size=128, shuffle=True, drop_last=True)
    total, step, warm_up = round(epochs * len(loader)), 0, round(epochs * len(loader) / 10)
    while step < total:
        for images, labels in loader:
            share = (step - warm_up) / max(1, total - warm_up)
            falling = 0.05 * 0.5 * (1 + math.cos(math.pi * max(0.0, share)))
            optimizer.param_groups[0]["lr"] = 0.005 + 0.045 * step / warm_up if step < warm_up else falling
            optimizer.zero_grad()
            F.cross_entropy(network(images), labels, label_smoothing=0.1).backward()
            optimizer.step()
            step += 1
            if step >= total:
                break
    network.eval()
    with torch.no_grad():
        hits = sum(
            int((network(images).argmax(1) == labels).sum()) for images, labels in DataLoader(val, batch_size=250)
        )
    return hits / len(val)


def train_photos(folder: Path, size: int, epochs: float, output: Path) -> float:
    """Top-1 on the same images, by the command that a newcomer types."""
    words = [sys.executable, "-m", "megabatch", "train", "photos", "--data", str(folder), "--epochs", str(epochs)]
    words += ["--output", str(output), "--set", f"data.image_size={size}", "--set", "train.threads_per_worker=1"]
    words += ["--set", "data.loader_threads=1", "--set", "train.evaluate_every_epochs=0"]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    top1: float = json.loads((output / "summary.json").read_text())["top1"]
    return top1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--epochs", type=float, default=20)
    parser.add_argument("--only", choices=("photos", "plain"), help="one of both, in this process")
    options = parser.parse_args()
    load_config("photos", epochs=options.epochs)  # a mistake is told before anything is started
    if options.only:
        with tempfile.TemporaryDirectory() as scratch:
            if options.only == "photos":
                top1 = train_photos(options.data, options.size, options.epochs, Path(scratch) / "run")
            else:
                top1 = train_plainly(options.data, options.size, options.epochs)
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        print(json.dumps({"top1": top1, "processor_seconds": sum(one.ru_utime + one.ru_stime for one in used)}))
        return
    words = [sys.executable, "-m", "benchmarks.own_images", *sys.argv[1:], "--only"]
    started = {
        name: subprocess.Popen([*words, name], stdout=subprocess.PIPE, text=True) for name in ("photos", "plain")
    }
    for name, process in started.items():
        found = json.loads(process.communicate()[0])
        seconds = found["processor_seconds"]
        print(f"{name:<8} top-1 {found['top1']:.2%} after {options.epochs:g} epochs, {seconds:,.0f} processor seconds")


if __name__ == "__main__":
    main()
