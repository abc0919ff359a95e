"""The example for Lightning trains over the torus as it does without, and its gradients travel there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.integrations.example import losses_of_example

pl = pytest.importorskip("lightning.pytorch", reason="the extra [lightning] is not installed")


@pytest.mark.slow
def test_the_example_trains_over_the_torus() -> None:
    plain, torus, rounded = (losses_of_example("lightning_torus.py", *o) for o in (("--plain",), (), ("--bf16",)))
    assert len(plain) == 8
    assert torus == pytest.approx(plain, abs=1e-5)
    assert rounded != pytest.approx(plain, abs=1e-5)  # what is asked of the torus has an effect: it is in use
    assert rounded == pytest.approx(plain, rel=0.05)


@pytest.mark.filterwarnings("ignore")
def test_on_one_device_there_is_nothing_to_do_and_another_strategy_is_refused() -> None:
    from megabatch.errors import ConfigError
    from megabatch.integrations.lightning import TorusCallback

    callback, trainer = TorusCallback(), pl.Trainer(accelerator="cpu", devices=1, logger=False)
    callback.on_train_start(trainer, None)
    assert callback.hook is None
    callback.teardown(trainer, None, "fit")
    several = SimpleNamespace(world_size=2, strategy=SimpleNamespace(model=None))
    with pytest.raises(ConfigError, match=r'SimpleNamespace was given, TorusCallback needs DDP; .* strategy="ddp"'):
        callback.on_train_start(several, None)
