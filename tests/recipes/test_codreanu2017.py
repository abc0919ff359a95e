"""Codreanu's two runs, step by step: the iterations and rates of the authors' solver files."""

from __future__ import annotations

import pytest

from megabatch.optim.build import scheduled_at
from megabatch.recipes import load_config
from megabatch.recipes.scale import over_epochs
from megabatch.schedule.batch import Step
from megabatch.train.phases import TrainingPhase, control_of, phases_of, resolved, start_clock

IMAGES = 1_281_167


def walk(name: str) -> list[tuple[TrainingPhase, list[Step]]]:
    """Every phase of the recipe with all its steps."""
    config = load_config(name)
    trunk, found = start_clock(config, phases_of(config)[0], IMAGES), []
    for one in phases_of(config):
        phase = resolved(one, config, trunk)
        clock = start_clock(config, phase, IMAGES) if phase.is_branch else trunk
        steps = list(control_of(config, phase, clock))
        found.append((phase, steps))
        if not phase.is_branch:
            for step in steps:
                trunk = trunk.after(step.num_samples)
    return found


def lr(phase: TrainingPhase, step: Step) -> float:
    return scheduled_at(phase.optimizer, step.epoch)["lr"]


def test_the_448_node_run() -> None:
    (trunk, steps), (branch, collapse) = walk("codreanu2017")
    assert (len(steps), len(collapse)) == (7638, 402)
    assert {step.num_samples for step in [*steps, *collapse]} == {14336}
    for iteration in (0, 100, 445):
        assert lr(trunk, steps[iteration]) == pytest.approx(0.1 + (4.8 - 0.1) * iteration / 446, rel=1e-3)
    for iteration in (446, 4000, 7637):
        assert lr(trunk, steps[iteration]) == pytest.approx(4.8 * (1 - iteration / 8040), rel=1e-3)
    for iteration in (0, 200, 401):
        assert lr(branch, collapse[iteration]) == pytest.approx(0.254 * (1 - iteration / 402) ** 2, rel=1e-2)
    assert branch.reset_momentum
    assert scheduled_at(trunk.optimizer, 50.0)["weight_decay"] == 5e-5
    assert scheduled_at(branch.optimizer, 2.0)["weight_decay"] == 1e-4
    assert (branch.augment.crop, branch.augment.flip) != (trunk.augment.crop, False)


def test_the_cyclic_run_and_its_three_branches() -> None:
    phases = walk("codreanu2017_cyclic")
    assert [(phase.name, len(steps)) for phase, steps in phases] == [
        ("trunk", 7800),
        ("trunk", 3750),
        ("collapse-1", 1560),
        ("trunk", 4750),
        ("collapse-2", 1560),
        ("trunk", 4750),
        ("collapse-3", 1560),
    ]
    assert {step.num_samples for _, steps in phases for step in steps} == {4096}
    assert [phase.reset_momentum for phase, _ in phases] == [False] + [True] * 6
    # (phase, iteration within it, rate): the ends are those of the papers' table, the rest the solver's own formula.
    table = [
        (0, 0, 0.1), (0, 1560, 1.6 * (1 - 1560 / 18720)), (0, 7799, 0.933),
        (1, 0, 1.02), (1, 3749, 0.255),
        (3, 0, 0.255), (3, 500, (0.255 + 0.764) / 2), (3, 1000, 0.764 * (1 - 1000 / 7500) ** 2), (3, 4749, 0.103),
        (5, 0, 0.19), (5, 1000, 0.572 * (1 - 1000 / 7500) ** 2), (5, 4749, 0.077),
        (2, 0, 0.143), (4, 780, 0.143 / 4), (6, 1559, 0.143 * (1 / 1560) ** 2),
    ]  # fmt: skip
    for number, iteration, expected in table:
        phase, steps = phases[number]
        assert lr(phase, steps[iteration]) == pytest.approx(expected, rel=5e-3), (number, iteration)
    assert {scheduled_at(s.optimizer, 1.0)["weight_decay"] for s, _ in phases if s.is_branch} == {2e-4}


@pytest.mark.parametrize("name", ["codreanu2017", "codreanu2017_cyclic"])
@pytest.mark.parametrize("epochs", [6.7, 8.0, 24.0])
def test_a_run_of_other_length_keeps_its_branches(name: str, epochs: float) -> None:
    config = over_epochs(load_config(name), epochs)
    phases, published = phases_of(config), phases_of(load_config(name))
    assert [(p.name, p.reset_momentum) for p in phases] == [(p.name, p.reset_momentum) for p in published]
    assert max(p.until_epoch for p in phases if not p.is_branch) == epochs
