"""Evaluation counts every image once on any number of ranks; statistics are those of ghosts of the stream."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from megabatch.config import Config
from megabatch.data.augment import Augmentation
from megabatch.data.batches import assemble_training
from megabatch.data.randomness import sample_stream
from megabatch.data.sources import ImageArray, Source
from megabatch.errors import DataError
from megabatch.train.evaluate import Evaluation, evaluate, measure_statistics
from megabatch.train.phases import branch_augment
from tests.ranks import run_ranks
from tests.system.runs import small_config

NUM_IMAGES, CLASSES, SIZE = 103, 9, 8


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine make these tiny tensors a hundred times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def source(num_images: int = NUM_IMAGES) -> ImageArray:
    numbers = np.random.default_rng(1)
    pixels = numbers.integers(0, 256, (num_images, SIZE, SIZE, 1), dtype=np.uint8)
    return ImageArray("test", pixels, numbers.integers(0, CLASSES, num_images), CLASSES)


class Network(nn.Module):
    """Linear, so that numpy can follow; dropout and a norm, so that being in training mode would show."""

    def __init__(self, num_classes: int = CLASSES) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.weight = nn.Parameter(torch.randn(SIZE * SIZE, num_classes, generator=generator) / 4)
        self.norm = nn.BatchNorm1d(num_classes)
        self.dropout = nn.Dropout(0.5)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.norm(images.flatten(1) @ self.weight))
        return out


def normalise(images: Tensor) -> Tensor:
    return images.float() / 255.0


def settings(images_per_pass: int, *overrides: str) -> Config:
    return small_config(f"data.image_size={SIZE}", f"train.evaluation_batch_size={images_per_pass}", *overrides)


def run(network: nn.Module, images: ImageArray, images_per_pass: int = 10) -> Evaluation:
    [found] = evaluate([network], images, settings(images_per_pass), normalise)
    return found


def oracle(images: ImageArray, network: Network) -> tuple[int, int, float]:
    """Hits and mean loss in float64, counted image by image."""
    weight = network.weight.detach().double().numpy()
    hits1 = hits5 = 0
    losses = []
    for pixels, label in zip(images.images, images.labels.tolist(), strict=True):
        logits = (pixels.astype(np.float64).reshape(-1) / 255.0) @ weight / np.sqrt(1 + 1e-5)
        better = int((logits > logits[label]).sum())
        hits1 += better < 1
        hits5 += better < 5
        losses.append(np.log(np.exp(logits - logits[label]).sum()))
    return hits1, hits5, float(np.mean(losses))


def on_ranks(rank: int) -> list[Evaluation]:
    network = Network().train()
    found = [run(network, source()), run(network, source(), 1000), run(network, source(3))]
    assert network.training
    assert network.norm.training
    # Every rank must have the result, and the split must not have left the last images to one rank's padding.
    assert dist.get_world_size() == 4
    return found


def test_four_workers_count_103_images_once_and_agree_with_one() -> None:
    network = Network()
    hits1, hits5, loss = oracle(source(), network)
    assert 0 < hits1 < hits5 < NUM_IMAGES
    alone = run(network, source())
    assert alone.num_images == NUM_IMAGES
    assert (alone.top1, alone.top5) == (hits1 / NUM_IMAGES, hits5 / NUM_IMAGES)
    assert alone.loss == pytest.approx(loss, rel=1e-6)
    few = run(network, source(3))
    for of_rank in run_ranks(4, on_ranks):
        for found in of_rank[:2]:
            assert (found.top1, found.top5, found.num_images) == (alone.top1, alone.top5, NUM_IMAGES)
            assert found.loss == pytest.approx(loss, rel=1e-6)
        # Three images leave one of four workers without any.
        assert (of_rank[2].top1, of_rank[2].top5, of_rank[2].num_images) == (few.top1, few.top5, 3)
        assert of_rank[2].loss == pytest.approx(few.loss, rel=1e-6)


def judged(rank: int) -> list[list[float]]:
    each = torch.zeros(NUM_IMAGES, 2, dtype=torch.float64)
    evaluate([Network()], source(), settings(10), normalise, each=each)
    return each.tolist()


def test_each_image_has_its_class_and_probability_on_any_number_of_workers() -> None:
    alone = np.array(judged(0))
    pixels = source().images.astype(np.float64).reshape(NUM_IMAGES, -1) / 255.0
    logits = pixels @ Network().weight.detach().double().numpy() / np.sqrt(1 + 1e-5)
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert (alone[:, 0] == logits.argmax(axis=1)).all()
    np.testing.assert_allclose(alone[:, 1], shares.max(axis=1), rtol=1e-5)
    for found in run_ranks(3, judged):
        assert found == alone.tolist()


@pytest.mark.parametrize("images_per_pass", [1, 7, 103, 5000])
def test_the_size_of_a_pass_does_not_matter(images_per_pass: int) -> None:
    expected, found = run(Network(), source()), run(Network(), source(), images_per_pass)
    assert (found.top1, found.top5, found.num_images) == (expected.top1, expected.top5, expected.num_images)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)


def test_the_network_is_left_in_the_mode_it_was_in_and_without_gradients() -> None:
    network = Network()
    for training in (True, False):
        network.train(training)
        run(network, source())
        assert network.training is training
    assert network.weight.grad is None
    assert network.norm.num_batches_tracked is not None
    assert int(network.norm.num_batches_tracked) == 0


def test_fewer_than_five_classes_make_top5_certain() -> None:
    images = ImageArray("few", source().images, source().labels % 3, 3)
    found = run(Network(3), images)
    assert found.top5 == 1.0
    assert 0 < found.top1 < 1


def test_the_network_runs_under_the_given_precision() -> None:
    seen: list[torch.dtype] = []

    class Watching(Network):
        def forward(self, images: Tensor) -> Tensor:
            logits = images.flatten(1) @ self.weight
            seen.append(logits.dtype)
            return logits

    [found] = evaluate([Watching()], source(), settings(50, "train.precision=bf16"), normalise)
    assert set(seen) == {torch.bfloat16}
    assert found.loss == pytest.approx(oracle(source(), Network())[2], rel=2e-2)


class Shifted(Network):
    """Another member: the same network with other weights."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.no_grad():
            self.weight.add_(torch.randn(self.weight.shape, generator=torch.Generator().manual_seed(seed)), alpha=0.25)


