"""Stages of the global batch, the steps they make, and how ghost batches are sharded."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megabatch.data.randomness import sample_stream
from megabatch.errors import ConfigError
from megabatch.schedule.batch import BatchStages, count_steps, iterate_steps, parse_stages, shard_range


@pytest.mark.parametrize(
    ("text", "stages", "shown"),
    [
        (1024, BatchStages((0.0,), (1024,)), "1,024"),
        ("1024", BatchStages((0.0,), (1024,)), "1,024"),
        ("0:1024 2.5:2048", BatchStages((0.0, 2.5), (1024, 2048)), "1,024 from epoch 0, 2,048 from epoch 2.5"),
        (" 0:34816,30:69632 ", BatchStages((0.0, 30.0), (34816, 69632)), "34,816 from epoch 0, 69,632 from epoch 30"),
        ("8 1:4", BatchStages((0.0, 1.0), (8, 4)), "8 from epoch 0, 4 from epoch 1"),
    ],
)
def test_stages_are_read_and_shown(text: int | str, stages: BatchStages, shown: str) -> None:
    assert parse_stages(text) == stages
    assert str(stages) == shown


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "begin at epoch 0"),
        ("many", "'many'"),
        ("0:many", "'0:many'"),
        ("x:1024", "'x:1024'"),
        ("0:10.5", "'0:10.5'"),
        ("1:1024", "begin at epoch 0"),
        ("0:1024 0:2048", "rise"),
        ("0:1024 5:2048 3:4096", "rise"),
        ("nan:1024", "begin at epoch 0"),
        ("0:1024 nan:2048", "rise"),
        ("0:0", "positive"),
        ("0:1024 3:-5", "positive"),
        (0, "positive"),
        (-64, "positive"),
    ],
)
def test_bad_stages_are_one_line(text: int | str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        parse_stages(text)
    assert "\n" not in str(caught.value)


def test_a_stage_holds_from_its_epoch_on() -> None:
    stages = parse_stages("0:8 1.5:16 3:4")
    assert [stages.at(epoch) for epoch in (0, 1.499, 1.5, 2.999, 3, 1e9)] == [8, 8, 16, 16, 4, 4]


def test_steps_by_hand() -> None:
    """10 images an epoch, 3.5 epochs, ghosts of 4: stage two begins with the first step at or after epoch 1."""
    steps = list(iterate_steps(parse_stages("0:4 1:12").at, 4, 10, 35))
    assert [(u.index, u.start_samples, u.num_samples, u.num_ghosts, u.end_samples) for u in steps] == [
        (0, 0, 4, 1, 4),
        (1, 4, 4, 1, 8),
        (2, 8, 4, 1, 12),
        (3, 12, 12, 3, 24),
        (4, 24, 8, 2, 32),  # cut to whole ghosts; three images remain unused
    ]
    assert [u.epoch for u in steps] == [0.0, 0.4, 0.8, 1.2, 2.4]


ghost_batches = st.integers(1, 8)
epoch_lists = st.lists(
    st.one_of(st.floats(0.01, 20), st.integers(1, 200).map(lambda tenths: tenths / 10)), max_size=3, unique=True
)


@st.composite
def runs(draw: st.DrawFn) -> tuple[BatchStages, int, int, int]:
    ghost_batch_size = draw(ghost_batches)
    from_epochs = (0.0, *sorted(draw(epoch_lists)))
    totals = tuple(draw(st.integers(1, 20)) * ghost_batch_size for _ in from_epochs)
    samples_per_epoch = draw(st.integers(1, 200))
    return BatchStages(from_epochs, totals), ghost_batch_size, samples_per_epoch, draw(st.integers(0, 2000))


@settings(max_examples=300)
@given(runs())
@example((BatchStages((0.0, 2.2), (1, 3)), 1, 25, 57))  # 2.2 * 25 is a little more than 55, yet 55 / 25 is 2.2
@example((BatchStages((0.0, 90.0), (64, 32)), 32, 100, 100))
def test_counting_steps_equals_walking_through_them(run: tuple[BatchStages, int, int, int]) -> None:
    stages, ghost_batch_size, samples_per_epoch, total_samples = run
    walked = list(iterate_steps(stages.at, ghost_batch_size, samples_per_epoch, total_samples))
    assert count_steps(stages, ghost_batch_size, samples_per_epoch, total_samples) == len(walked)


@settings(max_examples=200)
@given(runs())
def test_steps_join_without_gap_and_leave_less_than_a_ghost(run: tuple[BatchStages, int, int, int]) -> None:
    stages, ghost_batch_size, samples_per_epoch, total_samples = run
    samples = 0
    for index, step in enumerate(iterate_steps(stages.at, ghost_batch_size, samples_per_epoch, total_samples)):
        assert (step.index, step.start_samples) == (index, samples)
        assert step.num_samples % ghost_batch_size == 0
        assert 0 < step.num_samples <= stages.at(step.epoch)
        samples = step.end_samples
    assert 0 <= total_samples - samples < ghost_batch_size


@settings(max_examples=100)
@given(runs(), st.data())
def test_steps_from_the_middle_are_the_tail(run: tuple[BatchStages, int, int, int], data: st.DataObject) -> None:
    stages, ghost_batch_size, samples_per_epoch, total_samples = run
    whole = list(iterate_steps(stages.at, ghost_batch_size, samples_per_epoch, total_samples))
    at = data.draw(st.integers(0, len(whole)))
    start_samples = whole[at].start_samples if at < len(whole) else total_samples // ghost_batch_size * ghost_batch_size
    tail = iterate_steps(
        stages.at, ghost_batch_size, samples_per_epoch, total_samples, start_samples=start_samples, start_index=at
    )
    assert list(tail) == whole[at:]


@given(st.integers(0, 500), st.integers(1, 40))
def test_dealing_gives_every_ghost_to_one_worker_and_counts_differ_by_one(num_ghosts: int, world_size: int) -> None:
    hands = [shard_range(num_ghosts, world_size, worker) for worker in range(world_size)]
    assert [ghost for hand in hands for ghost in hand] == list(range(num_ghosts))
    sizes = {len(hand) for hand in hands}
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize(
    ("num_samples", "epochs", "stages"), [(50, 3, "0:8 1.2:24 2:4"), (13, 4, "0:12"), (64, 2, "32")]
)
def test_all_workers_together_see_every_image_once_an_epoch(
    world_size: int, num_samples: int, epochs: int, stages: str
) -> None:
    """Also where a step reaches over the end of an epoch; only the last few of the run remain unused."""
    ghost_batch_size, total = 4, epochs * num_samples
    seen: Counter[tuple[int, int]] = Counter()
    for step in iterate_steps(parse_stages(stages).at, ghost_batch_size, num_samples, total):
        for worker in range(world_size):
            for ghost in shard_range(step.num_ghosts, world_size, worker):
                start = step.start_samples + ghost * ghost_batch_size
                in_epoch, sample = sample_stream(7, num_samples, start, ghost_batch_size)
                seen.update(zip(in_epoch.tolist(), sample.tolist(), strict=True))
    assert set(seen.values()) == {1}
    whole = {(epoch, sample) for epoch in range(epochs) for sample in range(num_samples)}
    assert seen.keys() <= whole
    unused = whole - seen.keys()
    assert len(unused) == total % ghost_batch_size
    assert {epoch for epoch, _ in unused} <= {epochs - 1}
