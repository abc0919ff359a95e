"""Writes a source anew as tar shards, parquet or raw pixels: in parallel, resumable, always the same bytes.

Shards have a fixed number of samples and are written whole, so a pack that was interrupted goes on with the first shard
that is missing. Encoded images are handed through untouched unless they are to be smaller; then the shorter side
becomes `resize` pixels (never larger) and the image is encoded as JPEG, upright. Broken images are left out
and listed.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from megabatch.data.batches import Broken, BrokenLog
from megabatch.data.decode import resize
from megabatch.data.index import index_beside, write_index
from megabatch.data.jpeg import Pixels, read_jpeg_header
from megabatch.data.raw import write_raw_table
from megabatch.data.shards import BLOCK_BYTES, index_shards, tar_header
from megabatch.data.sources import Source
from megabatch.data.storage import LocalFiles
from megabatch.data.verify import labels_sha256
from megabatch.errors import DataError
from megabatch.files import parse_json, read_text, write_atomically, write_json

Format = Literal["tar", "parquet", "raw"]
QUALITY = 90
ROWS_PER_GROUP = 20
"""Reading one image at random reads its row group, so row groups are small."""


@dataclass(frozen=True)
class Packing:
    """What a set is packed into. `resize` 0 keeps sizes, `quality` 0 means 90 for what must be encoded."""

    to: Format = "tar"
    resize: int = 0
    quality: int = 0
    images_per_shard: int = 1000


@dataclass(frozen=True)
class _Packed:
    """An image ready to be stored: encoded, or as pixels; or why it cannot be."""

    label: int
    content: bytes = b""
    suffix: str = "jpg"
    shape: tuple[int, int] = (0, 0)
    broken: Broken | None = None


def pack(
    source: Source,
    folder: Path,
    split: str,
    packing: Packing,
    jobs: int,
    progress: Callable[[int], None] = lambda count: None,
    max_broken_share: float = 0.001,
) -> dict[str, int]:
    """Write all images of the source into `folder`; return counts of images, bytes, shards, kept shards, broken.

    `progress` hears how many images were done. Raises DataError for a folder that holds another pack, for too many
    broken images and for a full disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _begin(source, folder, split, packing)
    log = BrokenLog(max_broken_share, folder / f"{split}.broken.jsonl", source.name)
    per_shard = packing.images_per_shard
    names, kept = [], 0
    with ThreadPoolExecutor(jobs) as pool:
        for number, first in enumerate(range(0, len(source), per_shard)):
            last = min(first + per_shard, len(source))
            path = folder / f"{split}-{number:05}.{packing.to}"
            names.append(path)
            if path.exists():
                kept += 1
            else:
                packed = list(pool.map(lambda index: _prepare(source, index, packing), range(first, last)))
                broken = [one.broken for one in packed if one.broken]
                log.note(len(packed), broken)
                good = [(first + at, one) for at, one in enumerate(packed) if not one.broken]
                _WRITERS[packing.to](path, good, source.channels)
            progress(last - first)
    if packing.to == "tar":
        write_index(index_beside(folder, split), index_shards(LocalFiles(names)))
    return {
        "images": len(source) - log.num_broken,
        "bytes": sum(path.stat().st_size for path in names),
        "shards": len(names),
        "kept_shards": kept,
        "broken": log.num_broken,
    }


def _begin(source: Source, folder: Path, split: str, packing: Packing) -> None:
    """Make sure that what is in the folder, if anything, is the beginning of this very pack."""
    plan = {**asdict(packing), "images": len(source), "labels_sha256": labels_sha256(source)}
    path = folder / f"{split}.pack.json"
    if path.exists():
        try:
            found = parse_json(read_text(path))
        except (OSError, ValueError):
            found = {}
        if found != plan:
            different = ", ".join(key for key in plan if not isinstance(found, dict) or found.get(key) != plan[key])
            raise DataError(f"{folder} holds another pack of {split} (other {different}); give an empty folder")
        return
    if strangers := sorted(folder.glob(f"{split}-*.{packing.to}")):
        raise DataError(f"{folder} already holds {strangers[0].name}; give an empty folder")
    write_json(path, plan)


