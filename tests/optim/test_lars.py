"""LARS against float64 references written out per rule, against torch's SGD, and without a look at device values."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megabatch.errors import ConfigError
from megabatch.optim.groups import parameter_groups
from megabatch.optim.lars import LARS, Rule, trust_ratios

RULES: tuple[Rule, ...] = get_args(Rule)
RATES = (0.5, 2.0, 7.0, 7.0, 1.25, 0.0, 0.03)  # warm-up, decay, a step to nothing
DECAY, COEFFICIENT, MOMENTUM = 3e-3, 0.02, 0.85
Array = np.ndarray[Any, np.dtype[np.float64]]


def reference(rule: str, w: Array, v: Array, g: Array, lr: float, decay: float, **options: Any) -> tuple[Array, Array]:
    """One step as the table at the top of lars.py has it, in numpy's float64."""
    eps, clip, nesterov, adapt = (options.get(k, 0) for k in ("eps", "clip", "nesterov", "adapt"))
    weight_norm, gradient_norm = math.sqrt((w * w).sum()), math.sqrt((g * g).sum())
    trust = 1.0
    if adapt and weight_norm > 0 and gradient_norm > 0:
        trust = COEFFICIENT * weight_norm / (gradient_norm + decay * weight_norm + eps)
    if adapt and clip:
        trust = min(trust / lr, 1.0) if lr else 1.0
    d = g + decay * w
    if rule == "paper":
        move, factor = lr * trust * d, 1.0
    elif rule == "trust_inside":
        move, factor = trust * d, lr
    else:
        move, factor = d, lr * trust
    v = MOMENTUM * v + move
    return w - factor * (move + MOMENTUM * v if nesterov else v), v


SHAPES = ((64, 3, 7, 7), (5,), (17, 33), (1,), (300, 401))


def tensors(seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * scale for shape in SHAPES]


def run_both(
    rule: Rule, dtype: torch.dtype, groups: int, batched: bool = False, **options: Any
) -> list[tuple[Tensor, Array]]:
    """The weights after all rates, ours and the reference's; the last group is marked as skipped.

    `batched` takes the way of accelerators: a rate in a tensor is not read on the host.
    """
    params = [nn.Parameter(t.to(dtype)) for t in tensors(0)]
    params[3].data.zero_()  # a weight of norm zero
    skipped = params[1:2] if groups == 2 else []
    adapted = [p for p in params if not any(p is q for q in skipped)]
    given = [{"params": adapted}, {"params": skipped, "lars": False, "weight_decay": 0.0}][:groups]
    optimizer = LARS(given, 1.0, MOMENTUM, DECAY, COEFFICIENT, rule=rule, **options)
    theirs = [p.detach().double().numpy().copy() for p in params]
    momenta = [np.zeros_like(w) for w in theirs]
    for number, lr in enumerate(RATES):
        grads = tensors(number + 1, scale=0.1)
        grads[4] *= 1e4 if number == 2 else 1.0
        if number == 1:
            grads[0].zero_()  # a gradient of norm zero
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(lr, dtype=torch.float64) if batched else lr
        for p, g in zip(params, grads, strict=True):
            p.grad = g.to(dtype)
        optimizer.step()
        for i, p in enumerate(params):
            assert p.grad is not None
            is_skipped = any(p is q for q in skipped)
            theirs[i], momenta[i] = reference(
                rule,
                theirs[i],
                momenta[i],
                p.grad.double().numpy(),
                lr,
                0.0 if is_skipped else DECAY,
                adapt=not is_skipped,
                **options,
            )
    return [(p.detach(), w) for p, w in zip(params, theirs, strict=True)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("batched", [False, True], ids=["one by one", "batched"])
@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"clip": True}, {"eps": 0.3}], ids=str)
def test_every_rule_follows_its_float64_reference(rule: Rule, batched: bool, options: dict[str, Any]) -> None:
    for ours, theirs in run_both(rule, torch.float64, 2, batched, **options):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-9, atol=1e-12)
    for ours, theirs in run_both(rule, torch.float32, 1, batched, **options):
        np.testing.assert_allclose(ours.double().numpy(), theirs, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.05), (torch.float16, 0.02)])
