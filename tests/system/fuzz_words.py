"""More kinds for the fuzz: the words of elastic runs, of `verify` and of `predict`, and what lies beside a run."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path

from tests.system.fuzz_kinds import KINDS, ONE_WORKER, kind
from tests.system.malformed import Dice

__all__ = ["KINDS", "ONE_WORKER"]

HUGE = ("99999999999", "1e300", "-1", "0", "9" * 30, "9" * 5000, "2.5", "", "x", "1025")
# Where nobody answers, and nothing can listen.
ADDRESSES = (
    *("127.0.0.1:99999", "127.0.0.1:-1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:1.5", "127.0.0.1:0", "127.0.0.1"),
    *("[::1]:5", "::1:5", ":5", ":", "", " ", "x", "256.1.1.1:5", "1.2.3:99999", "a b:5", "-x:5", "127.0.0.1:\u0661"),
    *("127.0.0.1:" + "9" * 5000, "127.0.0.1:" + "9" * 30, "a" * 5000 + ":99999", "a\nb:99999", "a\0b:5", "\ud800:5"),
)


def _token(dice: Dice, folder: Path, good: bytes = b"0123456789abcdef" * 2) -> None:
    match dice.randrange(6):
        case 0:
            pass
        case 1:
            os.environ["MEGABATCH_TOKEN"] = dice.choice(("", "short", "x" * 5000, "\udcff" * 40))
        case 2 | 3:
            dice.put(folder / "token", dice.choice((good, good, b"", b"\n" * 40, b"x" * 10_000)))
            os.environ["MEGABATCH_TOKEN_FILE"] = dice.choice(("token", "token", "nowhere", "n" * 5000, "", "."))
        case _:
            os.environ["MEGABATCH_TOKEN"] = good.decode()


if importlib.util.find_spec("torchft"):

    @kind
    def elastic(dice: Dice, folder: Path, good: Path) -> list[str]:
        _token(dice, folder)
        address, count = dice.choice(ADDRESSES), dice.choice(HUGE)
        train = ["train", "demo", *dice.choice(([], ["--output", "run"], ["--grid", dice.choice(("4x8", "0x1", "x"))]))]
        return dice.choice(
            (
                [*train, f"--elastic={address}"],
                [*train, f"--elastic={address}", "--output", "run", "--workers", dice.choice(("2", count))],
                [*train, "--elastic", "--workers", count],
                [*train, "--elastic", "--min-workers", count, "--max-workers", dice.choice((count, "1"))],
                [*train, "--workers", count],
                ["lighthouse", f"--bind={address if address not in ('127.0.0.1:0', ':5') else 'x'}"],
                ["lighthouse", "--bind", "127.0.0.1:99999", "--min-workers", count],
            )
        )


@kind
def membership(dice: Dice, folder: Path, good: Path) -> list[str]:
    """The report of a run passes rows over that make no sense; a file that is none is refused or passed over."""
    shutil.copytree(good / "run", folder / "run")
    row = {
        "time": 1.8e9,
        "step": 3,
        "workers": 2,
        "lost": ["a-1-f"],
        "joined": ["b-2-e"],
        "seconds": 0.5,
        "grid": "1x2",
    }
    lines = [dice.table_from(row, ".json") if dice.often(0.7) else json.dumps(row) for _ in range(dice.randint(1, 6))]
    dice.put(folder / "run" / "membership.jsonl", ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass"))
    refused = ["report", "run", "--output", dice.choice(("nowhere/r.html", "run", "", "n" * 5000))]
    return dice.choice((["report", "run", "--output", "r.html"], refused))


@kind
def verify(dice: Dice, folder: Path, good: Path) -> list[str]:
    shutil.copytree(good / "run", folder / "run", symlinks=True)
    steps = dice.choice(
        ("", ":", "1:", ":3", "3:1", "0:0", "-1:5", "1:9" + "9" * 30, "x", "1:2:3", "\u0661:", dice.raw())
    )
    if dice.often(0.3):
        name = dice.choice(("metrics.jsonl", "environment.json", "config.toml"))
        dice.put_bytes(folder / "run" / name)
    workers = dice.choice(([], [f"--workers={dice.choice(HUGE)}"], ["--workers", "2"]))
    more = dice.choice(([], ["--set", f"{dice.choice(('train.seed', 'comm.bucket_mb', 'x'))}={dice.raw()}"]))
    return ["verify", dice.choice(("run", "run", "nowhere", "")), f"--steps={steps}", *workers, *more]


@kind
def predict(dice: Dice, folder: Path, good: Path) -> list[str]:
    shutil.copytree(good / "run", folder / "run")
    (folder / "images").mkdir()
    for name in ("a.png", "b.png"):
        shutil.copy(good / "image.png", folder / "images" / name)
    if dice.often(0.6):
        dice.put_bytes(folder / "images" / "a.png")
    if dice.often(0.5):
        path = folder / "run" / "model.json"
        dice.put_table(path, json.loads(path.read_text()))
    images = dice.choice(("images/a.png", "images/a.png", "nowhere", "", ".", "n" * 5000, "run"))
    return ["predict", "run", images, *dice.choice(([], [f"--top={dice.choice(HUGE)}"], ["--json"]))]
