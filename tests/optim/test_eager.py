"""A run without torch.compile never loads the compiler, and computes what it would compute with it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megabatch.optim.eager import eager

PROGRAM = """
import sys, tempfile, megabatch
if sys.argv[1] == "loaded":
    import torch._dynamo
name, small = sys.argv[2], ["data.generated.num_train=256", "data.generated.num_val=32", "train.global_batch_size=64"]
more = ["data.source=generated", "data.image_size=12", "train.max_steps=3", "optimizer.nesterov=false"]
config = megabatch.load_config("demo", [*small, *more, f"optimizer.name={name}"])
with tempfile.TemporaryDirectory() as folder:
    megabatch.train(config, output=folder + "/run")
    from safetensors.torch import load_file
    weights = load_file(folder + "/run/model.safetensors")
print("compiler", "torch._dynamo" in sys.modules, "_dynamo" in vars(sys.modules["torch"]))
print("weights", *[value.double().sum().item().hex() for value in weights.values()])
"""


@pytest.mark.parametrize("name", ["sgd", "adamw", "lars"])
def test_a_run_is_the_same_without_the_compiler(name: str) -> None:
    said = {}
    for how in ("absent", "loaded"):
        words = [sys.executable, "-c", PROGRAM, how, name]
        done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        said[how] = done.stdout.splitlines()[-2:]
    assert said["absent"][0] == "compiler False False"
    assert said["loaded"][0].startswith("compiler True")
    assert said["absent"][1] == said["loaded"][1]


def test_an_optimizer_keeps_its_name_and_hooks() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = eager(torch.optim.SGD)([weight], lr=0.5, foreach=True)
    seen: list[int] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    weight.sum().backward()
    optimizer.step()
    assert (type(optimizer).__name__, seen) == ("SGD", [1])
    assert isinstance(optimizer, torch.optim.SGD)
    assert weight.tolist() == [0.5] * 3
