"""A training loop in plain PyTorch: the oracle of `megabatch.train.step`. The model is all that it has of megabatch.

One process, one loop over ghost batches, gradients added up by hand, update rules as their papers print them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megabatch.model.registry import build_model


@dataclass(frozen=True)
class Plain:
    """What the loop needs to know, in numbers."""

    sizes: tuple[int, ...]  # images of each step
    lrs: tuple[float, ...]  # lr of each step
    ghost: int
    rule: str = "sgd"
    smoothing: float = 0.0
    bf16: bool = False
    momentum: float = 0.9
    decay: float = 5e-4
    nesterov: bool = True
    clip: float = math.inf  # the gradient's largest norm
    half_life: float = 0.0  # images; above 0 the weights returned are a moving average


Found = tuple[list[float], list[Tensor]]


def train_plainly(plain: Plain, images: Tensor, labels: Tensor, epochs: list[float]) -> Found:
    """Mean loss of each step, and the weights after the last; `epochs` is where each step starts."""
    torch.manual_seed(0)
    model = build_model("resnet8", num_classes=10, in_channels=1, width=8, zero_gamma="none")
    weights = list(model.parameters())
    momenta = [torch.zeros_like(w) for w in weights]
    squares = [torch.zeros_like(w) for w in weights]
    losses: list[float] = []
    seen: list[tuple[int, int, list[Tensor]]] = []  # after each step: images so far, its own, the weights
    start = 0
    for size, lr, epoch in zip(plain.sizes, plain.lrs, epochs, strict=True):
        gradients, loss_sum = [torch.zeros_like(w) for w in weights], 0.0
        for first in range(start, start + size, plain.ghost):
            pixels = (images[first : first + plain.ghost].permute(0, 3, 1, 2).float() / 255 - 0.286) / 0.353
            target = torch.full((plain.ghost, 10), plain.smoothing / 10)
            target[range(plain.ghost), labels[first : first + plain.ghost]] += 1 - plain.smoothing
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=plain.bf16):
                logits = model(pixels)
            loss = -(target * logits.float().log_softmax(1)).sum()
            loss_sum += loss.item()
            for total, one in zip(gradients, torch.autograd.grad(loss / size, weights), strict=True):
                total.add_(one)
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        gradients = [g * min(1.0, plain.clip / norm) for g in gradients]
        count = len(losses) + 1
        with torch.no_grad():
            for w, g, v, m in zip(weights, gradients, momenta, squares, strict=True):
                spared = w.dim() == 1  # batch-norm and biases
                d = g if spared else g + plain.decay * w
                if plain.rule == "sgd":
                    v.mul_(plain.momentum).add_(d)
                    w.sub_(lr * (d + plain.momentum * v if plain.nesterov else v))
                elif plain.rule == "lars":
                    trust = 1.0 if spared else 0.02 * w.norm() / (g.norm() + plain.decay * w.norm())
                    v.mul_(plain.momentum).add_(lr * trust * d)
                    w.sub_(v)
                elif plain.rule in ("lamb", "adamw"):
                    v.mul_(plain.momentum).add_((1 - plain.momentum) * g)
                    m.mul_(0.999).add_(0.001 * g * g)
                    root = (m / (1 - 0.999**count)).sqrt() + (1e-6 if plain.rule == "lamb" else 1e-8)
                    u = v / (1 - plain.momentum**count) / root + (0.0 if spared else plain.decay * w)
                    w.sub_(lr * u * (w.norm() / u.norm() if plain.rule == "lamb" and not spared else 1.0))
                else:  # Akiba 2017, section 3.1, with center 1 and period 1
                    passed = epoch - 1
                    share = 0.5 * math.exp(2 * passed) if passed < 0 else min(1.0, 0.5 + passed)
                    m.mul_(0.99).add_(0.01 * d * d)
                    v.mul_(plain.momentum).add_((share + (1 - share) * 3e-4 / lr / (m.sqrt() + 1e-8)) * d)
                    w.sub_(lr * v)
        losses.append(loss_sum / size)
        start += size
        seen.append((start, size, [w.detach().double() for w in weights]))
    if not plain.half_life:
        return losses, [w.detach() for w in weights]
    # Every step by its age in images; the weights of all steps together are 1.
    shares = [2.0 ** (-(start - end) / plain.half_life) * (1 - 2.0 ** (-n / plain.half_life)) for end, n, _ in seen]
    averages = [torch.zeros_like(w, dtype=torch.float64) for w in weights]
    for share, (_, _, at_step) in zip(shares, seen, strict=True):
        for average, values in zip(averages, at_step, strict=True):
            average.add_(values, alpha=share / sum(shares))
    return losses, [average.float() for average in averages]
