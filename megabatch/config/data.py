"""Settings of images: where they come from and how they are changed at random."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megabatch.config.section import NotNegative, Positive, PositiveInt, Section, Share
from megabatch.schedule.pieces import Scheduled, check_pieces


class AugmentConfig(Section):
    """Random changes of a training image, keyed by (seed, epoch, sample)."""

    crop: Literal["none", "pad", "resized"] = "none"  # pad: shift by up to `padding`; resized: a random part
    padding: Annotated[int, Field(ge=0)] = 0  # pixels
    flip: bool = False  # half of the images are mirrored
    area_min: Annotated[float, Field(gt=0, le=1)] = 0.08  # of a resized crop: its share of the image
    area_max: Annotated[float, Field(gt=0, le=1)] = 1.0  # the largest share
    aspect_min: Positive = 3 / 4  # width / height
    aspect_max: Positive = 4 / 3  # the widest
    side_share: Share = 0.0  # above 0: "resized" cuts squares of this share of the shorter side, at random places
    brightness: Share = 0.0  # a factor from 1 - this to 1 + this; likewise contrast and saturation
    contrast: Share = 0.0  # a factor about the mean grey of the image
    saturation: Share = 0.0  # a factor about the grey of the pixel
    rotation_degrees: Annotated[float, Field(ge=0, le=180)] = 0.0  # at most, either way
    noise_std: Annotated[float, Field(ge=0, le=255)] = 0.0  # grey levels
    erase: Share = 0.0  # share of images in which a random box is painted over with the image's mean colour
    policy: Literal["none", "trivial", "rand"] = "none"  # TrivialAugment or RandAugment, right after the crop
    rand_ops: Annotated[int, Field(ge=1, le=8)] = 2  # of RandAugment: operations on each image
    rand_magnitude: Annotated[int, Field(ge=0, le=30)] = 9  # of RandAugment: strength of each operation
    mixup: NotNegative = 0.0  # above 0: blend each image with the next of its ghost batch, shares from Beta(this, this)
    cutmix: NotNegative = 0.0  # above 0: paste a box of the next image; with mixup too, either one for half of them

    @model_validator(mode="after")
    def _ranges_rise(self) -> AugmentConfig:
        for name, low, high in (("area", self.area_min, self.area_max), ("aspect", self.aspect_min, self.aspect_max)):
            if low > high:
                raise ValueError(f"augmentation {name} is {low:g} to {high:g}; it must be a rising range")
        return self


class GeneratedConfig(Section):
    """The size of the generated set, for machines without data."""

    num_train: PositiveInt = 20_000  # images to train on
    num_val: PositiveInt = 2_000  # images to validate
    num_classes: Annotated[int, Field(ge=2)] = 10  # kinds of images
    channels: Literal[1, 3] = 3  # 1: grey, 3: colour


class DataConfig(Section):
    """Where the images come from."""

    source: str = "generated"  # one of `megabatch.data.formats`
    path: str = ""  # a folder, a file or an address
    num_classes: Annotated[int, Field(ge=2)] | None = None  # None: what the labels or the folders show
    image_size: Annotated[int, Field(ge=8)] = 224  # pixels of a side, in evaluation and by default in training
    mean: tuple[NotNegative, ...] = (0.485, 0.456, 0.406)  # of pixels from 0 to 1, one or one per channel
    std: tuple[Annotated[float, Field(gt=0)], ...] = (0.229, 0.224, 0.225)  # of the same pixels
    max_train_images: Annotated[int, Field(ge=0)] = 0  # 0: all; else a fixed part with the set's mix of classes
    held_out_images: Annotated[int, Field(ge=0)] = 0  # >0: evaluate on so many training images, kept from training
    downscale: bool = False  # make images image_size wide once, by area averaging; for small sets
    prefetch_ghosts: PositiveInt = 4  # ghost batches prepared ahead
    train_image_size: Scheduled | None = None  # pieces over epochs, rounded to multiples of 8; None: image_size
    decoder: Literal["auto", "pillow", "opencv"] = "auto"  # auto and pillow give the same pixels
    reduce_jpeg: bool = False  # decode JPEG at 1/2, 1/4, 1/8 where the crop allows it: faster, other pixels
    loader_threads: Annotated[int, Field(ge=0, le=64)] = 0  # 0: cores of the host / workers on it
    loader_processes: Annotated[int, Field(ge=0, le=64)] = 0  # above 0: processes instead of threads
    max_broken_share: Share = 0.001  # 0: the first broken image stops the run
    augment: AugmentConfig = AugmentConfig()
    generated: GeneratedConfig = GeneratedConfig()

    @model_validator(mode="after")
    def _values_fit(self) -> DataConfig:
        if len(self.mean) != len(self.std) or not self.mean:
            raise ValueError(
                f"data.mean has {len(self.mean)} values and data.std {len(self.std)}; give as many of each"
            )
        if isinstance(self.train_image_size, tuple):
            check_pieces(self.train_image_size, "data.train_image_size")
        return self
