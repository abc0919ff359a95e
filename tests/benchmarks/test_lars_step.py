from benchmarks.lars_step import verdict


def test_the_verdict_is_the_median_of_ratios_within_rounds() -> None:
    seconds = {
        "megabatch LARS, paper": [2.0, 1.0, 4.0],
        "torch SGD, foreach": [4.0, 4.0, 4.0],
        "LARS, loop over parameters": [6.0, 6.0, 6.0],
        "torch SGD, fused": [1.0, 2.0, 3.0],
    }
    assert verdict({"seconds": seconds}) == {"over_foreach_sgd": 0.5, "under_loop": 3.0, "bound_under_loop": 3.0}
