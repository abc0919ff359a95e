"""Exact sums: the same bits however ghost batches lie on ranks, and close to the sum in float64."""

from __future__ import annotations

import hashlib
import math
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from megabatch.comm import exact as module
from megabatch.comm.exact import SPARE_BITS, ExactSums, Pieces, Verdict
from megabatch.comm.grid import ProcessGrid
from megabatch.comm.hook import gradient_hook
from megabatch.config.comm import MAX_EXACT_GHOSTS
from megabatch.errors import ConfigError
from megabatch.schedule.batch import shard_range
from tests.ranks import run_ranks

NUM_GHOSTS, GHOST_SIZE, STEPS = 7, 6, 5


def network() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 16, 4)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def ghost(step: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + number)
    scale = 40.0 if step == 2 else 1.0  # a gradient that grows by more than the spare bits
    return torch.randn(GHOST_SIZE, 3, 8, 8, generator=generator) * scale, torch.randint(
        0, 4, (GHOST_SIZE,), generator=generator
    )


def train(rank: int, algorithm: str, shape: str, bucket_mb: float, in_flight: int) -> dict[str, Any]:
    """A stranger's loop; what it ends with."""
    torch.set_num_threads(1)
    size = dist.get_world_size()
    ddp = DistributedDataParallel(network(), bucket_cap_mb=bucket_mb, gradient_as_bucket_view=in_flight == 2)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    with ProcessGrid.build(shape, timeout_seconds=60) as grid, ExitStack() as stack:
        state, hook = gradient_hook(grid, algorithm, exact=True, buckets_in_flight=in_flight)
        stack.enter_context(state)
        ddp.register_comm_hook(state, hook)
        assert state.exact is not None
        exact = state.exact.bind(ddp.parameters())
        mine = shard_range(NUM_GHOSTS, size, rank)
        for step in range(STEPS):
            for _ in exact.attempts(NUM_GHOSTS):
                for number in mine or [0]:
                    images, labels = ghost(step, number)
                    with nullcontext() if not mine or number == mine[-1] else ddp.no_sync():
                        (F.cross_entropy(ddp(images), labels) * (1.0 if mine else 0.0)).backward()
                    exact.add_ghost()
            optimizer.step()
        gradients = [p.grad.flatten().tolist() for p in ddp.parameters() if p.grad is not None]
    weights = b"".join(p.detach().contiguous().numpy().tobytes() for p in ddp.parameters())
    return {
        "sha": hashlib.sha256(weights).hexdigest(),
        "state": exact.state_dict(),
        "gradients": gradients,
    }


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    [result] = run_ranks(1, train, "ring", "1x1", 25.0, 2)
    return result


@pytest.mark.parametrize(
    ("size", "algorithm", "shape", "bucket_mb", "in_flight"),
    [
        (2, "torus", "1x2", 25.0, 2),
        (3, "ring", "1x3", 0.001, 2),
        (3, "backend", "3x1", 0.001, 1),
        (4, "torus", "2x2", 0.001, 2),
        (4, "hierarchical", "2x2", 25.0, 1),
        (8, "halving_doubling", "1x8", 0.001, 1),  # a rank without a ghost batch
    ],
)
def test_a_loop_of_ones_own_has_the_same_bits_on_any_ranks(
    alone: dict[str, Any], size: int, algorithm: str, shape: str, bucket_mb: float, in_flight: int
) -> None:
    results = run_ranks(size, train, algorithm, shape, bucket_mb, in_flight)
    assert {result["sha"] for result in results} == {alone["sha"]}
    assert all(result["state"] == alone["state"] for result in results)
    assert alone["state"]["repeats"] == 2  # the first step, and the one that grew


