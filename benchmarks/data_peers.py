"""The contestants of `data_speed`: each prepares the same images as random resized crops of 224 px, mirrored half
the time.

Every contestant is a function that prepares all images once, in this thread, from encoded bytes in memory to uint8
batches. `reference` has the shape of torchvision's training pipeline under torch's DataLoader. The other peers are
given the crops, ready to use; DALI (`pip install nvidia-dali-cuda130 nvidia-nvimgcodec-cu13`) draws its own.
"""

from __future__ import annotations

import importlib
import io
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from megabatch.data.augment import Augmentation, resized_crop_box
from megabatch.data.batches import LoaderSettings
from megabatch.data.decode import Decoding
from megabatch.data.loader import GhostLoader
from megabatch.data.randomness import keyed_uniforms
from megabatch.data.sources import EncodedImages, Source
from megabatch.schedule.batch import iterate_steps

SIZE, BATCH = 224, 48
POLICY = Augmentation(crop="resized", flip=True)

Contestant = Callable[[], int]  # prepares everything once, returns how many images


class Photographs(EncodedImages):
    """Encoded images in memory."""

    def __init__(self, contents: list[bytes], labels: NDArray[np.int64]) -> None:
        self.contents, self.labels = contents, labels
        self.name, self.channels, self.num_classes = "photographs", 3, int(labels.max()) + 1

    def read_bytes(self, index: int) -> bytes:
        return self.contents[index]

    def name_of(self, index: int) -> str:
        return f"number {index}"


def read_photographs(folder: Path) -> Photographs:
    import pyarrow.parquet as pq

    tables = [pq.read_table(path) for path in sorted(folder.glob("*.parquet"))]
    contents = [row["bytes"] for table in tables for row in table.column("image").to_pylist()]
    labels = np.concatenate([table.column("label").to_numpy() for table in tables])
    return Photographs(contents, labels.astype(np.int64))


# --- torch's DataLoader with Pillow, in the shape of torchvision's reference pipeline ---


