"""Settings of the network."""

from __future__ import annotations

from typing import Literal

from megabatch.config.section import PositiveInt, Section

__all__ = ["ModelConfig"]


class ModelConfig(Section):
    """The network: a built-in name, `timm:NAME` or `package.module:function`."""

    name: str = "resnet50"
    zero_gamma: Literal["none", "every_block", "last_block_of_stage"] = "every_block"
    width: PositiveInt | None = None

    @property
    def label(self) -> str:
        """The name, with the width where that is not the network's own: what tells step times apart."""
        return self.name if self.width is None else f"{self.name} of width {self.width}"
