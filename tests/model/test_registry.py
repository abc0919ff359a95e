"""Models by name: built in, from timm, from a user's module; and every way the name can be wrong."""

from __future__ import annotations

import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from megabatch.errors import ConfigError
from megabatch.model.registry import build_model, known_models
from megabatch.model.resnet import ResNet, ZeroGamma
from megabatch.model.small import SmallResNet


@pytest.mark.parametrize("name", known_models())
def test_every_built_in_takes_the_sizes_and_the_policy(name: str) -> None:
    with torch.device("meta"):
        model = build_model(name, num_classes=7, in_channels=2, zero_gamma="none")
    assert isinstance(model, ResNet | SmallResNet)
    assert model.conv1.in_channels == 2
    assert model.fc.out_features == 7


def test_zero_gamma_reaches_the_built_in_model() -> None:
    silent = {}
    policies: tuple[ZeroGamma, ...] = ("none", "every_block", "last_block_of_stage")
    for policy in policies:
        model = build_model("resnet20", num_classes=3, in_channels=1, zero_gamma=policy)
        norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
        silent[policy] = sum(int(torch.count_nonzero(norm.weight) == 0) for norm in norms)
    assert silent == {"none": 0, "every_block": 9, "last_block_of_stage": 3}


def test_width_reaches_the_small_models() -> None:
    for name in ("resnet8", "resnet20"):
        model = build_model(name, num_classes=3, in_channels=1, width=6)
        assert isinstance(model, SmallResNet)
        assert model.fc.in_features == 24


def _message(name: str, **settings: object) -> str:
    arguments = {"num_classes": 3, "in_channels": 1, "zero_gamma": "none", **settings}
    with pytest.raises(ConfigError) as caught:
        build_model(name, **arguments)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_unknown_name_offers_the_nearest() -> None:
    message = _message("resnet5O")
    assert "'resnet5O' is unknown; did you mean 'resnet50'?" in message
    assert "resnet152" in message
    assert "did you mean" not in _message("xyz")


@pytest.mark.parametrize("name", ["resnet50", "timm:resnet50", "package.module:function"])
def test_width_is_refused_where_it_has_no_effect(name: str) -> None:
    assert f"width=32 has no effect on model '{name}'" in _message(name, width=32)


def test_width_of_an_unknown_model_is_an_unknown_model() -> None:
    assert "'resnet9' is unknown" in _message("resnet9", width=32)


@pytest.mark.parametrize("setting", ["num_classes", "in_channels", "width"])
@pytest.mark.parametrize("value", [0, -3])
def test_sizes_below_one_are_refused(setting: str, value: int) -> None:
    assert f"{setting} is {value}; a model needs at least 1" in _message("resnet8", **{setting: value})


@pytest.mark.parametrize("name", ["resnet8", "timm:resnet50"])
def test_unknown_policy_is_refused(name: str) -> None:
    assert "zero_gamma is 'nome'" in _message(name, zero_gamma="nome")


# timm


class FakeTimm(types.ModuleType):
    """Stands in for timm's two functions used here; remembers what it was asked."""

    def __init__(self, result: object = None) -> None:
        super().__init__("timm")
        self.calls: list[tuple[str, dict[str, object]]] = []
        self.result = result

    def create_model(self, name: str, **settings: object) -> object:
        self.calls.append((name, settings))
        if self.result is None:
            raise RuntimeError(f"Unknown model ({name})\nsecond line")
        return self.result

    def list_models(self) -> list[str]:
        return ["convnext_tiny", "resnet50"]


def test_timm_gets_name_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1, 1)
    timm = FakeTimm(model)
    monkeypatch.setitem(sys.modules, "timm", timm)
    built = build_model("timm:convnext_tiny.fb_in1k", num_classes=7, in_channels=2, zero_gamma="none")
    assert built is model
    assert timm.calls == [("convnext_tiny.fb_in1k", {"pretrained": False, "num_classes": 7, "in_chans": 2})]


def test_timm_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)  # makes `import timm` raise ModuleNotFoundError
    assert "pip install megabatch[timm]" in _message("timm:resnet50")


def test_timm_that_does_not_load_is_not_called_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "timm.py").write_text("import module_that_timm_needs\n")
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    message = _message("timm:resnet50")
    assert "No module named 'module_that_timm_needs'" in message
    assert "pip install" not in message


def test_timm_unknown_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", FakeTimm())
    message = _message("timm:resnet5O")
    assert "'resnet5O' (RuntimeError: Unknown model (resnet5O)); did you mean 'resnet50'?" in message
    assert "did you mean" not in _message("timm:resnet50.a1_in1k")  # a known name that fails for another reason


# package.module:function

USER_MODULE = """
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes, in_channels):
        super().__init__()
        self.fc = nn.Linear(in_channels, num_classes)

def flexible(**settings):
    return Net(**settings)

def wants_more(num_classes, in_channels, depth):
    return Net(num_classes, in_channels)

def wants_less(num_classes):
    return Net(num_classes, 1)

def fails(num_classes, in_channels):
    raise ValueError("no such luck\\nand more")

def wrong_type(num_classes, in_channels):
    return "a string"

number = 3
"""


@pytest.fixture(name="user_module")
def _user_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "registry_user"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "nets.py").write_text(USER_MODULE)
    (package / "broken.py").write_text("raise KeyError('top level')\n")
    (package / "needy.py").write_text("import module_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("registry_user", "registry_user.nets", "registry_user.broken", "registry_user.needy"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize("function", ["Net", "flexible"])
def test_function_is_called_with_the_sizes(function: str) -> None:
    model = build_model(f"registry_user.nets:{function}", num_classes=5, in_channels=4, zero_gamma="none")
    assert isinstance(model.fc, nn.Linear)
    assert (model.fc.in_features, model.fc.out_features) == (4, 5)


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("registry_user.nets:flexibel", "has no function 'flexibel'; did you mean 'flexible'?"),
        ("registry_user.nets:number", "is of type int; it must be a function"),
        ("registry_user.nets:wants_more", "cannot be called with num_classes= and in_channels= alone"),
        ("registry_user.nets:wants_less", "cannot be called with num_classes= and in_channels= alone"),
        ("registry_user.nets:fails", "it raised ValueError: no such luck"),
        ("registry_user.nets:wrong_type", "returned str, it must return a torch.nn.Module"),
        ("registry_user.broken:Net", "importing registry_user.broken raised KeyError: 'top level'"),
        ("registry_user.needy:Net", "raised ModuleNotFoundError: No module named 'module_nobody_has'"),
        ("registry_user.absent:Net", "needs the module registry_user.absent, which is not installed"),
        ("absent_package.nets:Net", "needs the module absent_package, which is not installed"),
        ("registry_user.nets:", "is not of the form package.module:function"),
        (":Net", "is not of the form package.module:function"),
        ("..nets:Net", "is not of the form package.module:function"),
        ("registry_user.nets:Net:more", "is not of the form package.module:function"),
    ],
)
def test_what_can_be_wrong_with_a_function(name: str, part: str) -> None:
    message = _message(name)
    assert f"'{name}'" in message
    assert part in message


@pytest.mark.usefixtures("user_module")
def test_policy_without_effect_warns_or_is_refused() -> None:
    name = "registry_user.nets:Net"
    with pytest.warns(UserWarning, match="zero_gamma='every_block' has no effect on 'registry_user.nets:Net'"):
        build_model(name, num_classes=5, in_channels=4)
    assert "set zero_gamma to 'none'" in _message(name, zero_gamma="last_block_of_stage")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_model(name, num_classes=5, in_channels=4, zero_gamma="none")
