"""Every recipe at its published size: a rank of its real worker count, the others played by torch's fake process group.

What a rank of a large run decides for itself is checked: its grid and the hook's phases, the ghost batches that fall to
it, its parameter groups and its optimizer at every epoch. The network is on the meta device: no time, no memory.
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
from megabatch.optim.build import build_optimizer, schedule_optimizer
from megabatch.recipes import load_config, recipe_names
from megabatch.recipes.scale import at_scale, read_profile
from megabatch.schedule.batch import count_steps, iterate_steps, parse_stages, shard_range

IMAGENET = 1_281_167
# Images a step / workers as published; the rest follows.
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


# `photos` is for sets of one's own: nobody has published its workers and images.
PUBLISHED = [name for name in recipe_names() if load_config(name).reference.images is not None]


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def workers_of(config: Config) -> int:
    assert config.reference.workers is not None
    return config.reference.workers


@pytest.mark.parametrize("name", PUBLISHED)
def test_ghosts_fall_evenly_to_the_published_workers(name: str) -> None:
    config = load_config(name)
    workers, images = workers_of(config), config.reference.images
    assert images == {"demo": 60_000, "hoffer2017": 50_000}.get(name, IMAGENET)
    ghost, stages = config.train.ghost_batch_size, parse_stages(config.train.global_batch_size)
    for total in stages.global_batch_sizes:
        shards = [len(shard_range(total // ghost, workers, rank)) for rank in range(workers)]
        assert sum(shards) * ghost == total
        assert max(shards) - min(shards) <= 1
    if name in PER_WORKER:
        assert stages.global_batch_sizes[0] / workers == PER_WORKER[name]
    steps = list(iterate_steps(stages.at, ghost, images, round(config.train.epochs * images)))
    assert len(steps) == count_steps(stages, ghost, images, round(config.train.epochs * images))
    assert {step.num_samples for step in steps[:-1]} == set(stages.global_batch_sizes)
    assert config.train.epochs * images - steps[-1].end_samples < ghost + 1


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_rank_of_the_published_world_builds(name: str) -> None:
    config = load_config(name)
    workers = workers_of(config)
    words = config.reference.command.split()
    shape = parse_grid(words[words.index("--grid") + 1]) if "--grid" in words else near_square(workers)
    with fake_world(workers // 2, workers):
        grid = ProcessGrid.build(shape, check_consistency=False)
        assert grid.shape.world_size == workers
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
        rates = schedule_optimizer(optimizer, config.optimizer, config.train.epochs * step / 40)
        assert 0 <= rates["lr"] < 50
        assert spared["weight_decay"] == (adapted["weight_decay"] if config.optimizer.decay_norm_and_bias else 0.0)
    if config.collapse is None:  # a trunk whose branches anneal does not end low itself
        assert rates["lr"] < 0.07


@pytest.mark.parametrize("name", [name for name in recipe_names() if name.startswith("mlperf_")])
def test_reference_points_have_their_batch_and_reach_the_end_rate(name: str) -> None:
    config = load_config(name)
    assert config.train.global_batch_size == int(name.removeprefix("mlperf_"))
    assert (config.optimizer.lars.rule, config.optimizer.lars.trust_coefficient) == ("paper", 0.001)
    rate = config.optimizer.lr
    assert isinstance(rate, tuple)
    warmup, decay = rate
    assert warmup.end == decay.start
    assert (decay.end, decay.power, decay.until_epoch) == (1e-4, 2.0, config.train.epochs)


@pytest.mark.parametrize("name", PUBLISHED)
def test_scaled_down_it_keeps_its_steps(name: str) -> None:
    config = load_config(name)
    scaled = at_scale(config, read_profile("cifar10"))
    counts = []
    for one in (config, scaled):
        images = one.reference.images or 0
        stages = parse_stages(one.train.global_batch_size)
        counts.append(count_steps(stages, one.train.ghost_batch_size, images, round(one.train.epochs * images)))
    # Small batches are rounded to whole ghost batches of 32: at 1632 images that is half of one.
    smallest = min(parse_stages(scaled.train.global_batch_size).global_batch_sizes)
    assert counts[1] == pytest.approx(counts[0], rel=0.01 + 16 / smallest)
