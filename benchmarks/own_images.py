"""A newcomer's folder of photos: trained beside a plain script, one photo classified, exported, and all of it compared.

    python -m benchmarks.own_images --work FOLDER                     train: `photos`, then plain torch + timm
    python -m benchmarks.own_images --work FOLDER --path              the newcomer's commands as typed, with seconds
    python -m benchmarks.own_images --work FOLDER --agree             predict against evaluate, a plain loop, and ONNX

The photos are Imagenette, unpacked from its tar shards into class folders below FOLDER. Everything is fixed beforehand
by options: 8 epochs of 4,736 images at 128 px are about 18 minutes for each training on two cores that train 18 images
a second each. The trainings run alone, one after the other, on two threads. The same command goes on with what is not
done; a training over its `--minutes` is stopped, and says so. `--path` takes the training of the first command if that
is done. Results are in FOLDER/result.json.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from megabatch.use.classifier import Classifier, fitted_images, image_files, load, predict

ROOT = Path(__file__).resolve().parents[1]
CLASSES = (  # by label
    *("tench", "english-springer", "cassette-player", "chain-saw", "church"),
    *("french-horn", "garbage-truck", "gas-pump", "golf-ball", "parachute"),
)


def unpack(tars: Path, folder: Path, per_class: int) -> Path:
    """Class folders of the shards' images; per_class: no more of each class, 0 for all."""
    if (folder / "whole").is_file():
        return folder
    for split in ("train", "val"):
        counts = dict.fromkeys(CLASSES, 0)
        for shard in sorted(tars.glob(f"imagenette224-{split}-*.tar")):
            with tarfile.open(shard) as opened:
                found: dict[str, dict[str, bytes]] = {}
                for member in opened:
                    key, _, kind = member.name.partition(".")
                    file = opened.extractfile(member)
                    if file is not None:
                        found.setdefault(key, {})[kind] = file.read()
            for key, parts in found.items():
                name = CLASSES[int(parts["cls"])]
                counts[name] += 1
                if not per_class or counts[name] <= per_class:
                    place = folder / split / name / f"{shard.stem[-4:]}-{key}.jpg"
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_bytes(parts["jpg"])
    (folder / "whole").touch()
    return folder


