"""Images prepared per CPU second, against torch's DataLoader with Pillow and against other decoders, taking turns.

    python -m benchmarks.data_speed --photos FOLDER [--rounds 12] [--json]

Each round every contestant prepares all photographs once; a ratio is between a contestant and the reference of the
same round. CPU time of the whole process counts, all threads included. Contestants that are not installed are left
out and named.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import data_peers as peers
from megabatch.data.decode import Decoding
from megabatch.data.formats import open_source
from megabatch.data.native import native, why_not
from megabatch.data.pack import Packing, pack

# What must be reached, by contestant: against the reference.
AT_LEAST = {
    "ours, wheels alone (opencv)": 1.4,
    "ours, crop decoded": 1.9,
    "ours, after pack --resize 256": 2.5,
    "ours, raw pixels of 256": 8.0,
}
OURS, PEER_FACTOR = "ours, crop decoded", 1.1


def contestants(photographs: peers.Photographs, folder: Path) -> dict[str, Callable[[], int]]:
    found: dict[str, Callable[[], int]] = {"reference": peers.reference(photographs)}
    found["ours, wheels alone (opencv)"] = peers.ours(photographs, Decoding("opencv"))
    if native() is None:
        print(f"left out: crop decoding ({why_not()})")
    else:
        found[OURS] = peers.ours(photographs, Decoding())
    found["ours, Pillow only"] = peers.ours(photographs, Decoding("pillow"))
    pack(photographs, folder / "small", "train", Packing("tar", resize=256), 2)
    pack(photographs, folder / "pixels", "train", Packing("raw", resize=256), 2)
    small = open_source("tar", folder / "small", "train", memory_limit_bytes=0)
    found["ours, after pack --resize 256"] = peers.ours(small, Decoding())
    found["ours, raw pixels of 256"] = peers.ours(open_source("raw", folder / "pixels", "train"), Decoding())
    for name, decode in peers.other_decoders().items():
        found[name] = peers.decoder_and_opencv(photographs, decode)
    if (dali := peers.dali(photographs)) is not None:
        found["DALI on the CPU"] = dali
    return found


def measure(players: dict[str, Callable[[], int]], rounds: int) -> dict[str, list[float]]:
    """Images per CPU second, one value a round."""
    rates: dict[str, list[float]] = {name: [] for name in players}
    for number in range(rounds + 1):
        for name, play in players.items():
            began = time.process_time()
            count = play()
            seconds = time.process_time() - began
            if number:  # the first round is to warm up
                rates[name].append(count / seconds)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, required=True, help="folder of parquet files with full-size photographs")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    photographs = peers.read_photographs(options.photos)
    with tempfile.TemporaryDirectory() as folder:
        rates = measure(contestants(photographs, Path(folder)), options.rounds)
    rows: list[dict[str, Any]] = []
    for name, values in rates.items():
        ratios = sorted(rate / base for rate, base in zip(values, rates["reference"], strict=True))
        row: dict[str, Any] = {
            "name": name,
            "images_per_cpu_second": median(values),
            "ratio": median(ratios),
            "ratio_min": ratios[0],
            "ratio_max": ratios[-1],
            "rounds": len(values),
        }
        if OURS in rates and not name.startswith("ours") and name != "reference":
            row["ours_to_it"] = median(a / b for a, b in zip(rates[OURS], values, strict=True))
        rows.append(row)
    if options.json:
        print(json.dumps({"images": len(photographs), "rows": rows}))
        return
    print(f"{len(photographs)} photographs, {options.rounds} rounds; ratio to the reference: median [min - max]")
    for row in rows:
        needed = AT_LEAST.get(str(row["name"]))
        verdict = "" if needed is None else f"  needs {needed}: {'yes' if row['ratio'] >= needed else 'NO'}"
        if "ours_to_it" in row:
            verdict = f"  ours / it {row['ours_to_it']:.2f}, needs {PEER_FACTOR}"
        spread = f"{row['ratio']:.2f} [{row['ratio_min']:.2f} - {row['ratio_max']:.2f}]"
        print(f"{row['name']:32} {row['images_per_cpu_second']:7.0f}/s  {spread}{verdict}")


if __name__ == "__main__":
    main()
