"""Mistakes in what is asked of the planner, found before anything is priced."""

from __future__ import annotations

import pytest

from megabatch.plan.request import PlanRequest, run

RESNET = ("model.name=resnet50", "data.image_size=224")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"recipe": ""}, "no recipe given"),
        ({"cluster": ""}, "no cluster given"),
        ({"cluster": "abcd"}, "did you mean"),
        ({"recipe": "nobody"}, "unknown recipe"),
        ({"target": 80.0}, "say nothing about it"),
        ({"target": 0.0}, "is no accuracy"),
        ({"target": 75.9}, "are of resnet50 on ImageNet"),
        ({"recipe": "goyal2017", "overrides": ("model.name=resnet101",), "target": 75.9}, "trains resnet101"),
        ({"target": 75.9, "epochs": 10.0}, "leave one of them out"),
        (
            {"recipe": "goyal2017", "overrides": ("train.epochs=30",), "target": 75.9},
            "train.epochs=30 was given",
        ),
        ({"family": "nvidia:dgx1"}, "no table was given"),
        ({"epochs": 1e-9}, "trains nothing"),
        ({"deadline": "90"}, "--deadline '90' is no time"),
        ({"objective": "fun"}, "choose time or cost"),
        ({"budget": -1.0}, "buys nothing"),
        ({"budget": float("nan")}, "buys nothing"),
        ({"batches": ("34817",)}, "is not a multiple of train.ghost_batch_size"),
        ({"batches": ("40000000000",)}, "trains nothing"),
        ({"workers": "x"}, "cannot be read"),
        ({"workers": "5000"}, "holds 4,352"),
        ({"algorithms": ("torsu",)}, "did you mean 'torus'"),
        ({"batches": ("-5",)}, "positive"),
        ({"grid": "3x3"}, "needs 9 workers"),
    ],
)
def test_mistakes_are_one_clear_line(changed: dict[str, object], words: str) -> None:
    given: dict[str, object] = {"recipe": "demo", "cluster": "abci", "workers": "8", "overrides": RESNET}
    with pytest.raises(Exception, match=words) as caught:
        run(PlanRequest(**(given | changed)))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
