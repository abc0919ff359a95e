import torch

from benchmarks.allreduce_rank import CellPlan, contribution, exact_sum, parse_algorithm
from megabatch.comm.price import DEFAULT_SEGMENT_BYTES


def test_exact_sum_is_the_sum_of_different_contributions() -> None:
    for numel in (1, 8191, 20_000):
        parts = [contribution(rank, numel).to(torch.float64) for rank in range(16)]
        assert torch.equal(torch.stack(parts).sum(0), exact_sum(16, numel).to(torch.float64))
    assert not torch.equal(contribution(0, 100), contribution(1, 100))


def test_a_missing_or_doubled_rank_changes_the_sum() -> None:
    total = exact_sum(16, 1000)
    for rank in range(16):
        assert not torch.equal(total - contribution(rank, 1000), total)
        assert not torch.equal(total - contribution(rank, 1000) + contribution((rank + 1) % 16, 1000), total)


def test_an_algorithm_may_carry_its_segment_size() -> None:
    assert parse_algorithm("torus@65536") == ("torus", 65536)
    assert parse_algorithm("ring") == ("ring", DEFAULT_SEGMENT_BYTES)


def test_every_cell_has_a_warm_up_in_which_it_is_checked() -> None:
    assert CellPlan(100_000, 3, ("ring",)).warm_ups == 2
    assert CellPlan(100_000_000, 1, ("ring",)).warm_ups == 1
