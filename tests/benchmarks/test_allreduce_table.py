import random
import statistics

import pytest

from benchmarks.allreduce_table import (
    TARGETS,
    AutoShare,
    CellResult,
    Timing,
    auto_against_best,
    nominal_links,
    predicted_seconds,
    prediction_lines,
    result_lines,
)
from benchmarks.netlab.network import NETWORKS
from megabatch.comm.calibration import AxisCost, Calibration, MeasuredPoint
from megabatch.comm.shape import GridShape

SHAPE = GridShape((4, 4))


def timing(milliseconds: float) -> Timing:
    return Timing.of([[milliseconds / 1e3] * 5])


def cell(**milliseconds: float) -> CellResult:
    return CellResult("shared-nic", 100_000, {name: timing(value) for name, value in milliseconds.items()})


def assert_share(found: AutoShare | None, best: str, reaches: float, twin: float) -> None:
    assert found is not None
    assert found.best == best
    assert [found.reaches, found.twin] == pytest.approx([reaches, twin])


def test_the_slowest_rank_decides_each_iteration() -> None:
    # Two ranks, three iterations: slowest are 4, 5, 9.
    assert Timing.of([[1.0, 5.0, 9.0], [4.0, 2.0, 3.0]]) == Timing(5.0, 4.0, 9.0, 3)


def test_ranks_with_different_numbers_of_iterations_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        Timing.of([[1.0, 2.0], [1.0]])


def test_the_two_ratios_are_kept_apart() -> None:
    content = cell(backend=120, ring=60, torus=40).as_json()
    assert content["against_gloo"] == pytest.approx(3.0)
    assert content["like_for_like"] == pytest.approx(1.5)
    assert (content["against_gloo_target"], content["like_for_like_target"]) == TARGETS["shared-nic", 100_000]


def test_auto_is_compared_with_the_best_named_algorithm() -> None:
    measured = cell(backend=120, torus=40, direct=30, auto=40)
    assert_share(measured.auto, "direct", 0.75, 1.0)
    # Auto itself may not become the best one to compare with.
    assert cell(backend=120, auto=20).best == "backend"
    assert cell(backend=120, torus=20).best == "torus"
    assert cell(backend=120, torus=20).auto is None


def test_rounds_that_choose_the_best_do_not_compare_it() -> None:
    """Each is lucky in half of the rounds: by all medians of a half it would be twice as fast as `auto`, and is not."""
    seconds = {
        "torus": [1.0, 4.0, 1.0, 4.0],  # the best of the first, third, ... round
        "direct": [4.0, 2.0, 4.0, 2.0],  # and of the others
        "auto": [2.0, 2.0, 2.0, 2.0],
    }
    # torus is compared on 4.0 against 2.0, direct on 4.0 against 2.0: both slower than auto.
    assert_share(auto_against_best(seconds), "torus or direct", 2.0, 1.0)


def test_the_twin_is_the_best_between_halves_of_the_rounds_that_compare() -> None:
    seconds = {
        "ring": [9.0] * 8,
        "torus": [1.0, 2.0, 4.0, 2.0, 1.0, 3.0, 4.0, 3.0],
        "auto": [4.0] * 8,
    }
    # First half 1 4 1 4, chosen with 2.5; second 2 2 3 3, chosen with 2.5. On the second: 2.5 / 4, itself 2.5 / 2.5; on
    # the first: 2.5 / 4, itself 1 / 4. The geometric mean of 1 and 1/4 is 1/2.
    assert_share(auto_against_best(seconds), "torus", 0.625, 0.5)


def test_luck_among_equals_does_not_make_auto_slower() -> None:
    """Nine equal algorithms with noise: the best of eight medians looks faster than `auto`, the chosen one does not."""
    chance, shares, naive = random.Random(0), [], []
    for _ in range(200):
        seconds = {name: [chance.lognormvariate(0, 0.3) for _ in range(20)] for name in [*"abcdefgh", "auto"]}
        found = auto_against_best(seconds)
        assert found is not None
        shares.append(found.reaches)
        best = min(statistics.median(rounds) for name, rounds in seconds.items() if name != "auto")
        naive.append(best / statistics.median(seconds["auto"]))
    assert statistics.mean(naive) < 0.92
    assert 0.98 < statistics.mean(shares) < 1.03


def test_too_few_rounds_say_nothing() -> None:
    assert auto_against_best({"torus": [1.0], "auto": [1.0]}) is None
    assert auto_against_best({"auto": [1.0, 1.0]}) is None
    assert auto_against_best({"torus": [1.0, 1.0], "auto": [2.0, 2.0]}) == AutoShare("torus", 0.5, None)


def test_what_was_not_measured_has_no_ratio() -> None:
    assert cell(backend=120, torus=40).ratio("ring", "torus") is None
    assert "| - (1.30) |" in result_lines([cell(backend=120, torus=40)])[2]


def test_nominal_links_follow_the_wiring() -> None:
    shared, inside = nominal_links(NETWORKS["shared-nic"], SHAPE)
    assert (shared.latency_seconds, shared.bytes_per_second, shared.ranks_per_link) == (0.002, 25e6, 4)
    assert inside.latency_seconds == 0
    own, _ = nominal_links(NETWORKS["nic-per-rank"], SHAPE)
    assert (own.bytes_per_second, own.ranks_per_link) == (12.5e6, 1)
    column, row = nominal_links(NETWORKS["equal-hosts"], SHAPE)
    assert column == row
    assert row.latency_seconds == 0.005


def test_cable_price_of_the_torus_is_the_closed_form() -> None:
    # 10 MB: six column hops of 2 ms; 1.5 of a quarter message per rank, four ranks to a NIC of 25 MB/s.
    price = predicted_seconds(["torus@100000000"], "4x4", 10_000_000, None, NETWORKS["shared-nic"])
    assert price["cable"]["torus@100000000"] == pytest.approx(6 * 0.002 + 1.5 * 10e6 / 25e6, rel=0.01)


def test_measured_prices_take_the_backend_from_its_points_and_leave_auto_out() -> None:
    axes = (AxisCost(0.002, 25e6, ranks_per_link=4, name="column", size=4), AxisCost(0.0001, 1e9, name="row", size=4))
    points = (MeasuredPoint("backend", 10_000, 0.1), MeasuredPoint("backend", 1_000_000, 0.2))
    calibration = Calibration("4x4", 4, "gloo", axes, points)
    prices = predicted_seconds(["backend", "torus", "auto"], "4x4", 1_000_000, calibration, None)
    assert set(prices) == {"measured"}
    assert set(prices["measured"]) == {"backend", "torus"}
    assert prices["measured"]["backend"] == pytest.approx(0.2)


def test_prediction_errors_have_a_sign() -> None:
    measured = CellResult("shared-nic", 100_000, {"torus": timing(40)}, predicted={"measured": {"torus": 0.030}})
    lines = prediction_lines([measured])
    assert lines[2] == "| shared-nic | 100 KB | torus | 40.0 | 30.0 | -25% | - | - |"
    assert lines[-1].endswith("median 25%, greatest 25%")