class Results:
    """What is known so far, in `result.json`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "result.json"
        self.table: dict[str, Any] = json.loads(self._path.read_text()) if self._path.is_file() else {}

    def put(self, name: str, value: Any) -> None:
        self.table[name] = value
        self._path.write_text(json.dumps(self.table, indent=1) + "\n")


def run_timed(words: list[str], minutes: float = 0.0) -> tuple[str, float, float, bool]:
    """What a command prints, its seconds and processor seconds, and whether it was stopped at its time."""
    used, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    stopped = False
    try:
        out, _ = process.communicate(timeout=60 * minutes or None)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.terminate()  # megabatch writes a checkpoint, the plain script has one of its last epoch
        out, _ = process.communicate()
        stopped = True
    if process.returncode and not stopped:
        raise SystemExit(f"{shlex.join(words)} ended with {process.returncode}")
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return out, time.perf_counter() - begin, spent, stopped


def typed(*words: str) -> list[str]:
    return [sys.executable, "-m", "megabatch", *words]


def train_command(options: argparse.Namespace, photos: Path) -> list[str]:
    """What a newcomer types to train."""
    run = options.work / "run"
    words = ["train", "photos", "--data", str(photos), "--epochs", str(options.epochs), "--output", str(run)]
    words += ["--set", f"data.image_size={options.size}"]
    return [*words, "--resume"] if (run / "config.toml").is_file() else words


def train_both(options: argparse.Namespace, photos: Path, results: Results) -> None:
    """Each training alone, until both are done or one is over its time."""
    plain = ["benchmarks.plain_photos", str(photos), str(options.work / "plain.pt")]
    plain += ["--size", str(options.size), "--epochs", str(options.epochs), "--threads", str(options.threads)]
    commands = {
        "photos": typed(*train_command(options, photos), "--set", f"train.threads_per_worker={options.threads}"),
        "plain": [sys.executable, "-m", *plain],
    }
    for name, words in commands.items():
        before = results.table.get(name, {"seconds": 0.0, "processor_seconds": 0.0, "parts": 0})
        if "top1" in before:
            continue
        out, seconds, processor, stopped = run_timed(words, options.minutes)
        found = {
            "epochs": options.epochs,
            "size": options.size,
            "seconds": before["seconds"] + seconds,
            "processor_seconds": before["processor_seconds"] + processor,
            "parts": before["parts"] + 1,
        }
        if not stopped:
            summary = json.loads(out) if name == "plain" else _summary(options.work / "run")
            found |= {key: summary[key] for key in ("top1", "training_seconds", "network", "val_images")}
        results.put(name, found)
        told = f"top-1 {found['top1']:.2%}" if "top1" in found else "STOPPED, the same command goes on"
        print(f"{name:<8} {told}, {found['seconds']:,.0f} s, {found['processor_seconds']:,.0f} processor seconds")


def _summary(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary | {"network": f"megabatch {summary['model']}"}


def walk_path(options: argparse.Namespace, photos: Path, results: Results) -> None:
    """Train, classify one photo, export, compare: the commands, their number and their seconds."""
    run, photo = options.work / "run", next((photos / "val").rglob("*.jpg"))
    rows = []
    trained = results.table.get("photos", {})
    commands = [train_command(options, photos), ["predict", str(run), str(photo)]]
    commands.append(["export", str(run), "--to", "onnx", "--images", str(photos / "val" / CLASSES[0])])
    for words in commands:
        if words[0] == "train" and "top1" in trained:
            out, seconds = "trained before", trained["seconds"]
        else:
            out, seconds, _, _ = run_timed(typed(*words))
        last = out.strip().splitlines()[-1] if words[0] != "train" else f"top-1 {_summary(run)['top1']:.2%}"
        shown = shlex.join(["megabatch", *(word for word in words if word != "--resume")])
        rows.append({"command": shown, "seconds": seconds, "last_line": last})
        print(f"{seconds:8.1f} s  {shown}\n            {last}")
    total = sum(row["seconds"] for row in rows)
    results.put("path", {"commands": rows, "num_commands": len(rows), "edited_files": 0, "seconds": total})
    print(f"{len(rows)} commands, no edited file, {total / 60:.1f} minutes")


def check_agreement(options: argparse.Namespace, photos: Path, results: Results) -> None:
    """`predict` against `evaluate` by their own words, against a plain loop, and ONNX, on every validation image."""
    import onnxruntime

    run, val = options.work / "run", photos / "val"
    torch.set_num_threads(options.threads)
    out, *_ = run_timed(typed("predict", str(run), str(val), "--json", "--top", "1"))
    told = {row["file"]: row["classes"][0] for row in map(json.loads, out.splitlines())}
    wrong = {file: one for file, one in told.items() if one["class"] != Path(file).parent.name}
    out, *_ = run_timed(typed("evaluate", str(run), "--json"))
    counted = json.loads(out)
    with open(run / "mistakes.csv", newline="", encoding="utf-8") as file:
        mistakes = {row["image"]: row for row in csv.DictReader(file)}
    same = wrong.keys() == mistakes.keys() and all(
        row["predicted"] == wrong[name]["class"] and abs(float(row["probability"]) - wrong[name]["probability"]) < 2e-6
        for name, row in mistakes.items()
    )
    same = same and len(told) == counted["num_images"]
    same = same and round(counted["top1"] * len(told)) == len(told) - len(wrong)
    print(f"predict and evaluate {'agree' if same else 'DIFFER'} on {len(told):,} images, {len(wrong):,} wrong by both")

    classifier, files = load(run), image_files([val])
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "predict": lambda: torch.stack([one.logits for one in predict(classifier, files) if one.logits is not None]),
        "plain loop": lambda: plain_loop(classifier, files),
    }
    logits: dict[str, torch.Tensor] = {}
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            begin = time.perf_counter()
            logits[name] = way()
            speeds[name].append(len(files) / (time.perf_counter() - begin))
    apart = float((logits["predict"] - logits["plain loop"]).abs().max())
    for name, values in speeds.items():
        spread = f"[{min(values):,.0f} - {max(values):,.0f}], n = {len(values)}"
        print(f"{name:<12} median {statistics.median(values):,.0f} images/s {spread}")
    print(f"logits of predict and the plain loop differ by {apart:.2g} at most")

    place = options.work / "model.onnx"
    run_timed(typed("export", str(run), "--to", "onnx", "--output", str(place)))
    session = onnxruntime.InferenceSession(str(place), providers=["CPUExecutionProvider"])
    theirs = [
        session.run(None, {"images": fitted_images(classifier, files[first : first + 100]).numpy()})[0]
        for first in range(0, len(files), 100)
    ]
    onnx_apart = float((torch.from_numpy(np.concatenate(theirs)) - logits["predict"]).abs().max())
    print(f"ONNX: logits differ by {onnx_apart:.2g} at most on {len(files):,} images")
    found = {"equal": same, "images": len(told), "wrong": len(wrong), "images_per_second": speeds}
    results.put("agree", found | {"plain_largest_difference": apart, "onnx_largest_difference": onnx_apart})


@torch.no_grad()
def plain_loop(classifier: Classifier, files: list[Path]) -> torch.Tensor:
    """What a person writes who knows the preprocessing: Pillow, numpy, the network."""
    card, size, logits = classifier.card, classifier.card.image_size, []
    mean, std = torch.tensor(card.mean), torch.tensor(card.std)
    for first in range(0, len(files), card.batch_size):
        batch = []
        for file in files[first : first + card.batch_size]:
            with Image.open(file) as opened:
                image = opened.convert("RGB")
            scale = round(size * 8 / 7) / min(image.size)
            width, height = round(image.width * scale), round(image.height * scale)
            left, top = (width - size) // 2, (height - size) // 2
            scaled = image.resize((width, height), Image.Resampling.BILINEAR)
            batch.append(np.asarray(scaled.crop((left, top, left + size, top + size))))
        pixels = (torch.from_numpy(np.stack(batch)).float() / 255 - mean) / std
        logits.append(classifier.network(pixels.permute(0, 3, 1, 2)))
    return torch.cat(logits)


def main() -> None:
    given = os.environ.get("MEGABATCH_TEST_DATA")
    shared = Path(given) if given else ROOT.parent / "shared" / "data"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="where photos, runs and results are kept")
    parser.add_argument("--tars", type=Path, default=shared / "imagenette224", help="folder of Imagenette's shards")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=25, help="of each training, then it is stopped")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--per-class", type=int, default=0, help="images of a class in each split; 0: all")
    parser.add_argument("--rounds", type=int, default=3, help="of speed in --agree")
    parser.add_argument("--path", action="store_true")
    parser.add_argument("--agree", action="store_true")
    options = parser.parse_args()
    options.work = options.work.absolute()
    options.work.mkdir(parents=True, exist_ok=True)
    photos, results = unpack(options.tars, options.work / "photos", options.per_class), Results(options.work)
    if options.path:
        walk_path(options, photos, results)
    if options.agree:
        check_agreement(options, photos, results)
    if not options.path and not options.agree:
        train_both(options, photos, results)


if __name__ == "__main__":
    main()
