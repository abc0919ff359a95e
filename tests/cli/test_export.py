"""`megabatch export`: what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from megabatch.cli import app
from megabatch.train.card import write_model
from tests.use.test_export import classifier


@pytest.mark.parametrize(
    ("difference", "said"),
    [(None, "not compared: timm cannot be imported here"), (2e-7, "logits differ by 2e-07 at most on 8 images")],
)
def test_what_was_compared_is_said(
    difference: float | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = classifier("resnet18", 64)
    write_model(tmp_path, model.network, model.card)
    monkeypatch.setattr("megabatch.use.export.export", lambda *_: difference)
    done = CliRunner().invoke(app, ["export", str(tmp_path), "--to", "huggingface"], catch_exceptions=False)
    assert done.stdout == f"huggingface: {tmp_path / 'huggingface'}, {said}\n"
