"""A run begins with the given weights; what does not fit is refused in one line, a head of another size is replaced."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from megabatch.config.model import ModelConfig
from megabatch.errors import ConfigError
from megabatch.model.pretrained import head_of, prepare_pretrained
from megabatch.model.registry import build_model
from megabatch.model.weights import weights_bytes
from tests.system.runs import train_on_ranks


def network(num_classes: int, seed: int, width: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return build_model("resnet8", num_classes=num_classes, in_channels=3, width=width, zero_gamma="none")


def saved(folder: Path, num_classes: int) -> tuple[Path, dict[str, torch.Tensor]]:
    given = network(num_classes, seed=1)
    (folder / "w.safetensors").write_bytes(weights_bytes(given))
    return folder / "w.safetensors", given.state_dict()


def prepared(num_classes: int, **settings: Any) -> tuple[nn.Module, list[str], nn.Module | None]:
    model = network(num_classes, seed=2)
    lines, head = prepare_pretrained(model, ModelConfig(name="resnet8", width=4, **settings), num_classes)
    return model, lines, head


def test_a_head_of_the_same_size_is_taken_too(tmp_path: Path) -> None:
    file, given = saved(tmp_path, 5)
    model, [line], _ = prepared(5, pretrained=str(file))
    assert all(torch.equal(value, given[name]) for name, value in model.state_dict().items())
    assert line.endswith(f"{len(given)} of {len(given)} tensors, head included")


def test_a_head_of_another_size_stays_new(tmp_path: Path) -> None:
    file, given = saved(tmp_path, 7)
    fresh = network(5, seed=2).state_dict()
    model, [line], head = prepared(5, pretrained=str(file))
    assert head is head_of(model, 5)
    for name, value in model.state_dict().items():
        assert torch.equal(value, fresh[name] if name.startswith("fc.") else given[name]), name
    assert line.endswith(f"{len(given) - 2} of {len(given)} tensors; the head is new, for 5 classes")


def test_another_network_a_missing_file_and_no_head(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(weights_bytes(network(5, seed=1, width=8)))
    with pytest.raises(ConfigError, match=r"holds another network: .* is of shape .* give weights of the network"):
        prepared(5, pretrained=str(tmp_path / "w.safetensors"))
    with pytest.raises(ConfigError, match=r"'nowhere.safetensors' does not exist; give a file"):
        prepared(5, pretrained="nowhere.safetensors")
    with pytest.raises(ConfigError, match="no linear layer with 5 outputs"):
        head_of(nn.Conv2d(3, 5, 1), 5)
    with pytest.raises(ValueError, match=r"names no weights; give FILE.safetensors, timm or hub:ORG/NAME"):
        ModelConfig(pretrained="imagenet")
    with pytest.raises(ValueError, match="has no effect with freeze_backbone"):
        ModelConfig(freeze_backbone=True, backbone_lr_factor=0.1)


def test_weights_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """timm and the hub are stand-ins here: what is asked of them, and that their weights arrive."""
    file, given = saved(tmp_path, 5)
    asked: list[object] = []

    def download(*args: str) -> str:
        asked.append(args)
        return str(file)

    def create(name: str, pretrained: bool) -> nn.Module:
        asked.append((name, pretrained))
        return network(5, seed=1)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=download))
    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=create))
    for source in ("hub:org/name", "timm"):
        model, _, _ = prepared(5, pretrained=source)
        assert all(torch.equal(value, given[name]) for name, value in model.state_dict().items())
    assert asked == [("org/name", "model.safetensors"), ("resnet8", True)]
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError, match="needs the module timm, which is not installed; pip install"):
        prepared(5, pretrained="timm")


def test_runs_with_a_frozen_and_with_a_slow_backbone(tmp_path: Path) -> None:
    """After one step of SGD a weight has moved by lr times its gradient: a tenth of the lr, a tenth of the way."""
    train_on_ranks(1, tmp_path / "first", "train.max_steps=2")
    file = tmp_path / "first" / "model.safetensors"
    moved = {}
    cases = {"free": "freeze_backbone=false", "frozen": "freeze_backbone=true", "slow": "backbone_lr_factor=0.1"}
    for name, setting in cases.items():
        settings = ("train.max_steps=1", "optimizer.name=sgd", f"model.pretrained={file}", f"model.{setting}")
        train_on_ranks(2, tmp_path / name, *settings)
        moved[name] = {n: v - load_file(file)[n] for n, v in load_file(tmp_path / name / "model.safetensors").items()}
    for name, free in moved["free"].items():
        if name.endswith(("running_mean", "running_var", "_tracked")):
            continue
        is_head = name.startswith("fc.")
        assert free.any(), name
        assert moved["frozen"][name].any() == is_head, name
        assert torch.allclose(moved["slow"][name], free * (1.0 if is_head else 0.1), rtol=1e-3, atol=2e-7), name
