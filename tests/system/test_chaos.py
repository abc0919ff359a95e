"""One elastic run under five faults of different kinds, as `benchmarks.chaos` makes twenty of."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import chaos, disturbed

pytest.importorskip("torchft", reason="torchft is an extra: pip install megabatch[elastic]")

STEPS = 250
FAULTS = (
    "kill the main rank",
    "join",
    "kill inside an all-reduce",
    "hang the main rank",
    "kill while a checkpoint is written",
)


@pytest.mark.slow
def test_a_run_under_faults_ends_with_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    wanted = disturbed.undisturbed(tmp_path, STEPS)
    faults = [(20 + 40 * number, 0.05 * number, kind) for number, kind in enumerate(FAULTS)]
    done = chaos.make(tmp_path / "disturbed", "1", faults, STEPS, wanted)
    assert done["problem"] == "", (tmp_path / "disturbed" / "told").read_text()
    assert [fault["kind"] for fault in done["faults"]] == list(FAULTS)