def test_half_precision_parameters_have_norms_and_steps_in_fp32(dtype: torch.dtype, tolerance: float) -> None:
    for ours, theirs in run_both("paper", dtype, 1):
        np.testing.assert_allclose(ours.double().numpy(), theirs, rtol=tolerance, atol=tolerance)
    # 300 in each of a million places: the sum of squares, and even the norm, have no room in fp16.
    weight = torch.full((1000, 1000), 300.0, dtype=dtype)
    gradient = torch.full_like(weight, 2.0**-14)
    (ratio,) = trust_ratios([weight], [gradient], 0.0, 1e-3, 0.0).tolist()
    assert ratio == pytest.approx(1e-3 * 300 / 2.0**-14, rel=2e-2)


def test_the_rules_differ_when_the_rate_changes() -> None:
    results = [torch.cat([ours.flatten() for ours, _ in run_both(rule, torch.float64, 1)]) for rule in RULES]
    for i, one in enumerate(results):
        for other in results[i + 1 :]:
            assert (one - other).abs().max() > 1e-3


def twins() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(5)
    one = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    return one, copy.deepcopy(one)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rates: tuple[float, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    for lr in rates:
        for group in optimizer.param_groups:
            group["lr"] = lr
        images = torch.randn(6, 3, 8, 8, generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), torch.arange(6) % 3).backward()
        optimizer.step()


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_with_trust_one_it_is_torch_sgd(rule: Rule, nesterov: bool) -> None:
    ours, theirs = twins()
    # The paper's rule keeps the rate inside the momentum and is SGD only while the rate stays.
    rates = (0.1,) * 5 if rule == "paper" else (0.05, 0.2, 0.1, 0.01, 0.0)
    settings: dict[str, Any] = {"momentum": 0.9, "weight_decay": 1e-3, "nesterov": nesterov}
    groups = [group | {"lars": False} for group in parameter_groups(ours, weight_decay=1e-3)]
    train(ours, LARS(groups, 0.1, rule=rule, **settings), rates)
    train(theirs, torch.optim.SGD(parameter_groups(theirs, weight_decay=1e-3), 0.1, **settings), rates)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_clip_never_lets_a_layer_go_faster_than_the_rate() -> None:
    weights = [torch.full((4,), 100.0), torch.full((4,), 1e-3)]
    grads = [torch.full((4,), 1e-3), torch.full((4,), 100.0)]
    for weight, gradient, expected in zip(weights, grads, (0.1, 1e-3 * 1e-5), strict=True):
        parameter = nn.Parameter(weight.clone())
        parameter.grad = gradient
        LARS([parameter], 0.1, momentum=0.0, rule="trust_inside", clip=True).step()
        moved = ((weight - parameter.detach()) / gradient).mean().item()
        assert moved == pytest.approx(expected, rel=0.1)  # min(trust, rate), the subtraction from 100 rounds


