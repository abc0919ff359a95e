"""The kinds of input that the fuzz makes unfit: each writes one case into a folder and says which command reads it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tests.data.conftest import write_tar
from tests.system.malformed import Dice
from tests.system.runs import REPOSITORY

RECIPES, CLUSTERS = REPOSITORY / "megabatch" / "recipes", REPOSITORY / "megabatch" / "plan" / "clusters"
ONE_WORKER = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
KINDS: dict[str, Callable[[Dice, Path, Path], list[str]]] = {}


def kind(make: Callable[[Dice, Path, Path], list[str]]) -> Callable[[Dice, Path, Path], list[str]]:
    """A kind of input: writes a malformed one into a folder, from good ones in another; the words that read it."""
    KINDS[make.__name__] = make
    return make


def table_of(path: Path) -> dict[str, object]:
    text = path.read_text(encoding="utf-8")
    return dict(tomllib.loads(text) if path.suffix == ".toml" else json.loads(text))


@kind
def recipe(dice: Dice, folder: Path, good: Path) -> list[str]:
    name = dice.choice(("demo", "mikami2018", "codreanu2017_collapsed", "codreanu2017_cyclic", "smith2017"))
    source = RECIPES / f"{name}.toml"
    dice.put_table(folder / "r.toml", table_of(source if source.is_file() else RECIPES / "demo.toml"))
    return dice.choice(
        (
            ["recipes", "r.toml"],
            ["train", "r.toml", "--workers", "2"],
            ["train", "r.toml", "--workers", "2", "--scale", "cifar10", "--epochs", "3"],
            ["plan", "r.toml", "--cluster", "abci", "--workers", "8", "--algorithm", "torus"],
            ["study", "r.toml", "--collect", "--output", "s"],
        )
    )


@kind
def words(dice: Dice, folder: Path, good: Path) -> list[str]:
    keys = [
        *("train.epochs", "train.global_batch_size", "train.ghost_batch_size", "train.seed", "train.max_steps"),
        *("optimizer.lr", "optimizer.lr.0.end", "optimizer.momentum", "optimizer.name", "model.width", "model.name"),
        *("data.image_size", "data.mean", "data.source", "data.path", "data.max_train_images", "data.augment"),
        *("norm.momentum", "comm.bucket_mb", "comm.timeout_seconds", "comm.algorithm", "checkpoint.keep", "collapse"),
        *("batch_control.noise_rule", "batch_control.adaptive.target", "reference.images", "reference.unknown"),
        *("x" * 5000, "a" + ".a" * 5000, "optimizer.lr.99999999999999999999", "reference", "", ".", "train"),
    ]
    change = f"{dice.choice(keys)}={dice.raw()}"
    typed = dice.raw().strip('"') or "x"
    plan = ["plan", "demo", "--cluster", "abci", "--workers", "8", "--algorithm", "torus"]
    plan_option = dice.choice(
        (
            *("--epochs", "--grid", "--bucket-mb", "--target", "--deadline", "--budget", "--batch", "--scale", "--set"),
            *("--calibrate", "--study", "--algorithm", "--objective", "--workers", "--cluster", "--family"),
        )
    )
    huge = dice.choice(("1e300", "1x" + "9" * 30, "9" * 30 + "x1", "99999x99999", "1..99999999999", "1e9", "8x1x1x1"))
    return dice.choice(
        (
            ["train", "demo", "--workers", "2", "--set", change],
            ["train", "demo", "--workers", "2", "--set", change],
            [*plan, "--set", change],
            ["train", "demo", "--workers", dice.choice(("2", huge)), "--grid", dice.choice((huge, typed))],
            ["train", "demo", "--workers", "2", dice.choice(("--epochs", "--scale", "--plan", "--output")), typed],
            [*plan, plan_option, dice.choice((typed, huge))],
            ["study", "demo", "--collect", "--output", "s", "--vary", change],
            ["study", "demo", "--collect", "--output", "s", "--seeds", dice.choice((huge, typed, "1000000000"))],
            ["launch", "slurm", "demo", "--output", "o", "--set", change, "--nodes", "2", "--grid", huge],
            [dice.choice(("train", "recipes", "evaluate", "report", "plan", "study")), typed],
            ["data", dice.choice(("verify", "get")), typed],
        )
    )


@kind
def cluster(dice: Dice, folder: Path, good: Path) -> list[str]:
    dice.put_table(folder / "c.toml", table_of(dice.choice(sorted(CLUSTERS.glob("*.toml")))))
    shown = ["plan", "--cluster", "c.toml", *dice.choice(([], ["--json"]))]
    return dice.choice((shown, ["plan", "demo", "--cluster", "c.toml", "--workers", "2", "--algorithm", "torus"]))


@kind
def scale(dice: Dice, folder: Path, good: Path) -> list[str]:
    dice.put_table(folder / "p.toml", table_of(dice.choice(sorted((RECIPES / "scales").glob("*.toml")))))
    return ["train", "mikami2018", "--workers", "2", "--scale", "p.toml"]


@kind
def plan_file(dice: Dice, folder: Path, good: Path) -> list[str]:
    dice.put_table(folder / "plan.json", table_of(good / "plan.json"))
    return ["train", "demo", "--plan", "plan.json", *dice.choice(([], ["--epochs", "2"], ["--workers", "3"]))]


@kind
def study(dice: Dice, folder: Path, good: Path) -> list[str]:
    source = REPOSITORY / "studies" / dice.choice(("short.toml", "lars.toml"))
    for path in source.parent.glob("*_*.toml"):
        shutil.copy(path, folder)
    dice.put_table(folder / "study.toml", table_of(source))
    return ["study", "study.toml", "--collect", "--output", "s"]


@kind
def calibration(dice: Dice, folder: Path, good: Path) -> list[str]:
    name = dice.choice(("step.json", "links.json", "rows.csv", "study.csv"))
    if name.endswith(".csv"):
        shutil.copy(good / name, folder)
        lines = (folder / name).read_text().splitlines()
        row, cells = dice.randrange(len(lines)), lines[0].count(",") + 1
        values = lines[row].split(",")
        values[dice.randrange(min(cells, len(values)))] = dice.raw()
        lines[row] = ",".join(values)
        (folder / name).write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
        dice.put_bytes(folder / name) if dice.often(0.4) else dice.put(folder / name, (folder / name).read_bytes())
    else:
        dice.put_table(folder / name, table_of(good / name))
    if name == "rows.csv" and dice.often(0.3):
        return ["plan", "--validate", name]
    option = ["--study", name, "--target", "80"] if name == "study.csv" else ["--calibrate", name]
    if name == "links.json" and dice.often(0.3):
        shutil.copytree(good / "run", folder / "run")
        return ["report", "run", "--network", name]
    return ["plan", "demo", "--cluster", "this-machine", "--workers", "2", *option, *step_times(name, good)]


def step_times(name: str, good: Path) -> list[str]:
    return [] if name == "step.json" else ["--calibrate", str(good / "step.json")]


def look(dice: Dice, path: str = "set") -> list[str]:
    return dice.choice(
        (
            ["data", "verify", path, "--no-manifest", "--jobs", "2"],
            ["data", "verify", path, "--jobs", "1", "--json"],
            ["data", "pack", path, "packed", "--to", dice.choice(("tar", "raw", "parquet")), "--jobs", "2"],
            ["bench", "data", path, "--images", "4", "--rounds", "1", "--image-size", "8"],
        )
    )


@kind
def tar(dice: Dice, folder: Path, good: Path) -> list[str]:
    (folder / "set").mkdir()
    shard = folder / "set" / "train-0.tar"
    label = dice.choice(("0", "1", dice.raw(), str(2**40), str(2**63), "-1", "\u0661"))
    suffix = dice.choice(("cls", "json"))
    labels = label if suffix == "cls" else dice.choice(('{"label": %s}', '{"cls": %s}', "[%s]", "%s")) % label
    name = dice.choice(("a", "a", "n" * 90, "../../a", "/etc/a", "a\nb", "\x1b[31m"))
    image = (good / "image.png").read_bytes()
    broken = dice.bytes_from(image) if dice.often(0.5) else image
    write_tar(
        shard,
        [
            (f"{name}.png", broken),
            (f"{name}.{suffix}", labels.encode("utf-8", "surrogatepass")),
            *(("b.png", image), ("b.cls", b"1"), ("readme", b"x" * dice.choice((0, 700)))),
        ],
    )
    data = shard.read_bytes()
    if dice.often(0.3):
        record = dice.choice((b"size=%s", b"path=%s", b"%s=1", b"size=1%s", b"GNU.sparse.map=%s")) % dice.choice(
            (b"x", b"9" * 30, b"-1", b"1e3", b"\xb2", "\u0661".encode(), b"", b"0", b"9" * 5000, b"a\n")
        )
        length = dice.choice((len(record) + 4, len(record) + 3, 0, 10**30, 99))
        data = pax_header(b"%d %s\n" % (length, record), dice.choice((b"x", b"g", b"L", b"K", b"2"))) + data
    dice.put(shard, dice.bytes_from(data) if dice.often(0.4) else data)
    return look(dice, dice.choice(("set", "set/train-0.tar")))


def pax_header(content: bytes, type_: bytes) -> bytes:
    head = b"pax".ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + b"%011o\0" % len(content) + b"0" * 11 + b"\0"
    head = (head + b" " * 8 + type_ + b"\0" * 100 + b"ustar\00000").ljust(512, b"\0")
    head = head[:148] + b"%06o\0 " % sum(head) + head[156:]
    return head + content.ljust(-(-len(content) // 512) * 512, b"\0")


@kind
def parquet(dice: Dice, folder: Path, good: Path) -> list[str]:
    (folder / "set").mkdir()
    path = folder / "set" / "train-0.parquet"
    image = (good / "image.png").read_bytes()
    content = dice.choice((pa.binary(), pa.binary(), pa.large_binary(), pa.string(), pa.int64(), pa.list_(pa.int8())))
    is_bytes = pa.types.is_binary(content) or pa.types.is_large_binary(content)
    one = image if is_bytes else "x" if pa.types.is_string(content) else 1 if content == pa.int64() else [1, 2]
    rows = [{"bytes": one, "path": None}, {"bytes": dice.choice((one, None)), "path": "x"}, None]
    fields = pa.struct([("bytes", content), *dice.choice(([], [("path", pa.string())], [("bytes", content)]))])
    if fields.num_fields == 2 and fields.field(1).name == "bytes":
        images = pa.StructArray.from_arrays([pa.array([one] * 3, content)] * 2, fields=[fields.field(0)] * 2)
    else:
        rows = [row and {name: row[name] for name in [field.name for field in fields]} for row in rows]
        images = pa.array(rows[: dice.choice((3, 3, 2, 0))], fields)
    n = len(images)
    label_kind = dice.choice((pa.int64(), pa.int64(), pa.uint64(), pa.float64(), pa.string(), pa.int8(), pa.bool_()))
    value = dice.choice((0, 1, 2**40, 2**62, -1, 127)) if label_kind in (pa.int64(), pa.uint64()) else 1
    value = abs(value) if label_kind == pa.uint64() else value
    if pa.types.is_string(label_kind):
        labels = pa.array(["x"] * n)
    else:
        labels = pa.array(([0, value, dice.choice((1, None))] * n)[:n]).cast(label_kind, safe=False)
    names = dice.choice((["image", "label"], ["image", "label"], ["label", "image"], ["image", "image"]))
    columns = {"image": images, "label": labels}
    chosen = [columns[name] for name in names]
    if dice.often(0.15):
        names, chosen = [*names, "label"], [*chosen, labels]
    if dice.often(0.15):
        names, chosen = [*names, "image"], [*chosen, images]
    with contextlib.suppress(pa.ArrowException):
        pq.write_table(pa.Table.from_arrays(chosen, names=names), path, row_group_size=2)
    data = path.read_bytes()
    dice.put(path, dice.bytes_from(data) if dice.often(0.4) else data)
    return look(dice, dice.choice(("set", "set/train-0.parquet")))


@kind
def raw(dice: Dice, folder: Path, good: Path) -> list[str]:
    shutil.copytree(good / "raw", folder / "set")
    table, pixels = folder / "set" / "train-00000.npz", folder / "set" / "train-00000.raw"
    with np.load(table) as stored:
        arrays = {name: stored[name] for name in stored.files}
    for _ in range(dice.choice((0, 1, 1, 2))):
        name = dice.choice(list(arrays))
        array = arrays[name]
        nasty = dice.choice((-1, 0, 2**31 - 1, 2**40, 2**62, 10**6, 7))
        match dice.randrange(7):
            case 0:
                del arrays[name]
            case 1:
                arrays[name] = array.astype(dice.choice((np.float64, "S4", np.uint8, np.bool_, np.complex64)))
            case 2:
                arrays[name] = array[..., None] if dice.often(0.5) else array.reshape(-1)[:-1]
            case 3:
                arrays[name] = np.zeros(dice.choice(((0,), (0, 2), (3, 3), ())), dtype=array.dtype)
            case _ if array.size and array.dtype.kind in "iu":
                changed = array.astype(np.int64).reshape(-1)
                changed[dice.randrange(len(changed))] = nasty
                arrays[name] = changed.reshape(array.shape)
        if len(arrays) < 4:
            break
    out = io.BytesIO()
    dice.choice((np.savez, np.savez_compressed))(out, **arrays)
    dice.put(table, dice.bytes_from(out.getvalue()) if dice.often(0.3) else out.getvalue())
    if dice.often(0.2):
        dice.put_bytes(pixels)
    return look(dice)


@kind
def idx(dice: Dice, folder: Path, good: Path) -> list[str]:
    shutil.copytree(good / "idx", folder / "set")
    dice.put_bytes(dice.choice(sorted((folder / "set").iterdir())))
    if dice.often(0.3):
        path = folder / "set" / "train-images-idx3-ubyte"
        dims = [dice.choice((0, 1, 2, 28, 2**31, 2**32 - 1)) for _ in range(3)]
        dice.put(path, bytes([0, 0, 8, 3]) + b"".join(d.to_bytes(4, "big") for d in dims) + b"x" * 100)
    return look(dice)


@kind
def images(dice: Dice, folder: Path, good: Path) -> list[str]:
    shutil.copytree(good / "folder", folder / "set")
    paths = sorted((folder / "set").rglob("*.*"))
    dice.put_bytes(dice.choice(paths), paths[0].read_bytes())
    return look(dice)


@kind
def beside(dice: Dice, folder: Path, good: Path) -> list[str]:
    """The manifest and the index that lie beside a set."""
    shutil.copytree(good / "tar", folder / "set")
    (manifest,) = (folder / "set").glob("megabatch-manifest.train.json")
    (index,) = (folder / "set").glob(".megabatch-index.train.npz")
    if dice.often(0.5):
        dice.put_table(manifest, table_of(manifest))
        return dice.choice((["data", "verify", "set", "--checksums"], look(dice)))
    dice.put_bytes(index)
    return look(dice)


@kind
def run(dice: Dice, folder: Path, good: Path) -> list[str]:
    shutil.copytree(good / "run", folder / "run")
    name = dice.choice(("config.toml", "environment.json", "summary.json", "ranks.json", "plan.json", "metrics.jsonl"))
    path = folder / "run" / name
    if name == "metrics.jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        lines = [dice.table_from(row, ".json") if dice.often(0.2) else json.dumps(row) for row in rows]
        dice.put(path, ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass"))
    else:
        dice.put_table(path, table_of(path))
    shown = ["report", "run", "--output", "r.html"]
    return dice.choice(
        (
            [*shown, "--figures", "f"] if dice.often(0.1) else shown,
            ["plan", "--compare", "run"],
            ["plan", "demo", "--cluster", "this-machine", "--workers", "2", "--calibrate", "run"],
            ["evaluate", "run"] if name == "config.toml" else shown,
            ["train", "run/config.toml", "--workers", "1", "--output", "run", "--resume"],
        )
    )


@kind
def weights(dice: Dice, folder: Path, good: Path) -> list[str]:
    shutil.copytree(good / "run", folder / "run")
    (folder / "run" / "members").mkdir()
    for number in (1, 2):
        shutil.copy(folder / "run" / "model.safetensors", folder / "run" / "members" / f"member-{number}.safetensors")
    path = folder / "run" / dice.choice(("model.safetensors", "members/member-2.safetensors"))
    data = path.read_bytes()
    if dice.often(0.5):
        length = int.from_bytes(data[:8], "little")
        head = dice.table_from(json.loads(data[8 : 8 + length]), ".json").encode("utf-8", "surrogatepass")
        data = len(head).to_bytes(8, "little") + head + data[8 + length :]
        dice.put(path, data)
    else:
        dice.put_bytes(path)
    if dice.often(0.05):
        path.rename(path.with_name("member-x.safetensors"))
    return ["evaluate", "run", *(["--ensemble"] if "member" in path.name else [])]


@kind
def checkpoint(dice: Dice, folder: Path, good: Path) -> list[str]:
    shutil.copytree(good / "run", folder / "run", symlinks=True)
    (folder / "run" / "summary.json").unlink()
    path = max((folder / "run" / "checkpoints").glob("step-*.pt"))
    state = torch.load(path, weights_only=True)
    tensor = torch.zeros(3)
    nasty = [
        [],
        [1],
        tensor,
        torch.zeros(2, dtype=torch.int64),
        None,
        1,
        "x",
        {},
        {"x": 1},
        -1,
        2**70,
        1.5,
        float("nan"),
    ]
    content = state
    match dice.randrange(6):
        case 0:
            content = dice.choice(nasty)
        case 1:
            del state[dice.choice(list(state))]
        case 2 | 3:
            place: object = state
            while isinstance(place, dict) and place:
                key = dice.choice(list(place))
                if dice.often(0.5) or not isinstance(place[key], dict) or not place[key]:
                    if dice.often(0.3):
                        del place[key]
                    else:
                        place[key] = dice.choice(nasty)
                    break
                place = place[key]
        case 4:
            state["format"] = dice.choice(nasty)
        case 5:
            pass
    out = io.BytesIO()
    torch.save(content, out)
    data = dice.bytes_from(out.getvalue()) if dice.often(0.2) else out.getvalue()
    dice.put(path, data)
    digest = hashlib.sha256(data).hexdigest() + "\n"
    beside = path.with_name(path.name + ".sha256")
    dice.put(beside, dice.bytes_from(digest.encode()) if dice.often(0.1) else digest.encode())
    if dice.often(0.85):
        return ["evaluate", "run"]
    os.environ.update(ONE_WORKER)
    return ["train", "run/config.toml", "--output", "run", "--resume"]
