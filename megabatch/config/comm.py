"""Settings of the way gradients travel between workers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megabatch.config.section import Section

__all__ = ["CommConfig"]


class CommConfig(Section):
    """How gradients travel between workers.

    `algorithm` is one of `megabatch.comm.phases`; "backend" is torch's own all-reduce, what plain DDP uses;
    "auto" measures the grid at the start and chooses by message size.
    `grad_dtype` is the precision of gradients on their way.
    """

    algorithm: Literal[
        "auto", "backend", "ring", "halving_doubling", "hierarchical", "torus", "two_way_torus", "direct", "exchange"
    ] = "backend"
    grad_dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    bucket_mb: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 25.0
    timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    max_restarts: Annotated[int, Field(ge=0)] = 3
