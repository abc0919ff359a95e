"""Batch-norm statistics: one, two and three workers agree with each other and with a float64 oracle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from megabatch.model.norm import GhostStatistics, exact_statistics
from megabatch.schedule.batch import shard_range
from tests.ranks import run_ranks

Array = NDArray[np.float64]

GHOSTS = (4, 1, 5, 2, 3)  # of each step: more and fewer than workers, never a multiple of three in all
SKIPPED = 2  # the step whose gradient is pretended not to be finite
PAUSE = 3  # steps before the checkpoint
SHARES = (1.0, 0.1)


def ghost(step: int, index: int) -> Array:
    """Images [6, 2, 3, 3] of unlike mean and spread in every ghost batch and channel."""
    numbers = np.random.default_rng([step, index])
    scale = np.array([1.0 + index, 0.1 + step]).reshape(1, 2, 1, 1)
    pixels: Array = numbers.normal(size=(6, 2, 3, 3)) * scale + 10.0 * step - 3.0 * index
    return pixels


class TwoNorms(nn.Module):
    """Norms whose inputs a few lines of numpy can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.BatchNorm2d(2)
        self.untracked = nn.BatchNorm2d(2, track_running_stats=False)
        self.pooled = nn.BatchNorm1d(2)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.untracked(self.plain(images)).sum() + self.pooled(images.square().amax(dim=(2, 3))).sum()
        return out


def oracle(momentum: float, num_steps: int = len(GHOSTS)) -> Array:
    """Mean and variance of both norms by the definition at the head of the module."""
    running = np.array([0, 0, 1, 1, 0, 0, 1, 1], dtype=np.float64)
    for step, num_ghosts in enumerate(GHOSTS[:num_steps]):
        if step == SKIPPED:
            continue
        average = np.zeros(8)
        for index in range(num_ghosts):
            pixels = ghost(step, index)
            pooled = (pixels**2).max(axis=(2, 3))
            flat = pixels.transpose(1, 0, 2, 3).reshape(2, -1)
            found = [flat.mean(1), flat.var(1, ddof=1), pooled.mean(0), pooled.var(0, ddof=1)]
            average += np.concatenate(found) / num_ghosts
        running = (1 - momentum) * running + momentum * average
    return running


def train(model: nn.Module, statistics: GhostStatistics, first: int, last: int) -> None:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for step in range(first, last):
        num_ghosts = GHOSTS[step]
        mine = shard_range(num_ghosts, size, rank)
        for index in mine:
            with statistics.ghost():
                model(torch.from_numpy(ghost(step, index)).to(next(model.parameters()).dtype))
        if not mine:
            with statistics.ghost(counts=False):
                model(torch.full((6, 2, 3, 3), 1e6, dtype=next(model.parameters()).dtype))
        if step == SKIPPED:
            statistics.forget_step()
        else:
            statistics.after_step()


def buffers(model: TwoNorms) -> Array:
    norms = (model.plain, model.pooled)
    found = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var)]
    return torch.cat([buffer for buffer in found if buffer is not None]).double().numpy().copy()