def _prepare(source: Source, index: int, packing: Packing) -> _Packed:
    label, encoded = int(source.labels[index]), None
    try:
        if packing.to != "raw":
            encoded = source.read_bytes(index)
            if encoded is not None and _stays(encoded, packing.resize):
                return _Packed(label, encoded, _suffix(encoded, lambda: source.name_of(index)))
        image = _smaller(source.read(index), packing.resize)
    except DataError as error:
        return _Packed(label, broken=Broken(index, source.name_of(index), str(error)))
    if packing.to == "raw":
        return _Packed(label, image.tobytes(), "", image.shape[:2])
    # Pixels that were never compressed with loss stay that way unless the user asks for a quality.
    kind = "JPEG" if encoded is not None or packing.quality else "PNG"
    out = io.BytesIO()
    pil = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
    pil.save(out, kind, **({"quality": packing.quality or QUALITY} if kind == "JPEG" else {}))
    return _Packed(label, out.getvalue(), "jpg" if kind == "JPEG" else "png")


def _stays(encoded: bytes, short_side: int) -> bool:
    """Whether the image is handed through: no size is asked for, or it is a JPEG that is no larger."""
    if not short_side:
        return True
    header = read_jpeg_header(encoded)
    return header is not None and header.whole and min(header.height, header.width) <= short_side


def _smaller(image: Pixels, short_side: int) -> Pixels:
    height, width, _ = image.shape
    if not short_side or min(height, width) <= short_side:
        return image
    scale = short_side / min(height, width)
    return resize(image, max(short_side, round(height * scale)), max(short_side, round(width * scale)))


def _suffix(encoded: bytes, name: Callable[[], str]) -> str:
    if encoded[:2] == b"\xff\xd8":
        return "jpg"
    if encoded[:8] == b"\x89PNG\r\n\x1a\n":
        return "png"
    if encoded[:4] == b"RIFF" and encoded[8:12] == b"WEBP":
        return "webp"
    raise DataError(f"cannot pack the image {name()}: it is not JPEG, PNG or WebP; replace or remove it")


def _write_tar(path: Path, images: list[tuple[int, _Packed]], channels: int) -> None:
    out = io.BytesIO()
    for index, one in images:
        for suffix, content in ((one.suffix, one.content), ("cls", str(one.label).encode())):
            out.write(tar_header(f"{index:08}.{suffix}", len(content)))
            out.write(content)
            out.write(bytes(-len(content) % BLOCK_BYTES))
    out.write(bytes(2 * BLOCK_BYTES))
    write_atomically(path, out.getvalue())


def _write_parquet(path: Path, images: list[tuple[int, _Packed]], channels: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows: list[dict[str, Any]] = [{"bytes": p.content, "path": f"{index:08}.{p.suffix}"} for index, p in images]
    labels = pa.array([one.label for _, one in images], type=pa.int64())
    table = pa.table({"image": pa.array(rows, type=kind), "label": labels})
    out = pa.BufferOutputStream()
    pq.write_table(table, out, row_group_size=ROWS_PER_GROUP, compression="none", use_dictionary=False)
    write_atomically(path, out.getvalue().to_pybytes())


def _write_raw(path: Path, images: list[tuple[int, _Packed]], channels: int) -> None:
    # The table first: a raw file that is there is complete.
    write_raw_table(path, [one.shape for _, one in images], [one.label for _, one in images], channels)
    write_atomically(path, b"".join(one.content for _, one in images))


_WRITERS: dict[str, Callable[[Path, list[tuple[int, _Packed]], int], None]] = {
    "tar": _write_tar,
    "parquet": _write_parquet,
    "raw": _write_raw,
}
