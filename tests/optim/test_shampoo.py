"""Shampoo against a reference in float64, alone and on several ranks."""

from __future__ import annotations

import hashlib
import importlib
import json
from copy import deepcopy
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from scipy.linalg import fractional_matrix_power
from torch import Tensor, nn

from megabatch.errors import ConfigError
from megabatch.optim.groups import parameter_groups
from megabatch.optim.shampoo import Shampoo
from tests.ranks import run_ranks

Array = NDArray[np.float64]

# By parameter: its shape without small dimensions, and where its dimensions are cut for blocks of at most 4.
SHAPES = {
    (6, 5): ((6, 5), ((0, 3, 6), (0, 3, 5))),
    (4, 3, 2, 2): ((4, 3, 4), ((0, 4), (0, 3), (0, 4))),
    (7,): ((7,), ((0, 4, 7),)),
}
SETTINGS: dict[str, Any] = {"block_size": 4, "every_steps": 3, "start_steps": 2, "beta2": 0.7, "eps": 1e-3}


def weights_and_gradients(steps: int, dtype: torch.dtype) -> tuple[list[nn.Parameter], list[list[Tensor]]]:
    torch.manual_seed(3)
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    return params, [[torch.randn(shape).to(dtype) for shape in SHAPES] for _ in range(steps)]


def unfolded(block: Array, dim: int) -> Array:
    return np.moveaxis(block, dim, 0).reshape(block.shape[dim], -1)


def reference(
    weight: Array, grads: list[Array], lrs: list[float], momentum: float, decay: float, nesterov: bool
) -> Array:
    """The formulas at the head of `shampoo.py`, block by block, with blocks and roots found in another way."""
    shape, cuts = SHAPES[weight.shape]
    places = [tuple(slice(*ends) for ends in one) for one in product(*(list(pairwise(cut)) for cut in cuts))]
    w, v = weight.reshape(shape).copy(), np.zeros(shape)
    statistics: dict[tuple[int, int], Any] = {(n, d): 0.0 for n in range(len(places)) for d in range(len(shape))}
    roots: dict[tuple[int, int], Array] = {}
    for step, (lr, gradient) in enumerate(zip(lrs, grads, strict=True)):
        g = gradient.reshape(shape)
        if step >= 2 and (step - 2) % 3 == 0:
            for key, matrix in statistics.items():
                damped = matrix + 1e-3 * np.linalg.norm(matrix, 2) * np.eye(len(matrix))
                roots[key] = np.real(fractional_matrix_power(damped, -0.25))
        move = g.copy()
        if step >= 2:
            for n, place in enumerate(places):
                for d in range(len(shape)):
                    move[place] = np.moveaxis(np.tensordot(roots[n, d], move[place], (1, d)), 0, d)
            move *= np.linalg.norm(g) / np.linalg.norm(move)
        for n, place in enumerate(places):
            for d in range(len(shape)):
                flat = unfolded(g[place], d)
                statistics[n, d] = 0.7 * statistics[n, d] + 0.3 * flat @ flat.T
        move = move + decay * w
        v = momentum * v + move
        w = w - lr * (move + momentum * v if nesterov else v)
    return w.reshape(weight.shape)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_twelve_steps_are_those_of_the_reference(dtype: torch.dtype, tolerance: float, nesterov: bool) -> None:
    params, grads = weights_and_gradients(12, dtype)
    lrs = [0.01 * (1 + step) for step in range(12)]
    wanted = [
        reference(p.detach().double().numpy(), [step[n].double().numpy() for step in grads], lrs, 0.9, 0.1, nesterov)
        for n, p in enumerate(params)
    ]
    optimizer = Shampoo(params, 1.0, 0.9, 0.1, nesterov=nesterov, **SETTINGS)
    for lr, step in zip(lrs, grads, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        take(optimizer, params, step)
    for p, expected in zip(params, wanted, strict=True):
        torch.testing.assert_close(p.detach().double(), torch.from_numpy(expected), rtol=tolerance, atol=tolerance)


def take(optimizer: Shampoo, params: list[nn.Parameter], grads: list[Tensor]) -> None:
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    optimizer.step()


def test_a_step_is_as_long_as_sgds_and_goes_elsewhere() -> None:
    params, grads = weights_and_gradients(6, torch.float64)
    optimizer = Shampoo(params, 0.1, 0.0, **SETTINGS)
    for number, step in enumerate(grads):
        before = [p.detach().clone() for p in params]
        take(optimizer, params, step)
        for p, old, g in zip(params, before, step, strict=True):
            move = old - p.detach()
            assert move.norm().item() == pytest.approx(0.1 * g.norm().item(), rel=1e-9)
            assert torch.allclose(move, 0.1 * g) == (number < 2)


def test_a_badly_scaled_problem_comes_further_than_with_sgd() -> None:
    """A quadratic whose curvatures lie four orders of magnitude apart, in a basis that is not that of the weights."""
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64)).Q
    curvature = (basis * torch.logspace(-4, 0, 8, dtype=torch.float64)) @ basis.T
    start = torch.randn(8, 3, dtype=torch.float64)
    left = {}
    for kind in ("sgd", "shampoo"):
        weight = nn.Parameter(start.clone())
        optimizer: torch.optim.Optimizer
        if kind == "sgd":
            optimizer = torch.optim.SGD([weight], 1.0)
        else:
            optimizer = Shampoo([weight], 1.0, 0.0, every_steps=1, start_steps=1, beta2=0.9, eps=1e-12, root=2)
        for _ in range(300):
            weight.grad = curvature @ weight.detach()
            optimizer.step()
        left[kind] = (weight.detach() * (curvature @ weight.detach())).sum().item()
    assert left["shampoo"] < 0.3 * left["sgd"]