def run(rank: int, given: dict[float, tuple[Array, int]] | None, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """All that one world does: train whole, with a pause, from its own checkpoint and from the checkpoint given."""
    found: dict[str, Any] = {}
    for share in SHARES:
        model = TwoNorms().to(dtype)
        statistics = GhostStatistics(model, share)
        statistics.publish()
        found[f"initial {share}"] = buffers(model)
        train(model, statistics, 0, PAUSE)
        state = statistics.state_dict()
        assert state["running"] is not statistics.state_dict()["running"]
        assert isinstance(state["running"], Tensor)
        found[f"state {share}"] = (state["running"].numpy().copy(), state["steps"])
        train(model, statistics, PAUSE, len(GHOSTS))
        statistics.publish()
        found[f"final {share}"] = buffers(model)
        found[f"counters {share}"] = [int(c) for n, c in model.named_buffers() if n.endswith("tracked")]

        checkpoints = {"resumed": found[f"state {share}"]} | ({"moved": given[share]} if given else {})
        for name, (running, steps) in checkpoints.items():
            model = TwoNorms().to(dtype)
            statistics = GhostStatistics(model, share)
            statistics.load_state_dict({"running": torch.from_numpy(running), "steps": steps})
            train(model, statistics, PAUSE, len(GHOSTS))
            statistics.publish()
            found[f"{name} {share}"] = buffers(model)
    return found


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine make these tiny tensors a hundred times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def worlds(one_thread: None) -> dict[str, list[dict[str, Any]]]:
    """What every worker of every world found; each world also continues the checkpoint of another one."""
    alone = run(0, None)
    one = run_ranks(1, run, None)
    two = run_ranks(2, run, _checkpoints(alone))
    three = run_ranks(3, run, _checkpoints(two[1]))
    return {"alone": [alone, run(0, _checkpoints(three[2]))], "one": one, "two": two, "three": three}


def _checkpoints(found: dict[str, Any]) -> dict[float, tuple[Array, int]]:
    return {share: found[f"state {share}"] for share in SHARES}


def close(found: Array, expected: Array) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("share", SHARES)
def test_every_world_finds_what_the_oracle_finds(worlds: dict[str, list[dict[str, Any]]], share: float) -> None:
    for workers in worlds.values():
        for found in workers:
            close(found[f"state {share}"][0], oracle(share, PAUSE))
            close(found[f"final {share}"], oracle(share))
            assert found[f"state {share}"][1] == PAUSE - 1
            assert found[f"counters {share}"] == [len(GHOSTS) - 1] * 2
            np.testing.assert_array_equal(found[f"initial {share}"], [0, 0, 1, 1, 0, 0, 1, 1])


@pytest.mark.parametrize("share", SHARES)
def test_every_worker_of_every_world_has_the_same_bits(worlds: dict[str, list[dict[str, Any]]], share: float) -> None:
    expected = worlds["alone"][0]
    for found in (worker for world in worlds.values() for worker in world):
        np.testing.assert_array_equal(found[f"final {share}"], expected[f"final {share}"])
        np.testing.assert_array_equal(found[f"state {share}"][0], expected[f"state {share}"][0])


@pytest.mark.parametrize("share", SHARES)
def test_a_resumed_run_is_bit_for_bit_the_run_that_went_on(
    worlds: dict[str, list[dict[str, Any]]], share: float
) -> None:
    for workers in worlds.values():
        for found in workers:
            np.testing.assert_array_equal(found[f"resumed {share}"], found[f"final {share}"])


@pytest.mark.parametrize("share", SHARES)
def test_a_checkpoint_continues_on_another_number_of_workers(
    worlds: dict[str, list[dict[str, Any]]], share: float
) -> None:
    for found in (*worlds["two"], *worlds["three"], worlds["alone"][1]):
        np.testing.assert_array_equal(found[f"moved {share}"], worlds["alone"][0][f"final {share}"])


def test_without_a_moving_average_only_the_last_step_counts(worlds: dict[str, list[dict[str, Any]]]) -> None:
    """Said once more without the oracle's loop: step 4 has three ghost batches."""
    pixels = [ghost(4, index).transpose(1, 0, 2, 3).reshape(2, -1) for index in range(3)]
    close(worlds["three"][0]["final 1.0"][:2], np.mean([p.mean(1) for p in pixels], axis=0))
    close(worlds["three"][0]["final 1.0"][2:4], np.mean([p.var(1, ddof=1) for p in pixels], axis=0))


def test_a_float32_model_publishes_the_oracle_up_to_its_own_rounding() -> None:
    found = run(0, None, torch.float32)
    for share in SHARES:
        np.testing.assert_allclose(found[f"final {share}"], oracle(share), rtol=1e-5)
        assert found[f"state {share}"][0].dtype == np.float64


def test_untouched_leaves_buffers_and_counters_alone() -> None:
    model = TwoNorms()
    statistics = GhostStatistics(model, 0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with statistics.untouched():
        model(torch.full((6, 2, 3, 3), 5.0))
        assert not torch.equal(before["plain.running_mean"], model.state_dict()["plain.running_mean"])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_untouched_also_holds_when_the_forward_pass_fails() -> None:
    model = TwoNorms()
    statistics = GhostStatistics(model, 0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def fail() -> None:
        with statistics.untouched():
            model(torch.full((6, 2, 3, 3), 5.0))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_model_without_norms_has_nothing_to_do() -> None:
    model = nn.Linear(2, 2)
    statistics = GhostStatistics(model, 0.1)
    with statistics.ghost():
        model(torch.zeros(1, 2))
    statistics.forget_step()
    statistics.after_step()
    statistics.publish()
    state = statistics.state_dict()
    again = GhostStatistics(model, 0.1)
    again.load_state_dict(state)
    assert again.state_dict()["steps"] == 1


def pooled_oracle(steps_and_weights: list[tuple[int, float]]) -> Array:
    """Mean, and average variance plus variance of the means, over the ghosts of steps with these weights."""
    rows, weights = [], []
    for step, weight in steps_and_weights:
        for index in range(GHOSTS[step]):
            pixels = ghost(step, index)
            amax = (pixels**2).max(axis=(2, 3))
            flat = pixels.transpose(1, 0, 2, 3).reshape(2, -1)
            rows.append([flat.mean(1), flat.var(1, ddof=1), amax.mean(0), amax.var(0, ddof=1)])
            weights.append(weight / GHOSTS[step])
    found, share = np.array(rows), np.array(weights)[:, None]
    columns = []
    for means, variances in ((found[:, 0], found[:, 1]), (found[:, 2], found[:, 3])):
        mean = (share * means).sum(0)
        columns += [mean, (share * variances).sum(0) + (share * (means - mean) ** 2).sum(0)]
    return np.concatenate(columns)


def run_pooled(rank: int) -> list[Array]:
    found = []
    for share in SHARES:
        model = TwoNorms().double()
        statistics = GhostStatistics(model, share, "pooled")
        if share != 1.0:  # the past of this one begins with step 0, without torch's initial values
            statistics.momentum = 1.0
            train(model, statistics, 0, 1)
            statistics.momentum = share
            train(model, statistics, 1, 2)
        else:
            train(model, statistics, 0, len(GHOSTS))
        statistics.publish()
        found.append(buffers(model))
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_pooled_variance_counts_the_spread_of_the_means(world_size: int) -> None:
    for newest, averaged in run_ranks(world_size, run_pooled):
        close(newest, pooled_oracle([(len(GHOSTS) - 1, 1.0)]))
        close(averaged, pooled_oracle([(0, 0.9), (1, 0.1)]))


def test_pooled_variance_is_that_of_all_images_together() -> None:
    """With ghosts large enough that n and n - 1 do not matter."""
    numbers = np.random.default_rng(5)
    ghosts = [numbers.normal(loc=3.0 * index, size=(50_000, 2)) for index in range(3)]
    model = nn.BatchNorm1d(2).double()
    statistics = GhostStatistics(model, 1.0, "pooled")
    for values in ghosts:
        with statistics.ghost():
            model(torch.from_numpy(values))
    statistics.after_step()
    statistics.publish()
    assert model.running_var is not None
    np.testing.assert_allclose(model.running_var.numpy(), np.concatenate(ghosts).var(axis=0), rtol=1e-4)


def run_exact(rank: int) -> tuple[Array, Array, bool]:
    model = TwoNorms().double()
    statistics = GhostStatistics(model, 0.1)
    train(model, statistics, 0, 2)
    model.eval()
    momenta = [module.momentum for module in model.children()]
    counters = [int(c) for n, c in model.named_buffers() if n.endswith("tracked")]
    found = []
    for variance in ("plain", "pooled"):
        mine = shard_range(GHOSTS[2], dist.get_world_size(), dist.get_rank())
        batches = (torch.from_numpy(ghost(2, index)) for index in mine)
        exact_statistics(model, batches, variance)
        found.append(buffers(model))
    assert [module.momentum for module in model.children()] == momenta
    assert [int(c) for n, c in model.named_buffers() if n.endswith("tracked")] == counters
    assert not any(module.training for module in model.modules())
    statistics.publish()  # what training collected is as it was
    return found[0], found[1], bool(np.allclose(buffers(model), oracle(0.1, 2), rtol=1e-12))


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_exact_statistics_are_those_of_the_given_batches_on_any_number_of_workers(world_size: int) -> None:
    results = run_ranks(world_size, run_exact)
    for plain, pooled, untouched in results:
        assert untouched
        close(pooled, pooled_oracle([(2, 1.0)]))
        close(plain[[0, 1, 4, 5]], pooled[[0, 1, 4, 5]])
        assert (plain[[2, 3]] < 0.5 * pooled[[2, 3]]).all()  # the ghosts' means lie far apart
    for plain, pooled, _ in results[1:]:
        assert (plain == results[0][0]).all()
        assert (pooled == results[0][1]).all()


def test_exact_statistics_see_the_network_as_evaluation_does() -> None:
    """Dropout is off, and the mode of every module is put back."""
    model = nn.Sequential(nn.Dropout(0.9), nn.BatchNorm1d(2)).double()
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    norm.eval()
    values = np.random.default_rng(1).normal(size=(40, 2))
    exact_statistics(model, [torch.from_numpy(values)])
    assert norm.running_mean is not None
    np.testing.assert_allclose(norm.running_mean.numpy(), values.mean(axis=0), rtol=1e-12)
    assert (model.training, model[0].training, norm.training) == (True, True, False)


def test_a_step_that_was_not_finite_leaves_no_trace() -> None:
    model = TwoNorms().double()
    statistics = GhostStatistics(model, 1.0)
    with statistics.ghost():
        model(torch.full((6, 2, 3, 3), float("inf"), dtype=torch.float64))
    statistics.forget_step()
    train(model, statistics, len(GHOSTS) - 1, len(GHOSTS))
    statistics.publish()
    close(buffers(model), oracle(1.0))


def test_the_models_own_momentum_stays_as_it_was() -> None:
    model = TwoNorms()
    model.plain.momentum = 0.3
    statistics = GhostStatistics(model, 1.0)
    train(model, statistics, 0, 1)
    assert model.plain.momentum == 0.3
    with pytest.raises(KeyError), statistics.ghost():
        raise KeyError
    assert model.plain.momentum == 0.3


def test_a_model_that_is_moved_afterwards_is_followed() -> None:
    """`model.to(...)` gives every norm new buffers; statistics of the old ones would be silently stale."""
    model = TwoNorms()
    statistics = GhostStatistics(model, 1.0)
    old = model.plain.running_mean
    model.double()
    assert model.plain.running_mean is not old
    train(model, statistics, len(GHOSTS) - 1, len(GHOSTS))
    statistics.publish()
    close(buffers(model), oracle(1.0))


def test_a_rank_that_has_collected_nothing_sends_what_lies_where_its_model_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An idle rank in its first step: NCCL takes no tensor of the host."""
    sent: list[str] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: sent.append(tensor.device.type))
    model = TwoNorms()
    statistics = GhostStatistics(model, 0.1)
    model.to("meta")
    with statistics.ghost(counts=False):
        pass
    statistics.reduce_step()
    exact_statistics(model, [])
    assert sent == ["meta", "meta"]


def test_taking_the_state_changes_nothing() -> None:
    def final(ask: bool) -> Array:
        model = TwoNorms().double()
        statistics = GhostStatistics(model, 0.1)
        for step in range(len(GHOSTS)):
            train(model, statistics, step, step + 1)
            if ask:
                statistics.state_dict()
        statistics.publish()
        return buffers(model)

    assert (final(True) == final(False)).all()