class NoLookAtValues(TorchDispatchMode):
    """Fails where a value would have to come from the device to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(word in name for word in ("_local_scalar_dense", "is_nonzero", "equal.default", "nonzero", "to_cpu")):
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("where", ["meta", "cpu"])
def test_a_step_never_waits_for_the_device(rule: Rule, where: str) -> None:
    """A tensor on the meta device has no value that could be read; on the CPU a rate in a tensor is not read either."""
    model, _ = twins()
    model.to(where)
    rate = 0.1 if where == "meta" else torch.tensor(0.1)
    optimizer = LARS(parameter_groups(model), rate, weight_decay=1e-4, rule=rule, clip=True, nesterov=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with NoLookAtValues():  # type: ignore[no-untyped-call]
        optimizer.step()
    with pytest.raises(AssertionError, match="waits for the device"), NoLookAtValues():  # type: ignore[no-untyped-call]
        float(torch.ones(()))


def test_a_rate_in_a_tensor_works_as_a_number() -> None:
    ours, theirs = twins()
    for model, rate in ((ours, torch.tensor(0.2)), (theirs, 0.2)):
        optimizer = LARS(parameter_groups(model), rate, weight_decay=1e-4, clip=True)
        loss = model(torch.ones(2, 3, 8, 8)).square().sum()
        loss.backward()
        optimizer.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_marks_of_groups_are_honoured() -> None:
    model, _ = twins()
    optimizer = LARS(parameter_groups(model), 0.1, weight_decay=0.5)
    assert [(group["lars"], group["weight_decay"]) for group in optimizer.param_groups] == [(True, 0.5), (False, 0.0)]
    optimizer = LARS(parameter_groups(model, weight_decay=0.25), 0.1, weight_decay=0.5)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.0]


@pytest.mark.parametrize("rule", RULES)
def test_saved_and_loaded_it_goes_on_bit_for_bit(rule: Rule) -> None:
    whole, half = twins()

    def make(model: nn.Module) -> LARS:
        return LARS(parameter_groups(model), 0.1, weight_decay=1e-3, rule=rule)

    first, second = make(whole), make(half)
    train(whole, first, RATES[:3])
    train(half, second, RATES[:3])
    saved = io.BytesIO()
    torch.save({"optimizer": second.state_dict()}, saved)
    saved.seek(0)
    again = make(half)
    again.load_state_dict(torch.load(saved, weights_only=True)["optimizer"])
    train(whole, first, RATES[3:])
    train(half, again, RATES[3:])
    for one, other in zip(whole.parameters(), half.parameters(), strict=True):
        assert torch.equal(one, other)
    other_rule: Rule = "paper" if rule != "paper" else "trust_inside"
    with pytest.raises(ConfigError, match=f"saved LARS used rule '{rule}'"):
        LARS(parameter_groups(half), 0.1, rule=other_rule).load_state_dict(first.state_dict())


def test_a_grad_scaler_skips_infinite_gradients_and_lets_others_pass() -> None:
    parameter = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = LARS([parameter], 1.0, momentum=0.0, trust_coefficient=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for gradient, stays in ((float("inf"), True), (1.0, False)):
        optimizer.zero_grad()
        scaler.scale((parameter * torch.tensor([gradient, 0.0])).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(parameter.detach(), torch.tensor([3.0, 4.0])) == stays
    assert scaler.get_scale() == 4.0
    torch.testing.assert_close(parameter.detach(), torch.tensor([0.5, 4.0]))  # 3 - 0.5 * |w| / |g|


def test_a_closure_is_called_and_parameters_without_gradient_stay() -> None:
    moving, resting = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = LARS([moving, resting], 0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = moving.square().sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 2.0
    assert (moving < 1).all()
    assert (resting == 1).all()
    assert resting not in optimizer.state


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr": -0.1}, "lr -0.1 cannot be used"),
        ({"lr": math.inf}, "lr inf"),
        ({"momentum": -1.0}, "momentum"),
        ({"weight_decay": math.nan}, "weight_decay nan"),
        ({"eps": -1.0}, "eps"),
        ({"trust_coefficient": 0.0}, "trust_coefficient 0 cannot be used"),
        ({"rule": "papr"}, "rule 'papr' is not known"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov needs momentum"),
    ],
)
def test_values_that_cannot_work_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LARS([nn.Parameter(torch.ones(1))], **{"lr": 0.1, **settings})


def test_channels_last_and_gradients_of_another_layout_make_no_difference() -> None:
    results = []
    formats: list[Callable[[Tensor], Tensor]] = [
        torch.clone,
        lambda t: t.to(memory_format=torch.channels_last, copy=True),
    ]
    for of_weight in formats:
        for of_gradient in formats:
            parameter = nn.Parameter(of_weight(tensors(0)[0]))
            optimizer = LARS([parameter], 0.3, weight_decay=1e-3)
            for seed in (1, 2):
                parameter.grad = of_gradient(tensors(seed)[0])
                optimizer.step()
            results.append(parameter.detach().contiguous())
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-6)
