"""torch without torch.compile, which takes seconds to load: a run that compiles nothing starts sooner.

Some methods of torch load the compiler only to keep it out of them, or to ask which mode it is in. Where nothing is
compiled there is nothing to keep out. What is computed is the same.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)

_COMPILER = "torch._dynamo"
_KNOWN_TO_THE_GUARD = "__dynamo_disable"
"""Where torch's guard looks for a method that the compiler leaves alone, before it asks the compiler for one."""


@contextmanager
def without_compiler() -> Iterator[None]:
    """Around the construction of optimizers and of DDP; does nothing once the compiler is loaded."""
    if _COMPILER in sys.modules:
        yield
        return
    for kind in (torch.optim.Optimizer, DistributedDataParallel):
        for method in vars(kind).values():
            while inspect.isfunction(method) and hasattr(method, "__wrapped__"):
                is_guard, method = method.__code__.co_filename.endswith("_compile.py"), method.__wrapped__
                if is_guard:
                    setattr(method, _KNOWN_TO_THE_GUARD, method)
    # All that DDP asks when it is made: whether the compiler has a reducer of its own. This is its default answer.
    answer = SimpleNamespace(utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"))
    vars(torch)["_dynamo"] = answer
    try:
        yield
    finally:
        if vars(torch).get("_dynamo") is answer:  # else somebody's own code has loaded the compiler meanwhile
            del vars(torch)["_dynamo"]


def eager(kind: type[Kind]) -> type[Kind]:
    """A class of torch's optimizers whose `step` asks the compiler nothing; the class itself when that is loaded."""
    if _COMPILER in sys.modules:
        return kind
    step = torch.no_grad()(inspect.unwrap(kind.step))  # without torch's own `no_grad`, which tells the compiler
    return type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__})
