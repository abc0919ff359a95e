"""Names of accelerators: one spelling whatever the table writes, and generations that compare."""

from __future__ import annotations

import pytest

from megabatch.plan.accelerator import generation, kind_of, spelled


@pytest.mark.parametrize(
    ("text", "system", "name", "of", "kind"),
    [
        ("NVIDIA A100-SXM4-80GB (400W)", "box", "a100-sxm-80gb", "a100", "gpu"),
        ("A100-PCIe-40GB", "", "a100-pcie-40gb", "a100", "gpu"),
        ("Nvidia Tesla V100-SXM2-32GB", "2xC4140", "v100-sxm-32gb", "v100", "gpu"),
        ("", "dgx2h_n96_ngc19.05_mxnet", "dgx2h", "v100", "gpu"),
        ("NVIDIA H100-SXM5-80GB", "dgxh100_n8", "dgxh100", "h100", "gpu"),
        ("TPU", "tpu-v4-128-TF", "tpu-v4", "tpu-v4", "tpu"),
        ("Ascend 910 Pro A", "CloudBrainII_256", "ascend-910-pro-a", "ascend910", "other"),
        ("Ascend910", "modelarts", "ascend910", "ascend910", "other"),
        ("Habana Gaudi2", "HLS", "gaudi2", "gaudi2", "other"),
        ("Tesla V100 SXM2 16 GB", "", "v100-sxm-16-gb", "v100", "gpu"),
        ("", "", "unknown", "unknown", "other"),
    ],
)
def test_one_name_for_one_thing(text: str, system: str, name: str, of: str, kind: str) -> None:
    assert spelled(text, system) == name
    assert generation(name) == of
    assert kind_of(name) == kind
