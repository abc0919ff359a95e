"""A lane that has JPEG images decoded by NVIDIA DALI, on the CPU or on a GPU's decoder (`pip install
'megabatch[dali]'`).

As far as DALI allows the contract is the same: the global order, crops and mirrorings are ours, keyed by (seed,
epoch, sample), so sharding, resumption and worker counts behave as always. Not the same: pixels, because DALI decodes
and scales its own way. Images that are not plain JPEG, a piece in which DALI finds a broken image, and every crop
but `resized` are prepared without DALI. Images come back to the host, also from a GPU.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megabatch.data.alter import alter
from megabatch.data.augment import resized_crop_box
from megabatch.data.broken import Broken
from megabatch.data.decode import EXACT
from megabatch.data.header import read_jpeg_header
from megabatch.data.keyed import keyed_uniforms
from megabatch.data.lanes import LaneTask, SameProcess
from megabatch.data.sources import Source
from megabatch.errors import ConfigError

__all__ = ["DaliLane", "check_dali"]


def check_dali() -> None:
    """Raises ConfigError unless DALI is installed."""
    try:
        importlib.import_module("nvidia.dali")
    except ImportError as error:
        raise ConfigError(
            f"data.decoder is 'dali' and {error.name} is not installed; pip install 'megabatch[dali]'"
        ) from None


class DaliLane:
    """Prepares pieces of at most `most_images` images; `device_id` None is the CPU."""

    def __init__(self, source: Source, tolerant: bool, most_images: int, device_id: int | None = None) -> None:
        check_dali()
        self._source, self._most, self._device_id = source, most_images, device_id
        self._without = SameProcess(source, EXACT, tolerant)
        self._pipelines: dict[int, Any] = {}  # by image size

    def prepare(self, task: LaneTask) -> list[Broken]:
        inputs = self._inputs(task)
        if inputs is None:
            return self._without.prepare(task)
        pipeline = self._pipeline(task.image_size)
        for name, values in inputs.items():
            pipeline.feed_input(name, values)
        try:
            (output,) = pipeline.run()
        except RuntimeError:  # DALI names no image; the other way does
            self._pipelines.pop(task.image_size)
            return self._without.prepare(task)
        images = task.images[task.first : task.last]
        images[:] = (output.as_cpu() if self._device_id is not None else output).as_array()
        task.labels[task.first : task.last] = self._source.labels[task.job.samples]
        policy = task.job.augmentation
        if policy.alters:
            uniforms = keyed_uniforms(task.job.seed, task.job.epochs, task.job.samples, policy.num_draws)
            alter(images, policy, uniforms[:, policy.num_crop_draws :])
        return []

    def close(self) -> None:
        self._pipelines.clear()

    def _inputs(self, task: LaneTask) -> dict[str, list[NDArray[Any]]] | None:
        """Bytes, boxes and mirrorings for the pipeline; None when one of the images is not for it."""
        policy, job = task.job.augmentation, task.job
        read_bytes = getattr(self._source, "read_bytes", None)
        if policy.crop != "resized" or read_bytes is None or self._source.channels != 3:
            return None
        uniforms = keyed_uniforms(job.seed, job.epochs, job.samples, policy.num_draws)
        inputs: dict[str, list[NDArray[Any]]] = {"encoded": [], "anchor": [], "shape": [], "mirror": []}
        for sample, draws in zip(job.samples.tolist(), uniforms, strict=True):
            encoded = read_bytes(sample)
            header = read_jpeg_header(encoded)
            if header is None or not header.upright or not header.whole or header.num_components not in (1, 3):
                return None
            crop_draws = draws[1 : policy.num_crop_draws]
            left, top, right, bottom = resized_crop_box(header.height, header.width, policy, crop_draws)
            inputs["encoded"].append(np.frombuffer(encoded, dtype=np.uint8))
            inputs["anchor"].append(np.array([left, top], dtype=np.float32))
            inputs["shape"].append(np.array([right - left, bottom - top], dtype=np.float32))
            inputs["mirror"].append(np.array(int(policy.flip and draws[0] < 0.5), dtype=np.int32))
        return inputs

    def _pipeline(self, image_size: int) -> Any:
        if image_size not in self._pipelines:
            self._pipelines[image_size] = _build(image_size, self._most, self._device_id)
        return self._pipelines[image_size]


def _build(image_size: int, most_images: int, device_id: int | None) -> Any:
    fn, types = importlib.import_module("nvidia.dali.fn"), importlib.import_module("nvidia.dali.types")
    pipeline = importlib.import_module("nvidia.dali.pipeline").Pipeline(
        batch_size=most_images, num_threads=1, device_id=device_id, prefetch_queue_depth=1
    )
    with pipeline:
        cut = fn.decoders.image_slice(
            fn.external_source(name="encoded", dtype=types.UINT8, ndim=1),
            fn.external_source(name="anchor", dtype=types.FLOAT, ndim=1),
            fn.external_source(name="shape", dtype=types.FLOAT, ndim=1),
            device="cpu" if device_id is None else "mixed",
            output_type=types.RGB,
            axis_names="WH",
            normalized_anchor=False,
            normalized_shape=False,
        )
        scaled = fn.resize(cut, size=[image_size, image_size], interp_type=types.INTERP_LINEAR, antialias=True)
        mirror = fn.external_source(name="mirror", dtype=types.INT32, ndim=0)
        pipeline.set_outputs(fn.flip(scaled, horizontal=mirror))
    pipeline.build()
    return pipeline