def together(rank: int) -> list[Evaluation]:
    networks = [Shifted(seed) for seed in range(3)]
    return evaluate(networks, source(), settings(10), normalise)


def test_an_ensemble_averages_probabilities_and_counts_every_image_once() -> None:
    images = source()
    probabilities = np.zeros((NUM_IMAGES, CLASSES))
    for seed in range(3):
        weight = Shifted(seed).weight.detach().double().numpy()
        logits = (images.images.reshape(NUM_IMAGES, -1) / 255.0) @ weight / np.sqrt(1 + 1e-5)
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities += exponentials / exponentials.sum(axis=1, keepdims=True) / 3
    of_label = probabilities[np.arange(NUM_IMAGES), images.labels]
    better = (probabilities > of_label[:, None]).sum(axis=1)
    for *alone, ensemble in [together(0), *run_ranks(4, together)]:
        assert ensemble.num_images == NUM_IMAGES
        assert (ensemble.top1, ensemble.top5) == ((better < 1).mean(), (better < 5).mean())
        assert ensemble.loss == pytest.approx(float(-np.log(of_label).mean()), rel=1e-5)
        for seed, found in enumerate(alone):
            expected = run(Shifted(seed), images)
            assert (found.top1, found.top5) == (expected.top1, expected.top5)
            assert found.loss == pytest.approx(expected.loss, rel=1e-6)


SETTINGS = ("norm.variance=pooled", "data.image_size=8")
START = 13


def images() -> ImageArray:
    numbers = np.random.default_rng(1)
    return ImageArray("test", numbers.integers(0, 256, (31, 8, 8, 1), dtype=np.uint8), numbers.integers(0, 3, 31), 3)


def to_doubles(batch: Tensor) -> Tensor:
    return batch.permute(0, 3, 1, 2).double() / 255.0


def measure(network: nn.Module, config: Config, source: Source) -> None:
    options = {"num_ghosts": 5, "seed": 3, "start_samples": START}
    measure_statistics(network, config, source, to_doubles, augment=branch_augment(config), **options)


def on_rank(rank: int) -> list[float]:
    network = nn.BatchNorm2d(1).double()
    measure(network, small_config(*SETTINGS), images())
    assert network.running_mean is not None
    assert network.running_var is not None
    return [float(network.running_mean), float(network.running_var)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_statistics_are_those_of_the_ghosts_that_follow_in_the_stream(world_size: int) -> None:
    config = small_config(*SETTINGS)
    epochs, samples = sample_stream(3, 31, START, 40)  # five ghosts of eight: more than an epoch
    augmentation = Augmentation(**branch_augment(config).model_dump())
    pixels, _ = assemble_training(images(), augmentation, 8, 3, epochs, samples)
    ghosts = pixels.reshape(5, -1) / 255.0
    means, variances = ghosts.mean(axis=1), ghosts.var(axis=1, ddof=1)
    for found in run_ranks(world_size, on_rank):
        assert found == pytest.approx([means.mean(), variances.mean() + means.var()], rel=1e-9)


class WithHoles(Source):
    """Images of which one in five cannot be read."""

    def __init__(self) -> None:
        whole = images()
        self.name, self.num_classes, self.channels, self.labels = "holes", 3, 1, whole.labels
        self._images = whole.images

    def read(self, index: int) -> NDArray[np.uint8]:
        if index % 5 == 0:
            raise DataError(f"image {index} is broken")
        image: NDArray[np.uint8] = self._images[index]
        return image


def test_broken_images_are_replaced_as_in_training_unless_none_are_allowed() -> None:
    network = nn.BatchNorm2d(1).double()
    measure(network, small_config(*SETTINGS), WithHoles())
    strict = small_config(*SETTINGS, "data.max_broken_share=0")
    with pytest.raises(DataError, match="is broken"):
        measure(network, strict, WithHoles())
