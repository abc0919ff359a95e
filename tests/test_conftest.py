"""Tests that share something run in one process."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import TOGETHER, group_of


def test_files_that_share_a_process_exist_and_are_grouped() -> None:
    for path in TOGETHER:
        assert (Path(__file__).parent / path).exists(), path
        assert group_of(f"tests/{path}::test_a[1]") == group_of(f"tests/{path}::test_b") == path
    assert group_of("tests/benchmarks_netlab/test_a.py::test_a") == group_of(
        "tests/benchmarks_netlab/test_b.py::test_b"
    )
    assert group_of("tests/test_repo.py::test_a") != group_of("tests/test_repo.py::test_b")
