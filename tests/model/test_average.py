"""The moving average of weights: by its definition in float64, the same at every batch, and saved whole."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from megabatch.errors import ConfigError
from megabatch.model.average import WeightAverage


def set_to(model: nn.Linear, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def of(average: WeightAverage, name: str) -> Tensor:
    found: Tensor = average.model.state_dict()[name]
    return found


def test_a_step_weighs_half_after_the_half_life() -> None:
    """Batches of different sizes; the age of a step is counted in images."""
    model = nn.Linear(3, 2).double()
    average = WeightAverage(model, 100.0)
    values, sizes = [3.0, -1.0, 4.0, 1.5], [100, 50, 50, 200]
    for value, size in zip(values, sizes, strict=True):
        set_to(model, value)
        average.update(size)
    # Ages 300, 250, 200 and 0; a step of n images has 1 - 2^(-n / 100).
    shares = [2**-3 * 0.5, 2**-2.5 * (1 - 2**-0.5), 2**-2 * (1 - 2**-0.5), 0.75]
    expected = sum(v * s for v, s in zip(values, shares, strict=True)) / sum(shares)
    assert of(average, "weight").tolist() == [[pytest.approx(expected, rel=1e-12)] * 3] * 2
    assert of(average, "bias").tolist() == [pytest.approx(expected, rel=1e-12)] * 2
    assert model.bias.tolist() == [1.5] * 2  # the trained model is left alone


def test_weights_that_stay_for_a_while_count_the_same_in_large_and_small_steps() -> None:
    found = []
    for size in (10, 40, 120):
        model = nn.Linear(1, 1).double()
        average = WeightAverage(model, 77.0)
        for start in range(0, 480, size):
            set_to(model, float(start // 120))  # constant over 120 images
            average.update(size)
        found.append(of(average, "weight").item())
    assert found == pytest.approx([found[0]] * 3, rel=1e-12)


def test_the_initial_weights_have_no_part_in_it() -> None:
    model = nn.Linear(2, 2)
    set_to(model, float("nan"))
    average = WeightAverage(model, 1e9)
    for _ in range(3):
        set_to(model, 2.0)
        average.update(1)
    assert of(average, "weight").tolist() == [[2.0, 2.0]] * 2


def test_saved_state_goes_on_bit_for_bit() -> None:
    model, other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    one, again = WeightAverage(model, 5.0), WeightAverage(other, 5.0)
    for number in range(6):
        if number == 3:
            again.load_state_dict(deepcopy(one.state_dict()))
        for both in (model, other):
            torch.manual_seed(number)
            nn.init.normal_(both.weight)
        one.update(2)
        if number >= 3:
            again.update(2)
    assert torch.equal(of(one, "weight"), of(again, "weight"))


def test_buffers_are_taken_over_and_gradients_are_not_wanted() -> None:
    model = nn.BatchNorm1d(4)
    average = WeightAverage(model, 5.0)
    model(torch.randn(8, 4))
    assert not torch.equal(of(average, "running_mean"), model.state_dict()["running_mean"])
    average.copy_buffers()
    assert torch.equal(of(average, "running_mean"), model.state_dict()["running_mean"])
    assert not any(parameter.requires_grad for parameter in average.model.parameters())


@pytest.mark.parametrize("half_life", [0.0, -1.0, float("nan"), float("inf")])
def test_a_half_life_that_cannot_work_is_refused(half_life: float) -> None:
    with pytest.raises(ConfigError, match="must be above 0 and finite"):
        WeightAverage(nn.Linear(1, 1), half_life)


def test_an_average_that_the_device_decides_about_is_that_of_the_host() -> None:
    def averaged(on_device: bool) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        layer = nn.Linear(3, 2)
        average = WeightAverage(layer, half_life_samples=100)
        for number in range(8):
            skip = number in (0, 1, 5)
            if not skip:
                with torch.no_grad():
                    for p in layer.parameters():
                        p.add_(torch.randn_like(p))
            if on_device:
                average.update(20 + number, unless=torch.tensor(skip))
            elif not skip:
                average.update(20 + number)
            if number == 3:
                average.load_state_dict(average.state_dict())
        return [p.clone() for p in average.model.parameters()], average.state_dict()["samples"]

    (expected, samples), (found, found_samples) = averaged(False), averaged(True)
    assert found_samples == samples == 22 + 23 + 24 + 26 + 27
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
