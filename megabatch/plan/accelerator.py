"""Names of accelerators, as people and result tables write them: one spelling, the generation, and what kind it is.

'NVIDIA A100-SXM4-80GB (400W)'   a100-sxm-80gb   generation a100     gpu
system 'dgx2h_n96_ngc19.05'      dgx2h           generation v100     gpu
system 'tpu-v3-2048'             tpu-v3          generation tpu-v3   tpu
'Ascend 910 Pro A'               ascend-910-...  generation ascend910
"""

from __future__ import annotations

import re

__all__ = ["CHASSIS", "UNKNOWN", "chassis_of", "generation", "kind_of", "spelled"]

CHASSIS = {"dgx1": 8, "dgx2h": 16, "dgx2": 16, "dgxa100": 8, "dgxh100": 8}
"""Machines that are families of their own, and how many accelerators they hold."""
UNKNOWN = "unknown"

_GENERATION_OF_CHASSIS = {"dgx1": "v100", "dgx2": "v100", "dgx2h": "v100", "dgxa100": "a100", "dgxh100": "h100"}
_GPU = re.compile(r"[avhplbtk]\d{1,3}(?!\d|fx)|gh\d+|mi\d+|rtx|dgx|geforce|titan")


def chassis_of(system: str) -> str:
    """The known machine that a system's name begins with; empty when there is none."""
    return next((name for name in CHASSIS if re.match(rf"{name}(_|$)", system.lower())), "")


def spelled(text: str, system: str = "") -> str:
    """One spelling for one accelerator; a system's name may tell more than the column does."""
    if chassis := chassis_of(system):
        return chassis
    if pod := re.search(r"tpu-?v\d", system.lower()):
        return pod[0].replace("tpuv", "tpu-v")
    plain = re.sub(r"\(.*?\)|nvidia|tesla|habana|amd|instinct|quadro|cts", " ", text.lower())
    plain = re.sub(r"sxm\d", "sxm", plain)
    return "-".join(word for word in re.split(r"[\s_-]+", plain) if word) or UNKNOWN


def generation(accelerator: str) -> str:
    """A spelled accelerator without memory size and board: "a100", "tpu-v4", "ascend910"."""
    if accelerator in _GENERATION_OF_CHASSIS:
        return _GENERATION_OF_CHASSIS[accelerator]
    found = re.match(r"tpu-v\d+|[a-z]+-?\d+", accelerator)
    if not found:
        return accelerator
    return found[0] if found[0].startswith("tpu") else found[0].replace("-", "")


def kind_of(accelerator: str) -> str:
    """Of a spelled accelerator or generation: "tpu", "gpu" or "other"."""
    if accelerator.startswith("tpu"):
        return "tpu"
    return "gpu" if _GPU.match(accelerator) else "other"
