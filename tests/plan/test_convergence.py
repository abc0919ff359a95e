"""Epochs by batch: the fit finds what made the points, and says what it does not know."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megabatch.errors import DataError
from megabatch.plan.convergence import fit_law, mlperf_law, read_study
from megabatch.schedule.batch import parse_stages


def test_the_law_that_made_the_points_is_found() -> None:
    points = [(batch, 40 * (1 + batch / 30_000)) for batch in (1000.0, 4000.0, 16_000.0, 64_000.0)]
    law = fit_law(points, 0.759, "made up")
    assert law.floor_epochs == pytest.approx(40, rel=1e-6)
    assert law.critical_batch == pytest.approx(30_000, rel=1e-6)
    assert law.scatter < 1e-6
    assert law.at(32_000).epochs == pytest.approx(40 * (1 + 32 / 30))


def test_intervals_of_noisy_points_hold_the_truth() -> None:
    random = np.random.default_rng(3)
    held = 0
    for _ in range(200):
        batches = [1000.0, 2000.0, 8000.0, 16_000.0, 32_000.0, 64_000.0]
        points = [(b, 40 * (1 + b / 30_000) * float(np.exp(0.04 * random.standard_normal()))) for b in batches]
        law = fit_law(points, 0.759, "made up")
        here = law.at(48_000)
        new = 40 * (1 + 48 / 30) * float(np.exp(0.04 * random.standard_normal()))
        held += here.epochs * np.exp(-1.2816 * here.deviation) <= new <= here.epochs * np.exp(1.2816 * here.deviation)
    assert 0.65 <= held / 200 <= 0.95


def test_the_mlperf_points() -> None:
    law = mlperf_law()
    assert law.num_points == 10
    # An independent least squares over the same ten points gave 34.5 (1 + B / 46,300), worst error 6.1 %.
    assert law.floor_epochs == pytest.approx(34.5, rel=0.03)
    assert law.critical_batch == pytest.approx(46_300, rel=0.08)
    assert law.at(65_536).epochs == pytest.approx(84.5, rel=0.05)
    beyond = law.at(200_000)
    assert beyond.warnings
    assert beyond.deviation > 2 * law.at(32_768).deviation


def test_stages_add_up_progress() -> None:
    law = mlperf_law()
    assert law.for_stages(parse_stages(8192)).epochs == pytest.approx(law.at(8192).epochs)
    both = law.for_stages(parse_stages("0:8192 20:65536"))
    left = 1 - 20 / law.at(8192).epochs
    assert both.epochs == pytest.approx(20 + left * law.at(65_536).epochs)
    never = law.for_stages(parse_stages("0:8192 500:65536"))
    assert never.epochs == pytest.approx(law.at(8192).epochs)


def test_a_study_replaces_them(tmp_path: Path) -> None:
    rows = ["arm,seed,batch_total,epochs,top1"]
    rows += [f"a,{seed},{batch},{30 * (1 + batch / 5000)},0.91" for batch in (256, 1024, 4096) for seed in (0, 1)]
    rows.append("a,2,4096,10,0.50")  # did not arrive
    (tmp_path / "study.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    law = read_study(tmp_path / "study.csv", 0.9)
    assert law.num_points == 6
    assert law.critical_batch == pytest.approx(5000, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed,loss\n0,1\n", "it needs batch_total and epochs"),
        ("batch_total,epochs\n256,ten\n", "line 2"),
        ("batch_total,epochs\n256,10\n256,11\n256,12\n", "2 batches"),
        ("batch_total,epochs\n256,10\n512,0\n1024,12\n", "above 0"),
        ("", "it needs batch_total"),
    ],
)
def test_studies_that_say_nothing_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "study.csv").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=words):
        read_study(tmp_path / "study.csv", 0.9)
