"""What one optimizer step costs over a network's parameters, against torch's own and against a loop over parameters.

All contestants step the same parameters with the same gradients, each with a momentum of its own. A round lets each
of them make one step that does not count and one that does; ratios are between steps of one round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megabatch.model.registry import build_model
from megabatch.optim.groups import parameter_groups
from megabatch.optim.lamb import LAMB
from megabatch.optim.lars import LARS
from megabatch.optim.rmsprop_warmup import RMSpropWarmup
from megabatch.optim.shampoo import Shampoo

_DECAY, _COEFFICIENT = 5e-5, 1e-3
BASE, LOOP = "torch SGD, foreach", "LARS, loop over parameters"
_NEVER = 1 << 40  # steps
SHAMPOO, ROOTS = "megabatch Shampoo, no roots", "Shampoo's roots, one worker"


class LoopLARS(torch.optim.Optimizer):
    """LARS by the paper's rule, one parameter and one operation after the other: the slow twin."""

    def __init__(self, params: Any, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "lars": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            decay = group["weight_decay"] * group.get("decay_factor", 1.0)
            for p in group["params"]:
                direction, rate = p.grad, group["lr"]
                if decay:
                    direction = direction.add(p, alpha=decay)
                if group["lars"]:
                    weight_norm, gradient_norm = p.norm().item(), p.grad.norm().item()
                    if weight_norm > 0 and gradient_norm > 0:
                        rate *= _COEFFICIENT * weight_norm / (gradient_norm + decay * weight_norm)
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                state["momentum_buffer"].mul_(group["momentum"]).add_(direction, alpha=rate)
                p.sub_(state["momentum_buffer"])


def contestants(model: nn.Module, lr: float = 1e-6) -> dict[str, Callable[[], Any]]:
    """A step of each optimizer; all share the model's parameters and gradients. Shampoo's roots are apart."""
    decayed = parameter_groups(model, weight_decay=_DECAY)

    def groups() -> list[dict[str, Any]]:
        return [dict(group) for group in decayed]

    warmup = RMSpropWarmup(groups(), lr)
    shampoo, rooted = (Shampoo(groups(), lr, start_steps=steps, every_steps=1) for steps in (_NEVER, 1))

    def roots() -> None:
        if not rooted.state:
            rooted.step()  # statistics
        rooted.gather_roots()

    def shampoo_step() -> None:
        if not shampoo.state:  # roots once, and never again
            shampoo.step()
            _set(shampoo, start_steps=1)
            shampoo.step()
            _set(shampoo, every_steps=_NEVER)
        shampoo.step()

    return {
        BASE: torch.optim.SGD(groups(), lr, momentum=0.9, foreach=True).step,
        "torch SGD, fused": torch.optim.SGD(groups(), lr, momentum=0.9, fused=True).step,
        LOOP: LoopLARS(groups(), lr, 0.9, _DECAY).step,
        "megabatch LARS, paper": LARS(groups(), lr, rule="paper").step,
        "megabatch LARS, trust_inside": LARS(groups(), lr, rule="trust_inside").step,
        "megabatch LARS, trust_outside": LARS(groups(), lr, rule="trust_outside").step,
        "megabatch RMSprop warm-up": warmup.step,
        "torch AdamW, foreach": torch.optim.AdamW(groups(), lr, foreach=True).step,
        "megabatch LAMB": LAMB(groups(), lr).step,
        SHAMPOO: shampoo_step,
        ROOTS: roots,
    }


def _set(optimizer: torch.optim.Optimizer, **values: int) -> None:
    for group in optimizer.param_groups:
        group.update(values)


def bench_steps(model_name: str, rounds: int, threads: int) -> dict[str, Any]:
    """Seconds of every contestant's step in every round."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = build_model(model_name, num_classes=1000, in_channels=3)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter) * 1e-3
        steps = contestants(model)
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        names = list(steps)
        for number in range(rounds + 1):
            for name in names if number % 2 else reversed(names):
                steps[name]()
                begin = time.perf_counter()
                steps[name]()
                if number:  # the first round makes the buffers
                    seconds[name].append(time.perf_counter() - begin)
    finally:
        torch.set_num_threads(before)
    num_parameters = sum(p.numel() for p in model.parameters())
    return {"model": model_name, "parameters": num_parameters, "threads": threads, "rounds": rounds, "seconds": seconds}


def result_lines(result: dict[str, Any]) -> list[str]:
    """A table of medians with their spread, and of ratios within rounds."""
    seconds: dict[str, list[float]] = result["seconds"]
    size = f"{result['model']}, {result['parameters']:,} parameters"
    lines = [
        f"{size}, {result['threads']} threads, n = {result['rounds']} rounds",
        f"{'step':<31}{'ms':>22}{'over foreach SGD':>24}{'loop LARS over it':>24}",
    ]
    for name, own in seconds.items():
        over_base = [mine / base for mine, base in zip(own, seconds[BASE], strict=True)]
        under_loop = [loop / mine for mine, loop in zip(own, seconds[LOOP], strict=True)]
        lines.append(
            f"{name:<31}{_spread([1e3 * s for s in own], 1):>22}{_spread(over_base, 2):>24}{_spread(under_loop, 2):>24}"
        )
    for every in (1, 20, 100):
        steps = [
            (step + roots / every) / base
            for step, roots, base in zip(seconds[SHAMPOO], seconds[ROOTS], seconds[BASE], strict=True)
        ]
        lines.append(f"Shampoo, one worker, roots every {every} steps: {_spread(steps, 1)} times foreach SGD")
    return lines


def _spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}-{max(values):.{digits}f}]"
