"""Layer lists against the networks themselves, buckets against DDP's rule, steps against the trainer's count."""

from __future__ import annotations

import dataclasses
import math
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabatch.errors import ConfigError
from megabatch.plan.workload import busiest_passes, fill_buckets, fitting_ghost, model_layers, workload_of
from megabatch.schedule.batch import check_whole_ghosts, count_steps, parse_stages, shard_range
from tests.plan.laboratory import two_layers, workload


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_stored_layers_are_those_of_the_network(name: str) -> None:
    from torch import nn

    from megabatch.model import resnet

    network = getattr(resnet, name)()
    layers, _ = model_layers(name)
    assert sum(layer.parameters for layer in layers) == sum(p.numel() for p in network.parameters())
    modules = dict(network.named_modules())
    assert {layer.name for layer in layers} == {
        key for key, module in modules.items() if isinstance(module, nn.Conv2d | nn.Linear)
    }
    assert sum(layer.work for layer in layers) == pytest.approx(1)


def test_resnet50_has_the_known_size() -> None:
    layers, work = model_layers("resnet50")
    assert sum(layer.parameters for layer in layers) == 25_557_032
    assert work == pytest.approx(4.09e9, rel=0.01)  # He 2015 counts 3.8e9 with the stride in the first 1x1
    with pytest.raises(ConfigError, match="bench step"):
        model_layers("resnet8")


@pytest.mark.parametrize("bucket_mb", [8.0, 16.0, 25.0, 50.0, 200.0])
def test_buckets_are_those_that_ddp_cuts_whatever_the_wire(bucket_mb: float) -> None:
    """DDP's own rule, by the parameters one by one; a layer that is ready earlier moves a border a little."""
    from torch import Tensor
    from torch import distributed as dist

    from megabatch.model.resnet import resnet50

    parameters: list[Tensor] = list(reversed(list(resnet50().parameters())))
    limit = int(bucket_mb * 2**20)
    cut, _ = dist._compute_bucket_assignment_by_size(parameters, [limit, limit])  # type: ignore[attr-defined]
    wanted = [sum(parameters[index].numel() for index in bucket) for bucket in cut]
    for bytes_per_parameter in (4, 2):
        found = fill_buckets(model_layers("resnet50")[0], bytes_per_parameter, bucket_mb)
        assert len(found) == len(wanted)
        sizes = [bucket.num_bytes / bytes_per_parameter for bucket in found]
        assert list(accumulate(sizes)) == pytest.approx(list(accumulate(wanted)), abs=0.1 * sum(wanted))


def test_buckets_fill_from_the_last_layer() -> None:
    layers, _ = model_layers("resnet50")
    for bucket_mb in (1.0, 4.0, 25.0, math.inf):
        buckets = fill_buckets(layers, 4, bucket_mb)
        assert sum(bucket.num_bytes for bucket in buckets) == 4 * 25_557_032
        assert [bucket.ready for bucket in buckets] == sorted(bucket.ready for bucket in buckets)
        assert buckets[-1].ready == pytest.approx(1.0)
    assert len(fill_buckets(layers, 4, math.inf)) == 1
    assert len(fill_buckets(layers, 2, workload().bucket_mb_of_all)) == 1
    assert [(bucket.num_bytes, bucket.ready) for bucket in fill_buckets(two_layers(), 4, 2.5)] == [
        (3_000_000, 0.25),
        (1_000_000, 1.0),
    ]


@pytest.mark.parametrize("batch", [32768, "0:34816 30:69632", "0:1024 0.5:2048 1:4096"])
def test_steps_by_stage_are_the_engines(batch: int | str) -> None:
    load = workload(batch, ghost=32)
    stages = parse_stages(batch)
    counts = load.steps_by_stage(90)
    assert [total for total, _ in counts] == list(stages.global_batch_sizes)
    wanted = count_steps(stages, 32, load.num_train, 90 * load.num_train)
    assert sum(number for _, number in counts) == wanted


def test_collapses_come_on_top() -> None:
    load = workload_of("codreanu2017")
    (branch,) = load.branches
    assert branch.epochs == pytest.approx(4.5, abs=0.01)
    # The authors' files: 7638 iterations, then 402 of the collapse.
    assert load.steps_by_stage(load.epochs) == [(14336, 7638), (14336, 402)]


