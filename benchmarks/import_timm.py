"""Import timm also beside a torchvision whose compiled part is of another torch.

timm imports torchvision, and torchvision fails where its operators are not there. Two empty operators let it pass;
ResNets use neither.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch

OPERATORS = ("nms", "qnms")
_library = torch.library.Library("torchvision", "FRAGMENT")  # what it defines lives as long as it does


def import_timm() -> Any:
    """The module timm; whatever importing it raises where it, or torchvision, is missing or broken."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torchvision's compiled part too
        try:
            import torchvision  # noqa: F401
        except RuntimeError as error:
            if "operator torchvision::" not in str(error):
                raise
            for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
            for name in OPERATORS:
                _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import timm
    return timm
