"""The card of a model: written with it, read back equal, refused when damaged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, save

from megabatch.data.sources import ImageArray
from megabatch.errors import CheckpointError
from megabatch.files import write_json
from megabatch.recipes import load_config
from megabatch.train.card import ModelCard, card_of, read_card, with_card
from megabatch.train.evaluate import Evaluation


def card(names: tuple[str, ...] = ("ant", "bee")) -> ModelCard:
    images = ImageArray("test", np.zeros((4, 8, 8, 3), dtype=np.uint8), [0, 1, 2, 0], 3, names)
    return card_of(load_config("photos"), images, Evaluation(0.5, 1.0, 0.1, 4))


def test_names_accuracy_and_preprocessing() -> None:
    found = card()
    assert found.class_names == ("ant", "bee", "2")  # a class without a name is called by its label
    assert card(()).class_names == ("0", "1", "2")
    assert (found.top1, found.val_images, found.image_size) == (0.5, 4, 160)


def test_the_weights_carry_the_card(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(5.0), "a": torch.ones(3, dtype=torch.int64)}
    data = with_card(save(tensors, metadata={"format": "pt"}), card())
    assert data == with_card(save(dict(reversed(tensors.items()))), card())
    assert all(torch.equal(load(data)[name], value) for name, value in tensors.items())
    (tmp_path / "model.safetensors").write_bytes(data)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert ModelCard.model_validate_json(file.metadata()["megabatch"]) == card()
    write_json(tmp_path / "model.json", card().model_dump(mode="json"))
    assert read_card(tmp_path) == card()


@pytest.mark.parametrize(
    ("change", "said"), [({"mean": [0.1, 0.2]}, "one per channel"), ({"channels": 2}, "channels"), ({"x": 1}, "'x'")]
)
def test_a_damaged_card(tmp_path: Path, change: dict[str, object], said: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "model.json").write_text(json.dumps(card().model_dump(mode="json") | change))
    with pytest.raises(CheckpointError, match=said):
        read_card(tmp_path)
