"""How a run is cut into trunk and branches."""

from __future__ import annotations

from megabatch.schedule.phases import Phase, branch_seed, plan_phases


def test_a_run_without_branches_is_one_phase() -> None:
    assert plan_phases(90.0) == (Phase(0, 0, 90.0, False),)
    assert plan_phases(90.0)[0].name == "trunk"


def test_codreanus_cycles() -> None:
    """Phases end at 25, 37, 52 and 67, momentum starts anew in each, and a branch leaves at the end of each cycle."""
    phases = plan_phases(67.0, (37.0, 52.0, 67.0), 5.0, (25.0, 37.0, 52.0))
    assert [(p.name, p.until_epoch, p.reset_momentum) for p in phases] == [
        ("trunk", 25.0, False),
        ("trunk", 37.0, True),
        ("collapse-1", 5.0, True),
        ("trunk", 52.0, True),
        ("collapse-2", 5.0, True),
        ("trunk", 67.0, True),
        ("collapse-3", 5.0, True),
    ]
    assert [p.number for p in phases] == list(range(7))
    assert [p.is_branch for p in phases] == [False, False, True, False, True, False, True]


def test_a_branch_before_the_end_lets_the_trunk_go_on() -> None:
    phases = plan_phases(10.0, (4.0,), 2.0, (), collapse_resets_momentum=False)
    assert [(p.name, p.until_epoch, p.reset_momentum) for p in phases] == [
        ("trunk", 4.0, False),
        ("collapse-1", 2.0, False),
        ("trunk", 10.0, False),
    ]


def test_seeds_of_branches_are_their_own_and_stay_what_they_are() -> None:
    assert branch_seed(7, 0) == 7
    seeds = {branch_seed(seed, member) for seed in range(50) for member in range(6)}
    assert len(seeds) == 50 * 6
    assert all(0 <= seed < 2**63 for seed in seeds)
    # A run that is resumed years later must find the same images.
    assert branch_seed(0, 1) == 28940085870209527
