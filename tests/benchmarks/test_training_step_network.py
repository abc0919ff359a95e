import pytest

from benchmarks.allreduce_table import Timing
from benchmarks.training_step_network import StepReport, main, table_lines, wrong_variants


def test_ratio_is_of_medians_against_plain_ddp() -> None:
    lines = table_lines({"default": Timing(0.8, 0.7, 0.9, 5), "torus": Timing(0.4, 0.3, 0.5, 5)}, 64)
    assert lines[2] == "| default | 800.0 [700.0-900.0] | 80 | 1.00 | 5 |"
    assert lines[3] == "| torus | 400.0 [300.0-500.0] | 160 | 2.00 | 5 |"


def test_weights_that_differ_on_any_rank_are_found() -> None:
    good = StepReport(distance={"default": 0.0, "torus": 1e-7, "torus+bfloat16": 1e-3})
    bad = StepReport(distance={"default": 0.0, "torus": 1e-2, "torus+bfloat16": 1e-3})
    lost = StepReport(distance={"default": 0.0, "torus": float("nan"), "torus+bfloat16": 1e-3})
    assert wrong_variants([good, good]) == []
    assert wrong_variants([good, bad]) == ["torus is 0.01 off, 1e-05 allowed"]
    assert len(wrong_variants([lost])) == 1


def test_plain_ddp_must_come_first() -> None:
    with pytest.raises(SystemExit, match="begin with 'default'"):
        main(["--variants", "torus,default"])