@pytest.mark.parametrize(("batch", "epochs"), [(28672, 85.5), (14336, 40.0), (7168, 171.0)])
def test_collapses_follow_another_batch_and_length_as_in_training(batch: int, epochs: float) -> None:
    """What is priced for another batch or length is what the recipe with those settings makes."""
    load = workload_of("codreanu2017").with_batch(parse_stages(batch))
    trained = workload_of("codreanu2017", [f"train.global_batch_size={batch}"], epochs=epochs)
    priced = load.steps_by_stage(epochs)
    assert [total for total, _ in priced] == [batch, batch]
    assert [number for _, number in priced] == [number for _, number in trained.steps_by_stage(trained.epochs)]


def test_a_recipe_becomes_a_workload() -> None:
    load = workload_of("demo", ["model.name=resnet18", "comm.grad_dtype=bf16"])
    assert (load.num_train, load.num_val, load.ghost_batch_size) == (60_000, 10_000, 64)
    assert load.bytes_per_parameter == 2
    assert load.work == pytest.approx(model_layers("resnet18")[1] / 64)  # 28 pixels instead of 224
    with pytest.raises(ConfigError, match="no layer list"):
        workload_of("demo")
    assert workload_of("demo", layers=two_layers()).gradient_bytes == 4_000_000


def test_images_held_out_and_a_limit_of_steps_count() -> None:
    layers = two_layers()
    held = workload_of("demo", ["data.held_out_images=20000"], layers)
    assert (held.num_train, held.num_val) == (40_000, 20_000)
    limited = workload_of("demo", ["train.max_steps=8"], layers)
    assert sum(number for _, number in limited.steps_by_stage(limited.epochs)) == 8
    staged = dataclasses.replace(workload("0:1024 0.5:2048", ghost=32), max_steps=700)
    assert [number for _, number in staged.steps_by_stage(90)] == [626, 74]


def test_another_width_is_another_network() -> None:
    assert workload_of("demo", ["model.width=64"], two_layers()).model == "resnet8 of width 64"
    with pytest.raises(ConfigError, match="no layer list"):
        workload_of("goyal2017", ["model.width=32"])


def line(images: float) -> float:
    return 0.001 + 0.0003 * images


@given(ghosts=st.integers(1, 5000), workers=st.integers(1, 3000), ghost=st.integers(1, 64))
def test_the_busiest_worker_is_the_engines(ghosts: int, workers: int, ghost: int) -> None:
    most = max(len(shard_range(ghosts, workers, worker)) for worker in {0, workers - 1, workers // 2})
    assert busiest_passes(ghosts * ghost, ghost, workers) >= most
    everyone = max(len(shard_range(ghosts, workers, worker)) for worker in range(workers))
    assert busiest_passes(ghosts * ghost, ghost, workers) == everyone


def test_the_recipes_ghost_is_kept_while_it_fits() -> None:
    assert fitting_ghost(workload(32768, 32), 1024, line) == 32
    assert fitting_ghost(workload(32768, 32), 1000, line) == 32


@pytest.mark.parametrize(
    ("total", "ghost", "workers", "fits"),
    [(8192, 32, 1024, 8), (67840, 80, 1024, 80), (67840, 160, 1024, 80), (34816, 16, 4096, 16)],
)
def test_a_ghost_that_does_not_fit_shrinks_to_a_divisor(total: int, ghost: int, workers: int, fits: int) -> None:
    assert fitting_ghost(workload(total, ghost), workers, line) == fits


@given(parts=st.lists(st.integers(1, 40), min_size=1, max_size=3, unique=True), workers=st.integers(1, 600))
def test_what_is_chosen_divides_every_stage_and_is_the_better_neighbour_of_the_fair_share(
    parts: list[int], workers: int
) -> None:
    totals = sorted(48 * part for part in parts)
    load = workload(totals[0], 48).with_batch(parse_stages(" ".join(f"{i}:{t}" for i, t in enumerate(totals))))
    if totals[0] / workers < 2:
        with pytest.raises(ConfigError, match="at least 2 are needed"):
            fitting_ghost(load, workers, line)
        return
    ghost = fitting_ghost(load, workers, line)
    check_whole_ghosts(load.stages, ghost)

    def seconds(size: int) -> float:
        return sum(busiest_passes(total, size, workers) * line(size) / total for total in totals)

    if totals[0] // 48 < workers:
        sizes = [size for size in range(2, 49) if all(total % size == 0 for total in totals)]
        below = max((size for size in sizes if size * workers <= totals[0]), default=0)
        above = min((size for size in sizes if size * workers > totals[0]), default=0)
        assert ghost in (below, above)
        assert seconds(ghost) == pytest.approx(min(seconds(size) for size in (below, above) if size))


def test_a_batch_the_engine_would_refuse_is_refused() -> None:
    with pytest.raises(ConfigError, match="34817 is not a multiple"):
        fitting_ghost(workload(34817, 16), 4, line)
