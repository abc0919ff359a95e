from benchmarks.grid_4096 import GridCost, table_lines


def test_one_row_per_world_with_median_and_spread() -> None:
    costs = [GridCost(4096, seconds, 1024 * 860, 2, 0.05) for seconds in (0.003, 0.001, 0.002)]
    lines = table_lines([*costs, GridCost(16, 0.001, 1024, 2, 0.001)])
    assert lines[2].startswith("| 16 | 4x4 | 1.00 [1.00-1.00] | 1.00 ")
    assert lines[3] == "| 4096 | 64x64 | 2.00 [1.00-3.00] | 860.00 [860.00-860.00] | 2 | 50.00 [50.00-50.00] | 3 |"
