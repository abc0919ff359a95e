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
    law = fit_law(points, "made up")
    assert law.floor_epochs == pytest.approx(40, rel=1e-6)
    assert law.critical_batch == pytest.approx(30_000, rel=1e-6)
    # Four points on a line may be luck: the usual 5 % counts as three more.
    assert law.scatter == pytest.approx(0.05 * np.sqrt(3 / (2 + 3)))
    assert law.at(32_000).epochs == pytest.approx(40 * (1 + 32 / 30))


def test_intervals_of_noisy_points_hold_the_truth() -> None:
    random = np.random.default_rng(3)
    held = 0
    for _ in range(200):
        batches = [1000.0, 2000.0, 8000.0, 16_000.0, 32_000.0, 64_000.0]
        points = [(b, 40 * (1 + b / 30_000) * float(np.exp(0.04 * random.standard_normal()))) for b in batches]
        law = fit_law(points, "made up")
        here = law.at(48_000)
        new = 40 * (1 + 48 / 30) * float(np.exp(0.04 * random.standard_normal()))
        held += here.epochs * np.exp(-1.2816 * here.deviation) <= new <= here.epochs * np.exp(1.2816 * here.deviation)
    assert 0.65 <= held / 200 <= 0.95


def test_the_mlperf_points() -> None:
    law = mlperf_law()
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
    rows = ["arm,seed,global_batch_size,epochs,top1"]
    rows += [f"a,{seed},{batch},{30 * (1 + batch / 5000)},0.91" for batch in (256, 1024, 4096) for seed in (0, 1)]
    rows.append("a,2,4096,10,0.50")  # did not arrive
    (tmp_path / "study.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    law = read_study(tmp_path / "study.csv", 0.9)
    assert law.critical_batch == pytest.approx(5000, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed,loss\n0,1\n", "it needs global_batch_size and epochs"),
        ("global_batch_size,epochs\n256,ten\n", "line 2"),
        ("global_batch_size,epochs\n256,10\n256,11\n256,12\n", "2 batches"),
        ("global_batch_size,epochs\n256,10\n512,0\n1024,12\n", "line 3: epochs is 0; give a number from"),
        (
            "global_batch_size,epochs\n256,10\n\ninf,11\n1024,12\n",
            "line 4: global_batch_size is inf; give a number from 1 to",
        ),
        (
            "global_batch_size,epochs\n256,10\n1e300,11\n1024,12\n",
            "line 3: global_batch_size is 1e300; give a number",
        ),
        ("global_batch_size,epochs\n256,10\n512,nan\n1024,12\n", "line 3: epochs is nan; give a number"),
        ("global_batch_size,epochs\n256,10\n512\n1024,12\n", "line 3: epochs is ''; give a number"),
        ("global_batch_size,epochs,top1\n256,10,nan\n512,10,1\n", "line 2: top1 is nan; give a number from 0 to 100"),
        ("global_batch_size,epochs\n1000,10\n1001,11\n1002,12\n", "differ by 10%"),
        (
            "global_batch_size,epochs\n1024,90\n32768,45\n65536,44\n",
            "epochs fall from 90 at global batch 1,024 to 44 at 65,536",
        ),
        ("global_batch_size,epochs\n100,1\n1000,1\n100000,1e6\n", "contradicts the law"),
        ("global_batch_size,epochs_to_target\n256,10\n512,\n1024,12\n", "2 points at 2 global batches"),
        ("", "it needs global_batch_size"),
    ],
)
def test_studies_that_say_nothing_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "study.csv").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=words) as caught:
        read_study(tmp_path / "study.csv", 0.9)
    assert "\n" not in str(caught.value)


def test_a_slight_fall_is_a_constant_with_its_real_scatter() -> None:
    epochs = [100.0, 103.0, 94.0, 96.0]
    law = fit_law(list(zip((1000.0, 4000.0, 16_000.0, 64_000.0), epochs, strict=True)), "made up")
    assert law.batches == (1000.0, 64_000.0)
    assert law.critical_batch == np.inf
    mean = np.log(epochs).mean()
    scatter = np.sqrt((4 * np.log(epochs).var() + 3 * 0.05**2) / (3 + 3))
    for batch in (1000.0, 30_000.0):
        here = law.at(batch)
        assert here.epochs == pytest.approx(np.exp(mean))
        # A new run scatters as the others do, around a mean of four.
        assert here.deviation == pytest.approx(scatter * np.sqrt(1 + 1 / 4))


def test_repeats_tell_chance_from_a_fall() -> None:
    random = np.random.default_rng(6)
    batches = np.repeat([256.0, 1024.0, 4096.0], 4)
    noise = random.standard_normal(12)

    def fall(of: float, scatter: float) -> list[tuple[float, float]]:
        epochs = 50 * np.exp(scatter * noise) * np.repeat([1.0, 1 - of / 2, 1 - of], 4)
        return list(zip(batches.tolist(), epochs.tolist(), strict=True))

    with pytest.raises(DataError, match="tuned at each batch"):
        fit_law(fall(0.15, 0.01), "made up")
    assert fit_law(fall(0.15, 0.20), "made up").scatter > 0.1
    with pytest.raises(DataError, match="epochs fall"):
        fit_law(fall(0.6, 0.20), "made up")


def test_stages_keep_their_parts_of_the_way() -> None:
    """Half the epochs at each batch: the way is 1 / (0.5 / E(a) + 0.5 / E(b)) epochs long."""
    law = mlperf_law()
    stages = parse_stages("0:4096 45:32768")
    whole = 1 / (0.5 / law.at(4096).epochs + 0.5 / law.at(32768).epochs)
    assert law.whole(stages, 90) == pytest.approx(whole)
    assert law.for_stages(stages.stretched(whole / 90)).epochs == pytest.approx(whole)
    assert law.whole(parse_stages(8192), 90) == pytest.approx(law.at(8192).epochs)
