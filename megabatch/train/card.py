"""What a trained model needs besides its weights to be used: `model.json`, and the same in the weights' metadata.

Classes by name, how an image becomes the network's input, the digest of the recipe, and the accuracy that was measured.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator
from torch import nn

from megabatch.config import Config
from megabatch.config.section import NotNegative, PositiveInt, Section, Share
from megabatch.data.sources import Source, names_of
from megabatch.errors import CheckpointError, complaint
from megabatch.files import parse_json, read_text, write_atomically, write_json
from megabatch.model.weights import weights_bytes
from megabatch.train.evaluate import Evaluation
from megabatch.train.run_dir import digest_of

CARD_FILE, WEIGHTS_FILE = "model.json", "model.safetensors"


class ModelCard(Section):
    """Preprocessing: decode upright, shorter side to round(8/7 image_size), centre square, (pixel / 255 - mean) / std.

    An image that is a square of `image_size` already is not scaled. Scaling is Pillow's antialiased bilinear.
    """

    format: Literal[1] = 1
    model: str  # as in a recipe: a built-in name, timm:NAME or package.module:function
    width: PositiveInt | None = None
    class_names: tuple[str, ...] = Field(min_length=1)  # by label
    channels: Literal[1, 3]
    image_size: Annotated[int, Field(ge=8, le=2**14)]
    mean: tuple[NotNegative, ...]
    std: tuple[Annotated[float, Field(gt=0)], ...]
    precision: Literal["fp32", "bf16", "fp16"]
    channels_last: bool
    batch_size: PositiveInt  # images per pass when it was evaluated
    recipe_digest: str
    top1: Share | None = None
    top5: Share | None = None
    val_images: PositiveInt | None = None

    @model_validator(mode="after")
    def _sizes_fit(self) -> ModelCard:
        if len(self.mean) not in (1, self.channels) or len(self.mean) != len(self.std):
            raise ValueError("mean and std must have one value, or one per channel")
        return self


def card_of(config: Config, source: Source, found: Evaluation | None) -> ModelCard:
    """The card of a model that was trained with these settings; classes without names are called by their label."""
    return ModelCard(
        model=config.model.name,
        width=config.model.width,
        class_names=names_of(source),
        channels=1 if source.channels == 1 else 3,
        image_size=config.data.image_size,
        mean=config.data.mean,
        std=config.data.std,
        precision=config.train.precision,
        channels_last=config.train.channels_last,
        batch_size=config.train.evaluation_batch_size,
        recipe_digest=digest_of(config),
        top1=found.top1 if found else None,
        top5=found.top5 if found else None,
        val_images=found.num_images if found else None,
    )


def read_card(folder: Path) -> ModelCard:
    """The card in a run folder, or in any folder that holds the model's two files.

    Raises:
        CheckpointError: there is no model, or a card that cannot be used.
    """
    path = folder / CARD_FILE
    if not path.is_file() or not (folder / WEIGHTS_FILE).is_file():
        raise CheckpointError(
            f"'{folder}' has no {WEIGHTS_FILE} with its {CARD_FILE}; give the folder of a run that has finished"
        )
    try:
        return ModelCard.model_validate(parse_json(read_text(path)))
    except (OSError, ValueError) as error:
        reason = "'{}': {}".format(*complaint(error)) if isinstance(error, ValidationError) else str(error)
        raise CheckpointError(f"'{path}' cannot be used ({reason}); restore it, or train the model again") from None


def write_model(folder: Path, weights: nn.Module | Path, card: ModelCard) -> None:
    """Put a model and its card into a folder; `weights`: the network, or a file that holds them already."""
    plain = weights.read_bytes() if isinstance(weights, Path) else weights_bytes(weights)
    write_json(folder / CARD_FILE, card.model_dump(mode="json"))
    write_atomically(folder / WEIGHTS_FILE, with_card(plain, card))


def with_card(weights: bytes, card: ModelCard) -> bytes:
    """A safetensors file with the card in its metadata; its entries are sorted, so equal models are equal files."""
    (length,) = struct.unpack("<Q", weights[:8])
    header = json.loads(weights[8 : 8 + length])
    header["__metadata__"] = {"format": "pt", "megabatch": json.dumps(card.model_dump(mode="json"), sort_keys=True)}
    text = json.dumps(dict(sorted(header.items())), separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    return struct.pack("<Q", len(text)) + text + weights[8 + length :]
