"""Digests say which weights they are of; an audit finds a flipped bit and names who computed it."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megabatch.comm.shape import near_square
from megabatch.data.loader import Ghost
from megabatch.errors import ConfigError
from megabatch.train.audit import weights_digest
from megabatch.train.components import build_components
from megabatch.train.metrics import Stopwatch
from megabatch.train.passes import warm_up_pass
from megabatch.workers.world import World
from tests.ranks import RankFailureError, run_ranks
from tests.system.runs import rows_of, small_config, train_on_ranks
from tests.train.test_step import control_of, images_and_labels, train_step

HOST = socket.gethostname()


def network() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(8, 5))
    weight = model.get_parameter("0.weight")
    weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    return model


def digest_of(model: nn.Module, running: float = 0.0) -> str:
    return weights_digest(model.state_dict(), {"running": torch.full((4,), running), "steps": 3})


def test_a_digest_depends_on_every_bit_and_its_place(tmp_path: Path) -> None:
    expected = digest_of(network())
    assert re.fullmatch("[0-9a-f]{64}", expected)
    assert digest_of(network()) == expected
    seen = {expected, digest_of(network(), 1.0)}
    for name, parameter in network().named_parameters():
        model = network()
        flat = model.get_parameter(name).data.as_strided((parameter.numel(),), (1,)).view(torch.int32)
        flat[-1] ^= 1
        seen.add(digest_of(model))
        flat[-1] ^= 1
        flat[:2] = flat[:2].flip(0)
        seen.add(digest_of(model))
    assert len(seen) == 2 + 2 * 6 - 2  # weight and bias of a fresh norm hold equal numbers: swapping changes nothing

    model = network()
    model.get_buffer("1.running_mean").fill_(7.0)  # what the newest ghost batch of a rank left there
    assert digest_of(model) == expected
    torch.save(model.state_dict(), tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert weights_digest(loaded, {"running": torch.zeros(4)}) == expected


def test_digests_of_a_run_do_not_depend_on_workers_or_audits(tmp_path: Path) -> None:
    found = []
    for world_size, settings in ((1, ()), (3, ("train.audit_every_steps=1", "comm.algorithm=torus"))):
        folder = tmp_path / str(world_size)
        every = ("train.digest_every_steps=3", "checkpoint.every_steps=4", "train.max_steps=7")
        train_on_ranks(world_size, folder, *every, *settings)
        found.append([(row["step"], row["weights_digest"]) for row in rows_of(folder) if "weights_digest" in row])
    assert found[0] == found[1]
    assert [step for step, _ in found[0]] == [3, 4, 6, 7]  # every third, at the checkpoint, at the end
    assert len({digest for _, digest in found[0]}) == 4


ALWAYS, IN_PASSES, IN_AUDITS = (True, False), (False,), (True,)


def train_with_flips(
    rank: int, world_size: int, flips: Mapping[int, tuple[bool, ...]], settings: tuple[str, ...]
) -> int:
    """Six steps, every second audited; `flips` says in which gradients of a rank, of audits or not, a bit is wrong."""
    config = small_config("train.audit_every_steps=2", "train.epochs=10", *settings)
    world = World(rank, world_size, rank, world_size, "torchrun", "127.0.0.1", 0)
    components = build_components(config, world, near_square(world_size), torch.device("cpu"))
    warm_up_pass(components)
    through_ddp = in_audit = False
    parameter = next(p for p in components.network.parameters() if p.numel() > 1000)

    def enter_ddp(*_: object) -> None:
        nonlocal through_ddp
        through_ddp = True

    def enter_network(*_: object) -> None:
        nonlocal through_ddp, in_audit
        through_ddp, in_audit = False, not through_ddp

    def flip(gradient: Tensor) -> Tensor:
        if in_audit in flips.get(rank, ()):
            gradient = gradient.clone()
            gradient.view(torch.int32)[0, 1, 2, 0] ^= 1 << 22
        return gradient

    components.ddp.register_forward_pre_hook(enter_ddp)
    components.network.register_forward_pre_hook(enter_network)
    parameter.register_hook(flip)
    images, labels = images_and_labels()
    num_steps = 0
    for step in islice(control_of(config, rank, world_size), 6):
        ghosts = [Ghost(images[p], labels[p], p.start // 8, idle=step.is_idle) for p in step.ghosts]
        assert train_step(components, step, ghosts, 0, Stopwatch(host_clock_tells=True)) is not None
        num_steps += 1
    return num_steps


def failure_of(world_size: int, flips: Mapping[int, tuple[bool, ...]], *settings: str) -> str:
    with pytest.raises(RankFailureError) as caught:
        run_ranks(world_size, train_with_flips, world_size, flips, settings)
    lines: list[str] = re.findall(r"TrainingError: (the audit .*)", str(caught.value))
    assert lines == lines[:1] * world_size, str(caught.value)  # told on every rank, in the same words
    return lines[0]


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("settings", [(), ("train.global_batch_size=16",), ("train.precision=bf16",)])
def test_without_a_flip_all_audits_agree(world_size: int, settings: tuple[str, ...]) -> None:
    assert run_ranks(world_size, train_with_flips, world_size, {}, settings) == [6] * world_size


@pytest.mark.parametrize("algorithm", ["backend", "ring"])
def test_a_rank_that_computes_wrongly_is_named(algorithm: str) -> None:
    for bad in (0, 2):
        line = failure_of(3, {bad: ALWAYS}, f"comm.algorithm={algorithm}")
        assert line.startswith("the audit of step 2 failed: ghost batch ")
        assert f"and rank {bad} on {HOST} computed another gradient for it than rank {1 if bad == 0 else 0} on" in line
        assert "the step was not applied" in line


def test_two_ranks_that_disagree_are_both_named() -> None:
    line = failure_of(2, {1: ALWAYS})
    assert f"rank 0 on {HOST}" in line
    assert f"rank 1 on {HOST}" in line


@pytest.mark.parametrize("when", [IN_PASSES, IN_AUDITS])
def test_one_rank_alone_finds_a_gradient_that_does_not_repeat(when: tuple[bool, ...]) -> None:
    line = failure_of(1, {0: when})
    assert f"rank 0 on {HOST} computed another gradient for it than when it was computed again" in line


def test_a_flip_for_a_moment_is_found_in_what_was_summed() -> None:
    line = failure_of(2, {0: IN_PASSES, 1: IN_PASSES})  # whoever holds the ghost batch that is drawn
    held_by = re.search(r"held by rank (\d)", line)
    assert held_by
    other = 1 - int(held_by[1])
    assert f"and rank {held_by[1]} on {HOST} computed another gradient for it than rank {other} on {HOST}" in line


def test_an_audit_needs_exact_sums() -> None:
    with pytest.raises(ConfigError, match=r"train\.audit_every_steps 5 compares integers.*comm\.sums=exact"):
        small_config("train.audit_every_steps=5", "comm.sums=float")
