"""The example for accelerate trains over the torus as it does without, and its gradients travel there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from tests.integrations.example import losses_of_example

accelerate = pytest.importorskip("accelerate", reason="the extra [accelerate] is not installed")


@pytest.mark.slow
def test_the_example_trains_over_the_torus() -> None:
    plain, torus, rounded = (losses_of_example("accelerate_torus.py", *o) for o in (("--plain",), (), ("--bf16",)))
    assert len(plain) == 8
    assert torus == pytest.approx(plain, abs=1e-5)
    assert rounded != pytest.approx(plain, abs=1e-5)  # what is asked of the torus has an effect: it is in use
    assert rounded == pytest.approx(plain, rel=0.05)


@pytest.mark.filterwarnings("ignore")
def test_on_one_process_there_is_nothing_to_do_and_a_bare_model_is_refused() -> None:
    from megabatch.errors import ConfigError
    from megabatch.integrations.accelerate import use_torus

    model = nn.Linear(2, 1)
    assert use_torus(accelerate.Accelerator(cpu=True), model) is None
    with pytest.raises(ConfigError, match=r"type Linear was given, use_torus needs one that accelerator.prepare"):
        use_torus(SimpleNamespace(num_processes=2), model)
