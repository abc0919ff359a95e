"""Elastic runs under faults of different kinds, as `benchmarks.chaos` makes twenty of."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from benchmarks import chaos, disturbed
from benchmarks.netlab import unavailable_reason

pytest.importorskip("torchft", reason="torchft is an extra: pip install megabatch[elastic]")

STEPS = 250
FAULTS = (
    "kill the main rank",
    "join",
    "kill inside an all-reduce",
    "hang the main rank",
    "kill while a checkpoint is written",
)


@pytest.mark.slow
def test_a_run_under_faults_ends_with_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    wanted = disturbed.undisturbed(tmp_path, STEPS)
    faults = [(20 + 40 * number, 0.05 * number, kind) for number, kind in enumerate(FAULTS)]
    done = chaos.make(tmp_path / "disturbed", "1", faults, STEPS, wanted)
    assert done["problem"] == "", (tmp_path / "disturbed" / "told").read_text()
    assert [fault["kind"] for fault in done["faults"]] == list(FAULTS)


HARSH = (
    "full disk, resume",
    "kill all, damage the newest checkpoint, resume",
    "stop and resume",
    "leave",
)
SEED = os.environ.get("CHAOS_SEED", "1")


def random_order(kinds: tuple[str, ...], steps: int) -> list[tuple[int, float, str]]:
    """Each of these faults once, in an order and at steps that the seed decides."""
    chance, between = random.Random(SEED), steps * 0.8 / len(kinds)
    order = chance.sample(kinds, len(kinds))
    return [
        (int(5 + between * (place + chance.random())), 0.2 * chance.random(), kind) for place, kind in enumerate(order)
    ]


@pytest.mark.slow
def test_disks_damage_stops_and_leaves_in_a_random_order_cost_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`CHAOS_SEED=7 pytest ...` tries another order. Most of the time goes into starting workers again."""
    monkeypatch.setattr(disturbed, "WORKERS", 3)
    steps = 120
    wanted, faults = disturbed.undisturbed(tmp_path, steps), random_order(HARSH, steps)
    done = chaos.make(tmp_path / "disturbed", SEED, faults, steps, wanted)
    assert done["problem"] == "", f"seed {SEED}: {faults}\n{(tmp_path / 'disturbed' / 'told').read_text()}"
    assert [fault["kind"] for fault in done["faults"]] == [kind for _, _, kind in faults]


@pytest.mark.slow
@pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
def test_a_host_that_is_cut_off_costs_no_bit_of_lars(tmp_path: Path) -> None:
    wanted = disturbed.undisturbed(tmp_path, STEPS, "lars")
    faults = [(20, 0.0, "cut a host off"), (90, 0.0, "kill the main rank"), (150, 0.0, "cut a host off for a moment")]
    done = chaos.make(tmp_path / "disturbed", "1", faults, STEPS, wanted, optimizer="lars", on_hosts=True)
    assert done["problem"] == "", (tmp_path / "disturbed" / "told").read_text()
    assert len(done["faults"]) == len(faults)


def test_faults_that_need_hosts_come_only_there() -> None:
    def kinds(weights: dict[str, int]) -> set[str]:
        return {kind for seed in range(50) for _, _, kind in chaos.schedule(random.Random(seed), 5, STEPS, weights)}

    assert kinds(chaos.WEIGHTS) == set(chaos.WEIGHTS)
    on_hosts = kinds(chaos.WEIGHTS_ON_HOSTS)
    assert on_hosts == {*chaos.CUTS, *chaos.WEIGHTS_ON_HOSTS}
    assert not {"join", "kill every worker"} & on_hosts
    assert not any(kind.endswith("resume") for kind in on_hosts)