def test_sums_are_close_to_float64(alone: dict[str, Any]) -> None:
    """The last gradient against double precision, on the weights that a plain loop in floats has there."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        sums = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
        for number in range(NUM_GHOSTS):
            images, labels = ghost(step, number)
            model.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            for total, parameter in zip(sums, model.parameters(), strict=True):
                assert parameter.grad is not None
                total += parameter.grad.double() / NUM_GHOSTS
        for total, parameter in zip(sums, model.parameters(), strict=True):
            parameter.grad = total.float()
        optimizer.step()
    for total, found in zip(sums, alone["gradients"], strict=True):
        expected = total.flatten()
        error = (torch.tensor(found, dtype=torch.float64) - expected).norm() / expected.norm()
        assert error < 1e-4  # weights of five steps differ a little by then; one step is checked more sharply below


def one_tensor(values: torch.Tensor, num_ghosts: int = 4) -> tuple[ExactSums, torch.Tensor]:
    """Sums that have seen the magnitude of `values`, and their parameter."""
    parameter = torch.zeros_like(values, requires_grad=True)
    exact = ExactSums().bind([parameter])
    for expected in (Verdict.REPEAT, Verdict.FITS):
        exact.begin_step(num_ghosts)
        parameter.grad = values.clone()
        exact.add_ghost()
        assert exact.end_step() == expected
    exact.commit()
    return exact, parameter


def summed(exact: ExactSums, parameter: torch.Tensor, ghosts: list[torch.Tensor]) -> tuple[torch.Tensor, Verdict]:
    """The gradient of a step of these ghosts on one rank, the last one sent as a bucket."""
    exact.begin_step(len(ghosts))
    for values in ghosts[:-1]:
        parameter.grad = values.clone()
        exact.add_ghost()
    bucket = ghosts[-1].clone()
    pieces = Pieces([parameter], [bucket])
    exact.to_integers(pieces)
    exact.to_floats(pieces)
    parameter.grad = bucket
    verdict = exact.end_step()
    if verdict != Verdict.REPEAT:
        exact.commit()
    return bucket, verdict


def test_there_is_a_compiled_helper_where_there_is_a_compiler() -> None:
    assert module._helper() is not None


def test_what_does_not_fit_is_repeated_and_what_fits_is_not() -> None:
    exact, parameter = one_tensor(torch.tensor([0.99]))
    almost = torch.tensor([2.0**SPARE_BITS * 0.999])
    found, verdict = summed(exact, parameter, [almost] * 4)
    assert verdict == Verdict.FITS
    assert found.item() == pytest.approx(almost.item())
    too_large = torch.tensor([almost.item() * 2**SPARE_BITS * 1.1])
    assert summed(exact, parameter, [torch.tensor([0.1]), too_large])[1] == Verdict.REPEAT
    found, verdict = summed(exact, parameter, [torch.tensor([0.1]), too_large])
    assert verdict == Verdict.FITS
    assert found.item() == pytest.approx((too_large.item() + 0.1) / 2)
    assert exact.num_repeats == 2


def test_a_step_that_is_given_up_leaves_no_trace() -> None:
    exact, parameter = one_tensor(torch.tensor([1.0]))
    before = exact.state_dict()
    assert summed(exact, parameter, [torch.tensor([1e6])])[1] == Verdict.REPEAT
    exact.rollback()
    assert exact.state_dict() == before
    exact.begin_step(1)
    parameter.grad = torch.tensor([0.7])
    exact.add_ghost()
    assert exact.end_step() == Verdict.FITS
    exact.rollback()
    assert exact.state_dict() == before


def test_many_ghosts_of_one_sign_do_not_overflow() -> None:
    exact, parameter = one_tensor(torch.tensor([0.999, -0.999]))
    found, verdict = summed(exact, parameter, [torch.tensor([0.999, -0.999]) * 2.0**SPARE_BITS] * 333)
    assert verdict == Verdict.FITS
    assert found.tolist() == pytest.approx([0.999 * 2**SPARE_BITS, -0.999 * 2**SPARE_BITS], rel=1e-5)


def test_a_parameter_without_a_gradient_in_some_ghosts_adds_nothing_of_the_step_before() -> None:
    """As with parts of a model that some passes leave out; the memory of sums is used again from step to step."""
    used, unused = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    exact = ExactSums().bind([used, unused])
    for _ in range(2):
        for _ in exact.attempts(3):
            for gradients in ((1.0, None), (None, None), (2.0, 3.0)):
                for parameter, value in zip((used, unused), gradients, strict=True):
                    parameter.grad = None if value is None else torch.full((2,), value)
                exact.add_ghost()
            buckets = [torch.zeros(2), torch.zeros(2)]
            pieces = Pieces([used, unused], buckets)
            exact.to_integers(pieces)
            exact.to_floats(pieces)
        assert [bucket.tolist() for bucket in buckets] == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_spoils_all_gradients_and_no_shift(bad: float) -> None:
    exact, parameter = one_tensor(torch.tensor([1.0, 1.0]))
    before = exact.state_dict()
    found, verdict = summed(exact, parameter, [torch.tensor([1.0, bad]), torch.tensor([1.0, 1.0])])
    assert verdict == Verdict.NOT_FINITE
    assert found.isnan().all()
    assert exact.state_dict() == before


def test_a_loss_scale_changes_no_shift_and_no_bit() -> None:
    ghosts = [torch.randn(50) for _ in range(3)]
    plain, parameter = one_tensor(torch.full((50,), 3.0))
    expected, _ = summed(plain, parameter, ghosts)
    scaled, parameter = one_tensor(torch.full((50,), 3.0))
    scaled.begin_step(3, loss_scale=65536.0)
    buckets = [values * 65536.0 for values in ghosts]
    for values in buckets[:-1]:
        parameter.grad = values
        scaled.add_ghost()
    pieces = Pieces([parameter], [buckets[-1]])
    scaled.to_integers(pieces)
    scaled.to_floats(pieces)
    assert scaled.end_step() == Verdict.FITS
    scaled.commit()
    assert torch.equal(buckets[-1] / 65536.0, expected)
    assert scaled.state_dict() == plain.state_dict()


def test_a_maximum_of_long_ago_is_forgotten_bit_by_bit() -> None:
    exact, parameter = one_tensor(torch.tensor([1000.0]))
    exponents = []
    for _ in range(200):
        summed(exact, parameter, [torch.tensor([1.0])])
        exponents += exact.state_dict()["exponents"]
    assert exponents[0] == 10
    assert exponents[-1] == 1
    assert exponents == sorted(exponents, reverse=True)


def test_the_state_goes_on_elsewhere() -> None:
    exact, parameter = one_tensor(torch.randn(20))
    ghosts = [torch.randn(20) for _ in range(3)]
    other = ExactSums().bind([parameter])
    other.load_state_dict(exact.state_dict())
    assert torch.equal(summed(exact, parameter, ghosts)[0], summed(other, parameter, ghosts)[0])
    with pytest.raises(ConfigError, match="exact sums of 1 parameters do not fit a model of 2"):
        ExactSums().bind([parameter, parameter]).load_state_dict(exact.state_dict())


def test_what_exact_sums_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="call bind"):
        ExactSums().begin_step(4)
    exact = ExactSums().bind([torch.zeros(3, requires_grad=True)])
    with pytest.raises(ConfigError, match=f"a step of {MAX_EXACT_GHOSTS + 1} ghost batches; exact sums hold 1 to"):
        exact.begin_step(MAX_EXACT_GHOSTS + 1)
    with pytest.raises(ConfigError, match=r"float32 gradients, the model has parameters of torch.float64"):
        ExactSums().bind([torch.zeros(3, requires_grad=True, dtype=torch.float64)])
