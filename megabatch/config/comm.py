"""Settings of the way gradients travel between workers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megabatch.config.section import Positive, Section

MAX_EXACT_GHOSTS = 2**14
"""More ghost batches in a step would leave a ghost gradient of exact sums fewer than 12 bits."""


class CommConfig(Section):
    """How gradients travel between workers.

    `algorithm` is one of `megabatch.comm.phases`; "backend" is torch's own all-reduce, what plain DDP uses;
    "auto" measures the grid at the start and chooses by message size.
    `grad_dtype` is the precision of gradients on their way.
    `sums` says how ghost batches' gradients are added: "exact" in integers, to the same bits on any number of workers;
    "float" in floating point. Exact is the default where `grad_dtype` is fp32, and needs it.
    `shared_memory` lets workers of one host reduce through memory that they share, where the machine offers it; the
    bits are the same either way, and "backend" never uses it.
    """

    algorithm: Literal[
        "auto", "backend", "ring", "halving_doubling", "hierarchical", "torus", "two_way_torus", "direct", "exchange"
    ] = "backend"  # how they are summed; auto: measured at the start
    grad_dtype: Literal["fp32", "fp16", "bf16"] = "fp32"  # precision of gradients on their way
    sums: Literal["exact", "float"] = "exact"  # exact: in integers, the same bits on any workers
    backend: Literal["auto", "gloo", "nccl"] = "auto"  # auto: nccl with CUDA devices, else gloo
    shared_memory: bool = True  # workers of one host reduce in memory that they share
    bucket_mb: Positive = 25.0  # gradients that DDP sends together
    timeout_seconds: Positive = 600.0  # a worker that is silent for so long is lost
    hang_seconds: Positive = 15.0  # elastic runs leave a worker behind that is silent for so long
    wait_seconds: Positive = 60.0  # elastic runs wait so long for workers to come when too few are there
    max_restarts: Annotated[int, Field(ge=0)] = 3  # of local workers, after one of them died

    @model_validator(mode="before")
    @classmethod
    def _sum_in_floats_by_default_where_integers_cannot_travel(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("grad_dtype", "fp32") != "fp32":
            return {"sums": "float", **given}
        return given

    @model_validator(mode="after")
    def _exact_sums_travel_in_four_bytes(self) -> CommConfig:
        if self.sums == "exact" and self.grad_dtype != "fp32":
            raise ValueError(
                f"comm.sums 'exact' sends int32, but comm.grad_dtype is '{self.grad_dtype}'; set one of them otherwise"
            )
        return self
