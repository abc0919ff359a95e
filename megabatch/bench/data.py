"""How fast images are prepared here: images per CPU second, where the time goes, and the cores a rate needs.

CPU time is counted, not wall time: it says what a core can do also when the machine has other work. `read` is getting
the encoded bytes, `decode` decoding and scaling the wanted part, `augment` the changes of colour, angle and noise,
`collate` everything else: random draws, boxes, labels, the way through Python.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from megabatch.data.augment import Augmentation, distort, pad_crop_flip, resized_crop_box
from megabatch.data.batches import Job, fit
from megabatch.data.decode import Decoding, crop_resized, decode_image, resize_into
from megabatch.data.formats import open_source, open_splits
from megabatch.data.jpeg import Pixels
from megabatch.data.native import native, why_not
from megabatch.data.randomness import keyed_uniforms
from megabatch.data.sources import Source

STAGES = ("read", "decode", "augment", "collate")


def bench_images(
    path: Path | None,
    kind: str | None,
    augmentation: Augmentation,
    image_size: int,
    decoding: Decoding,
    num_images: int,
    rounds: int,
    need: float,
) -> dict[str, Any]:
    """How fast the images of a set (generated ones without a path) are prepared, and the cores that `need` images a
    second take."""
    if path is None:
        source = open_source("generated", None, "train", num_images=max(num_images, 1000), image_size=image_size)
    else:
        source = open_splits(path, kind)[0][1]
    described = {"source": source.name, "crop": augmentation.crop, "image_size": image_size}
    speed = measure_speed(source, augmentation, image_size, decoding, num_images, rounds)
    cores = need / speed["images_per_core_second"]  # if cores scale
    return {**described, **speed, "needed_images_per_second": need, "cores": cores}


def result_lines(result: dict[str, Any]) -> list[str]:
    """The result of `bench_images`, for people."""
    rounds = (
        f"{result['slowest_round']:,.0f} to {result['fastest_round']:,.0f} over {result['rounds']} rounds "
        f"of {result['images_per_round']}"
    )
    return [
        f"{result['source']}, {result['crop']} crops of {result['image_size']} px, decoder: {result['decoder']}",
        f"{result['images_per_core_second']:,.0f} images per core and second ({rounds})",
        *(f"  {stage:8} {value:8.0f} us an image" for stage, value in result["microseconds_per_image"].items()),
        f"{result['needed_images_per_second']:,.0f} images a second need {result['cores']:.1f} cores, if cores scale",
    ]


def measure_speed(
    source: Source,
    augmentation: Augmentation,
    image_size: int,
    decoding: Decoding,
    num_images: int = 256,
    rounds: int = 5,
) -> dict[str, Any]:
    """Prepare `num_images` of the source by one thread, `rounds` times, other images each time; medians over rounds."""
    num_images = min(num_images, len(source))
    images = np.empty((num_images, image_size, image_size, source.channels), dtype=np.uint8)
    found: dict[str, list[float]] = {stage: [] for stage in STAGES}
    rng = np.random.default_rng(0)
    for number in range(rounds + 1):
        samples = rng.permutation(len(source))[:num_images].astype(np.int64)
        seconds = _one_round(source, Job(augmentation, 0, np.full(num_images, number), samples), images, decoding)
        if number:  # the first round pays for opening files and filling caches
            for stage in STAGES:
                found[stage].append(seconds[stage] / num_images * 1e6)
    totals = [sum(values) for values in zip(*found.values(), strict=True)]
    helper = "compiled helper" if native() is not None else f"pillow ({why_not()})"
    return {
        "images_per_core_second": 1e6 / median(totals),
        "slowest_round": 1e6 / max(totals),
        "fastest_round": 1e6 / min(totals),
        "rounds": rounds,
        "images_per_round": num_images,
        "microseconds_per_image": {name: median(values) for name, values in found.items()},
        "decoder": helper if decoding.decoder == "auto" else decoding.decoder,
    }


def _one_round(source: Source, job: Job, images: Pixels, decoding: Decoding) -> dict[str, float]:
    """What `fill_training` does, with a look at the clock between the stages; CPU seconds by stage."""
    policy, size = job.augmentation, images.shape[1]
    began = time.thread_time()
    seconds = dict.fromkeys(STAGES, 0.0)
    uniforms = keyed_uniforms(job.seed, job.epochs, job.samples, policy.num_draws)
    for at, sample in enumerate(job.samples.tolist()):
        choose = partial(resized_crop_box, policy=policy, uniforms=uniforms[at, 1 : policy.num_crop_draws])
        mirror = policy.flip and bool(uniforms[at, 0] < 0.5)
        start = time.thread_time()
        encoded = source.read_bytes(sample)
        content = source.read(sample) if encoded is None else encoded
        middle = time.thread_time()
        if policy.crop != "resized":
            images[at] = fit(
                decode_image(content, source.channels, "") if isinstance(content, bytes) else content, size
            )
        elif isinstance(content, bytes):
            crop_resized(content, choose, mirror, images[at], "", decoding)
        else:
            resize_into(content, choose(*content.shape[:2]), mirror, images[at], decoding)
        seconds["read"] += middle - start
        seconds["decode"] += time.thread_time() - middle
    start = time.thread_time()
    if policy.crop == "pad":
        images[:] = pad_crop_flip(images, policy.padding, policy.flip, uniforms)
    if policy.distorts:
        distort(images, policy, uniforms[:, policy.num_crop_draws :])
    end = time.thread_time()
    seconds["augment"] = end - start
    seconds["collate"] = end - began - seconds["read"] - seconds["decode"] - seconds["augment"]
    return seconds