def test_batch_norm_and_biases_take_sgds_step() -> None:
    torch.manual_seed(0)
    model, twin = (nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    shampoo = Shampoo(parameter_groups(model), 0.1, 0.9, 0.3, start_steps=1, every_steps=1)
    sgd = torch.optim.SGD(parameter_groups(twin, weight_decay=0.3), 0.1, 0.9)
    for _ in range(4):
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        shampoo.step()
        sgd.step()
    found, expected = model.state_dict(), twin.state_dict()
    for name in ("0.bias", "1.weight", "1.bias"):
        torch.testing.assert_close(found[name], expected[name])
    assert not torch.allclose(found["0.weight"], expected["0.weight"])


def test_gradients_of_zero_move_nothing() -> None:
    weight = nn.Parameter(torch.ones(3, 3))
    optimizer = Shampoo([weight], 0.1, start_steps=1, every_steps=1)
    for _ in range(3):
        weight.grad = torch.zeros(3, 3)
        optimizer.step()
    assert torch.equal(weight.detach(), torch.ones(3, 3))


def test_saved_state_goes_on_bit_for_bit() -> None:
    """Saved between two computations of the roots, which must come along."""
    params, grads = weights_and_gradients(9, torch.float32)
    optimizer = Shampoo(params, 0.05, weight_decay=0.1, **SETTINGS)
    for step in grads[:4]:
        take(optimizer, params, step)
    others = [nn.Parameter(p.detach().clone()) for p in params]
    again = Shampoo(others, 1.0)
    again.load_state_dict(deepcopy(optimizer.state_dict()))
    for step in grads[4:]:
        take(optimizer, params, step)
        take(again, others, step)
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))


def test_the_memory_is_counted() -> None:
    """Momentum, and for a block of 128 x 128 two matrices of statistics and two of roots."""
    weight = nn.Parameter(torch.randn(128, 256))
    optimizer = Shampoo([weight], 0.1, start_steps=1, every_steps=1)
    for count in (1 + 2, 1 + 4):
        take(optimizer, [weight], [torch.randn(128, 256)])
        state = optimizer.state[weight]
        held = [state["momentum_buffer"], *state["statistics"], *state["roots"]]
        assert sum(tensor.nbytes for tensor in held) == 4 * 128 * 256 * count


def train_on_rank(rank: int, fails: bool = False) -> tuple[str, int]:
    """A digest of all that eight steps leave, and how many roots this rank computed."""
    shampoo: Any = importlib.import_module("megabatch.optim.shampoo")
    communication: Any = dist

    computed, compute, gather = 0, shampoo.inverse_root, dist.all_gather

    def counted(*args: Any) -> Tensor:
        nonlocal computed
        computed += 1
        found: Tensor = compute(*args)
        return found

    def failing(*args: Any) -> None:
        gather(*args)
        communication.all_gather = gather
        raise RuntimeError("connection closed by peer")

    shampoo.inverse_root = counted
    torch.set_num_threads(1)
    params, grads = weights_and_gradients(8, torch.float32)
    optimizer = Shampoo(params, 0.05, weight_decay=0.1, **SETTINGS)
    for number, step in enumerate(grads):
        for p, g in zip(params, step, strict=True):
            p.grad = g.clone()
        if fails and number == 5:  # as when another rank is lost: the step is made again
            communication.all_gather = failing
            before = digest_of(optimizer.state_dict())
            with pytest.raises(RuntimeError, match="connection closed"):
                optimizer.gather_roots()
            assert digest_of(optimizer.state_dict()) == before
        optimizer.gather_roots()
        optimizer.step()
    return digest_of([optimizer.state_dict(), [p.detach() for p in params]]), computed


def digest_of(state: Any) -> str:
    return hashlib.sha256(json.dumps(state, default=lambda tensor: tensor.tolist()).encode()).hexdigest()


def test_the_bits_are_the_same_on_any_number_of_ranks_and_the_work_is_shared() -> None:
    alone = run_ranks(1, train_on_rank)[0]
    assert alone[1] == 2 * (2 * 4 + 3 * 1 + 1 * 2)  # two computations; dimensions x blocks of every parameter
    for world_size in (2, 3):
        found = run_ranks(world_size, train_on_rank)
        assert {digest for digest, _ in found} == {alone[0]}
        counts = [count for _, count in found]
        assert sum(counts) == alone[1]
        assert max(counts) - min(counts) <= 2


def test_a_gathering_that_fails_changes_nothing_and_can_be_done_again() -> None:
    alone = run_ranks(1, train_on_rank)[0]
    assert {digest for digest, _ in run_ranks(2, train_on_rank, True)} == {alone[0]}


def test_ranks_without_a_root_of_their_own_go_along() -> None:
    assert len(set(run_ranks(3, one_small_matrix))) == 1


def one_small_matrix(rank: int) -> str:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3, 2, 2))  # merged: one matrix of 12 x 12
    optimizer = Shampoo([weight], 0.1, start_steps=1, every_steps=1)
    for _ in range(3):
        take(optimizer, [weight], [torch.randn(3, 2, 2)])
    return digest_of(weight.detach())


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lr": -1.0}, "Shampoo lr -1 cannot be used"),
        ({"beta2": 1.0}, "Shampoo beta2 1 cannot"),
        ({"eps": 0.0}, "eps 0 cannot be used"),
        ({"block_size": 0}, "Shampoo block_size 0"),
        ({"start_steps": 0}, "Shampoo start_steps 0"),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Shampoo([nn.Parameter(torch.ones(2))], **{"lr": 0.1, **values})


def test_half_precision_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs fp32 or fp64"):
        Shampoo([nn.Parameter(torch.ones(2, dtype=torch.bfloat16))], 0.1)
