"""Mistakes that a real device would punish, seeded one at a time to show that the harness sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import get_total_norm

from megabatch.comm.transfer import upload
from megabatch.model.normaliser import Normaliser
from megabatch.optim import lars
from megabatch.train import passes as passes_module
from megabatch.train import step as step_module
from megabatch.train.components import Components
from tests.accelerator.watch import Stream


@contextmanager
def seeded(bug: str) -> Iterator[None]:
    """Within the block the package has this mistake; an empty name stands for none."""
    if not bug:
        yield
        return
    with {
        "float in lars": _float_in_lars,
        "labels on the host": _labels_on_the_host,
        "a copy that blocks": _blocking_copy,
        "a number of the host in a stack": _host_number_in_a_stack,
        "a stream that does not wait": _stream_that_does_not_wait,
        "a seed in the pass": _seed_in_the_pass,
        "an upload in the pass": _upload_in_the_pass,
    }[bug]():
        yield


def _float_in_lars() -> Any:
    right: Callable[..., Tensor] = lars.trust_ratios

    def read(*args: Any) -> Tensor:
        ratios = right(*args)
        return ratios * min(1.0, 1.0 + float(ratios[0]))

    return patch.object(lars, "trust_ratios", read)


def _labels_on_the_host() -> Any:
    right = F.cross_entropy

    def mixed(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
        return right(logits, torch.zeros(labels.shape, dtype=labels.dtype), **options)

    return patch.object(F, "cross_entropy", mixed)


def _blocking_copy() -> Any:
    right = Normaliser.forward

    def blocking(self: Normaliser, images: Tensor) -> Tensor:
        return right(self, images.to(self.scale.device))

    return patch.object(Normaliser, "forward", blocking)


def _host_number_in_a_stack() -> Any:
    def mixed(*args: Any, **options: Any) -> Tensor:
        return torch.stack([get_total_norm(*args, **options), torch.ones(())]).sum()

    return patch.object(step_module, "get_total_norm", mixed)


def _stream_that_does_not_wait() -> Any:
    return patch.object(Stream, "wait_stream", lambda *_: None)


def _seed_in_the_pass() -> Any:
    right = passes_module._forward

    def seeding(components: Components, *args: Any) -> Any:
        passes_module.seed_torch(components.device, 1, 0)
        return right(components, *args)

    return patch.object(passes_module, "_forward", seeding)


def _upload_in_the_pass() -> Any:
    right = passes_module._forward

    def uploading(components: Components, *args: Any) -> Any:
        hits, loss = right(components, *args)
        return hits, loss * upload([1.0], components.device, torch.float32).sum()

    return patch.object(passes_module, "_forward", uploading)
