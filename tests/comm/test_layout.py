"""Ranks agree on a layout through a store: threads stand in for ranks."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from megabatch.comm.layout import agree_on_grid, host_name
from megabatch.errors import GridError, LaunchError, MegabatchError

Layout = tuple[tuple[str, ...], str, str]


def _ask(hosts: str, shapes: Sequence[str], absent: int | None = None) -> list[Layout | MegabatchError]:
    store = HashStore()

    def rank_asks(rank: int) -> Layout | MegabatchError:
        try:
            return agree_on_grid(store, rank, len(hosts), shapes[rank], hosts[rank], 1.0)
        except MegabatchError as error:
            return error

    with ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(rank_asks, [rank for rank in range(len(hosts)) if rank != absent]))


def test_a_given_shape_is_kept_and_hosts_are_known() -> None:
    answers = _ask("aabb", ["4x1"] * 4)
    assert answers == [(("a", "a", "b", "b"), "4x1", "as given")] * 4


def test_without_a_shape_hosts_become_rows() -> None:
    assert _ask("aaabbb", [""] * 6)[3] == (tuple("aaabbb"), "2x3", "one host per row")


def test_without_a_shape_and_with_uneven_hosts_the_grid_is_near_square() -> None:
    answer = _ask("aaaabb", [""] * 6)[5]
    assert isinstance(answer, tuple)
    assert answer[1] == "2x3"
    assert answer[2].startswith("near square")


def test_different_shapes_end_everywhere_with_one_reason() -> None:
    errors = _ask("aabb", ["2x2", "2x2", "4x1", "2x2"])
    assert all(isinstance(error, GridError) for error in errors)
    assert {str(error) for error in errors} == {
        "grid shapes differ between workers (2x2 on rank 0, 1, 3; 4x1 on rank 2); give every worker the same shape"
    }


def test_a_rank_that_does_not_come_is_named_by_all_others() -> None:
    errors = _ask("aabb", ["2x2"] * 4, absent=2)
    assert len(errors) == 3
    assert all(isinstance(error, LaunchError) for error in errors)
    assert {str(error) for error in errors} == {"no grid: rank 2 did not come within 1 s; look at its log"}


def test_a_missing_rank_0_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megabatch.comm.layout.RANK_0_GRACE_SECONDS", 0.2)
    errors = _ask("ab", ["1x2"] * 2, absent=0)
    assert [str(error) for error in errors] == [
        "rank 0 did not say within 1 s how the grid lies; look at the log of rank 0"
    ]


def test_host_name_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGABATCH_HOST", "node7")
    assert host_name() == "node7"
    monkeypatch.delenv("MEGABATCH_HOST")
    assert host_name()
