import pytest

from benchmarks.allreduce_networks import ALGORITHMS, GRIDS, main, planned_cells
from megabatch.comm.phases import ALGORITHMS as KNOWN


def test_the_largest_message_is_planned_where_it_is_promised() -> None:
    sizes = {name: [cell.message_bytes for cell in planned_cells(name, None, None, ALGORITHMS)] for name in GRIDS}
    assert sizes["shared-nic"] == sizes["nic-per-rank"] == [100_000, 1_000_000, 10_000_000, 100_000_000]
    assert sizes["equal-hosts"] == sizes["loopback"] == [100_000, 1_000_000, 10_000_000]


def test_algorithms_that_flood_the_network_are_left_out_of_large_cells() -> None:
    small, large = planned_cells("shared-nic", [100_000, 100_000_000], None, [*ALGORITHMS, "exchange@1000"])
    assert set(small.algorithms) == {*ALGORITHMS, "exchange@1000"}
    assert not {"exchange", "exchange@1000", "two_way_torus"} & set(large.algorithms)
    assert {"backend", "ring", "torus", "auto"} <= set(large.algorithms)


def test_given_iterations_win_and_odd_sizes_take_those_of_the_size_below() -> None:
    assert [cell.iterations for cell in planned_cells("loopback", [400, 2_000_000], None, ["ring"])] == [30, 15]
    assert planned_cells("loopback", [400], 2, ["ring"])[0].iterations == 2


def test_every_algorithm_of_the_library_is_measured() -> None:
    assert set(ALGORITHMS) == {*KNOWN, "auto"}


def test_an_unknown_network_ends_with_one_line() -> None:
    with pytest.raises(SystemExit, match="no network is called 'token-ring'; choose of shared-nic"):
        main(["--networks", "token-ring"])
