"""Every recipe at its published size: a rank of its real worker count, the others played by torch's fake process group.

What a rank of a large run decides for itself is checked: its grid and the hook's phases, the ghost batches that fall to
it, its parameter groups and its optimiser at every epoch. The network is on the meta device: no time, no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megabatch.comm.grid import ProcessGrid
from megabatch.comm.phases import ALGORITHMS, num_steps, phases
from megabatch.comm.shape import near_square, parse_grid
from megabatch.config import Config
from megabatch.model.registry import build_model
from megabatch.optim.build import build_optimizer, set_rates
from megabatch.recipes import load_config, recipe_names
from megabatch.recipes.scale import at_scale, read_profile
from megabatch.schedule.batch import count_updates, deal, iterate_updates, parse_stages

IMAGENET = 1_281_167
# Pictures an update / workers as published; the rest follows.
PER_WORKER = {
    "akiba2017": 32,
    "goyal2017": 32,
    "jia2018": 32,
    "mikami2018": 16,
    "mikami2018_54k": 16,
    "yamazaki2019": 40,
    "ying2018": 32,
    "you2017": 16,
}

# 2 (X - 1) + 2 (Y - 1) messages of a 34x64 and a 48x72 torus; 2 (N - 1) of a ring.
STEPS = {"mikami2018": 192, "mikami2018_54k": 236, "akiba2017": 2046}


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def workers_of(config: Config) -> int:
    assert config.promise.workers is not None
    return config.promise.workers


@pytest.mark.parametrize("name", recipe_names())
def test_ghosts_fall_evenly_to_the_published_workers(name: str) -> None:
    config = load_config(name)
    workers, pictures = workers_of(config), config.promise.pictures
    assert pictures == {"demo": 60_000, "hoffer2017": 50_000}.get(name, IMAGENET)
    ghost, stages = config.train.ghost_batch, parse_stages(config.train.batch_total)
    for total in stages.batch_totals:
        dealt = [len(deal(total // ghost, workers, rank)) for rank in range(workers)]
        assert sum(dealt) * ghost == total
        assert max(dealt) - min(dealt) <= 1
    if name in PER_WORKER:
        assert stages.batch_totals[0] / workers == PER_WORKER[name]
    updates = list(iterate_updates(stages.at, ghost, pictures, round(config.train.epochs * pictures)))
    assert len(updates) == count_updates(stages, ghost, pictures, round(config.train.epochs * pictures))
    assert {update.num_samples for update in updates[:-1]} == set(stages.batch_totals)
    assert config.train.epochs * pictures - updates[-1].end_samples < ghost + 1


@pytest.mark.parametrize("name", recipe_names())
def test_a_rank_of_the_published_world_builds(name: str) -> None:
    config = load_config(name)
    workers = workers_of(config)
    words = config.promise.command.split()
    shape = parse_grid(words[words.index("--grid") + 1]) if "--grid" in words else near_square(workers)
    with fake_world(workers // 2, workers):
        grid = ProcessGrid.build(shape, agree=False)
        assert grid.shape.num_ranks == workers
        if workers > 1 and config.comm.algorithm in ALGORITHMS:
            steps = num_steps(phases(config.comm.algorithm, grid.shape))
            assert steps == STEPS.get(name, steps) > 0
        with torch.device("meta"):
            network = build_model(
                config.model.name,
                num_classes=config.data.num_classes or 10,
                in_channels=3,
                zero_gamma=config.model.zero_gamma,
                width=config.model.width,
            )
        optimizer = build_optimizer(config.optimizer, network)
    adapted, spared = optimizer.param_groups
    assert all(p.dim() > 1 for p in adapted["params"])
    assert all(p.dim() == 1 for p in spared["params"])
    assert len(adapted["params"]) + len(spared["params"]) == len(list(network.parameters()))
    assert (adapted["lars"], spared["lars"]) == (True, False)
    for step in range(41):
        rates = set_rates(optimizer, config.optimizer, config.train.epochs * step / 40)
        assert 0 <= rates["learning_rate"] < 50
        assert spared["weight_decay"] == (adapted["weight_decay"] if config.optimizer.decay_norm_and_bias else 0.0)
    if config.collapse is None:  # a trunk whose branches anneal does not end low itself
        assert rates["learning_rate"] < 0.07


@pytest.mark.parametrize("name", [name for name in recipe_names() if name.startswith("mlperf_")])
def test_reference_points_have_their_batch_and_reach_the_end_rate(name: str) -> None:
    config = load_config(name)
    assert config.train.batch_total == int(name.removeprefix("mlperf_"))
    assert (config.optimizer.lars.rule, config.optimizer.lars.trust_coefficient) == ("paper", 0.001)
    rate = config.optimizer.learning_rate
    assert isinstance(rate, tuple)
    warmup, decay = rate
    assert warmup.end == decay.start
    assert (decay.end, decay.power, decay.until_epoch) == (1e-4, 2.0, config.train.epochs)


@pytest.mark.parametrize("name", recipe_names())
def test_scaled_down_it_keeps_its_updates(name: str) -> None:
    config = load_config(name)
    scaled = at_scale(config, read_profile("cifar10"))
    counts = []
    for one in (config, scaled):
        pictures = one.promise.pictures or 0
        stages = parse_stages(one.train.batch_total)
        counts.append(count_updates(stages, one.train.ghost_batch, pictures, round(one.train.epochs * pictures)))
    # Small batches are rounded to whole ghost batches of 32: at 1632 pictures that is half of one.
    smallest = min(parse_stages(scaled.train.batch_total).batch_totals)
    assert counts[1] == pytest.approx(counts[0], rel=0.01 + 16 / smallest)
