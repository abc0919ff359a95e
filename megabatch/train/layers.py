"""The layers of a network as the planner wants them: parameters, and parts of the multiply-adds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["layers_or_none", "list_layers"]


def layers_or_none(network: nn.Module, channels: int, image_size: int) -> list[dict[str, Any]] | None:
    """The layers of a network about to be trained, by a forward pass that leaves no trace in it or in random numbers.

    None when somebody's own network does not take it: a run does not depend on this list.
    """
    device = next(network.parameters()).device
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            return list_layers(network, torch.zeros(2, channels, image_size, image_size, device=device))
    except Exception:
        return None


def list_layers(network: nn.Module, images: torch.Tensor) -> list[dict[str, Any]]:
    """Layers in the order of the forward pass with their parameters and part of the multiply-adds."""
    names = {module: name for name, module in network.named_modules()}
    seen: list[dict[str, Any]] = []

    def after(module: nn.Module, _inputs: Any, out: Any) -> None:
        count = sum(p.numel() for p in module.parameters(recurse=False))
        if not count:
            return
        if isinstance(module, nn.Conv2d):
            work = module.weight.numel() * out.shape[2] * out.shape[3]
        elif isinstance(module, nn.Linear):
            work = module.weight.numel()
        elif seen:  # a norm belongs to the layer before it
            seen[-1]["parameters"] += count
            return
        else:
            work = count
        seen.append({"name": names[module], "parameters": count, "work": float(work)})

    hooks = [module.register_forward_hook(after) for module in network.modules()]
    training = {module: module.training for module in network.modules()}
    try:
        with torch.no_grad():
            network.eval()(images)
    finally:
        for hook in hooks:
            hook.remove()
        for module, was_training in training.items():
            module.training = was_training
    whole = sum(layer["work"] for layer in seen)
    return [{**layer, "work": layer["work"] / whole} for layer in seen]