class PillowDataset(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, photographs: Photographs) -> None:
        self._photographs = photographs

    def __len__(self) -> int:
        return len(self._photographs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = Image.open(io.BytesIO(self._photographs.contents[index])).convert("RGB")
        box = _random_box(image.height, image.width)
        image = image.crop(box).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        if torch.rand(1).item() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        return pixels, int(self._photographs.labels[index])


def _random_box(height: int, width: int) -> tuple[int, int, int, int]:
    """Random area and aspect, drawn with torch as torchvision draws them."""
    for _ in range(10):
        area = height * width * torch.empty(1).uniform_(0.08, 1.0).item()
        aspect = math.exp(torch.empty(1).uniform_(math.log(3 / 4), math.log(4 / 3)).item())
        box_width, box_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            top = int(torch.randint(0, height - box_height + 1, (1,)).item())
            left = int(torch.randint(0, width - box_width + 1, (1,)).item())
            return left, top, left + box_width, top + box_height
    return 0, 0, width, height


def reference(photographs: Photographs) -> Contestant:
    def run() -> int:
        loader = DataLoader(PillowDataset(photographs), batch_size=BATCH, shuffle=True, num_workers=0)
        return sum(len(labels) for _, labels in loader)

    return run


# --- ours ---


def ours(source: Source, decoding: Decoding) -> Contestant:
    """One epoch through the loader; every call is another epoch."""
    epoch = iter(range(10**6))
    usable = len(source) // BATCH * BATCH

    def run() -> int:
        start = next(epoch) * usable
        steps = iterate_steps(lambda _: usable, BATCH, len(source), start + usable, start_samples=start)
        loader = GhostLoader(source, POLICY, SIZE, 0, steps, feeding=LoaderSettings(threads=1, decoding=decoding))
        count = sum(len(ghost.labels) for _, ghosts in loader for ghost in ghosts)
        loader.close()
        return count

    return run


# --- other decoders, each with OpenCV or its own scaling ---


@dataclass
class Crops:
    """The crops of all images, ready made, new ones each round."""

    photographs: Photographs

    def __post_init__(self) -> None:
        self._sizes = [Image.open(io.BytesIO(content)).size for content in self.photographs.contents]
        self._epoch = 0

    def __iter__(self) -> Iterator[tuple[bytes, tuple[int, int, int, int], bool]]:
        count = len(self.photographs)
        self._epoch += 1
        draws = keyed_uniforms(1, self._epoch, np.arange(count), POLICY.num_draws)
        for content, (width, height), uniforms in zip(self.photographs.contents, self._sizes, draws, strict=True):
            yield content, resized_crop_box(height, width, POLICY, uniforms[1:]), bool(uniforms[0] < 0.5)


def decoder_and_opencv(photographs: Photographs, decode: Callable[[bytes], NDArray[np.uint8]]) -> Contestant:
    """Decode all, cut, scale by OpenCV without antialiasing."""
    cv2: Any = importlib.import_module("cv2")
    cv2.setNumThreads(0)
    crops = Crops(photographs)

    def run() -> int:
        batch = np.empty((BATCH, SIZE, SIZE, 3), dtype=np.uint8)
        count = 0
        for content, (left, top, right, bottom), mirror in crops:
            scaled = cv2.resize(decode(content)[top:bottom, left:right], (SIZE, SIZE))
            batch[count % BATCH] = scaled[:, ::-1] if mirror else scaled
            count += 1
        return count

    return run


def other_decoders() -> dict[str, Callable[[bytes], NDArray[np.uint8]]]:
    """Those that are installed here."""
    found: dict[str, Callable[[bytes], NDArray[np.uint8]]] = {}

    def offer(module: str, name: str, make: Callable[[Any], Callable[[bytes], NDArray[np.uint8]]]) -> None:
        try:
            decode = make(importlib.import_module(module))
            out = io.BytesIO()
            Image.new("RGB", (16, 16)).save(out, "JPEG")
            assert decode(out.getvalue()).shape == (16, 16, 3)
            found[name] = decode
        except Exception as error:
            print(f"left out: {name} ({type(error).__name__}: {str(error)[:80]})")

    offer("simplejpeg", "simplejpeg + OpenCV", lambda m: lambda c: m.decode_jpeg(c))
    offer("cv2", "OpenCV", lambda m: lambda c: m.imdecode(np.frombuffer(c, np.uint8), m.IMREAD_COLOR))
    offer(
        "turbojpeg",
        "PyTurboJPEG + OpenCV",
        lambda m: (lambda tj: lambda c: tj.decode(c, pixel_format=0))(m.TurboJPEG()),
    )
    offer("kornia_rs", "kornia-rs + OpenCV", lambda m: lambda c: np.asarray(_kornia(m)(c)))
    offer("imagecodecs", "imagecodecs + OpenCV", lambda m: lambda c: m.jpeg8_decode(c, outcolorspace="RGB"))
    offer(
        "pyvips",
        "pyvips + OpenCV",
        lambda m: lambda c: m.Image.new_from_buffer(c, "").colourspace("srgb").numpy()[..., :3],
    )
    return found


def _kornia(module: Any) -> Callable[[bytes], Any]:
    if hasattr(module, "decode_image_jpeg"):
        decode: Callable[[bytes], Any] = lambda c: module.decode_image_jpeg(c, (0, 0), "rgb")  # noqa: E731
        return decode
    decoder = module.ImageDecoder() if hasattr(module, "ImageDecoder") else module.io.ImageDecoder()
    return lambda c: decoder.decode(c)


def dali(photographs: Photographs) -> Contestant | None:
    """DALI's pipeline on the CPU with one thread; None where it is not installed."""
    try:
        fn: Any = importlib.import_module("nvidia.dali.fn")
        types: Any = importlib.import_module("nvidia.dali.types")
        pipeline_def: Any = importlib.import_module("nvidia.dali").pipeline_def
    except Exception as error:
        print(f"left out: DALI ({type(error).__name__}: {str(error)[:80]})")
        return None
    buffers = [np.frombuffer(content, dtype=np.uint8) for content in photographs.contents]
    order = list(range(len(buffers)))
    rng = random.Random(0)

    def feed() -> Iterator[list[NDArray[np.uint8]]]:
        while True:
            rng.shuffle(order)
            for first in range(0, len(order) - BATCH + 1, BATCH):
                yield [buffers[index] for index in order[first : first + BATCH]]

    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, prefetch_queue_depth=1)  # type: ignore[untyped-decorator]
    def pipeline() -> Any:
        encoded = fn.external_source(source=feed(), dtype=types.UINT8)
        cut = fn.decoders.image_random_crop(
            encoded, device="cpu", output_type=types.RGB, random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3]
        )
        scaled = fn.resize(cut, size=[SIZE, SIZE], interp_type=types.INTERP_LINEAR, antialias=True)
        return fn.flip(scaled, horizontal=fn.random.coin_flip())

    made = pipeline()
    made.build()

    def run() -> int:
        count = 0
        for _ in range(len(buffers) // BATCH):
            (output,) = made.run()
            count += output.as_array().shape[0]
        return count

    return run
