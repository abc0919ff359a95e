"""What a person sees of a validation."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from megabatch.plan.show_validation import print_validation
from megabatch.plan.validate import validate_rows
from tests.plan.test_validate import written


def test_every_predicted_row_and_the_groups(tmp_path: Path) -> None:
    console = Console(width=80, soft_wrap=True, file=io.StringIO())
    validation = validate_rows(written(tmp_path, 20.8))
    print_validation(validation, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "nvidia 2.0 dgxa100_n64_mx" in text
    assert text.count("nvidia 2.0 dgxa100") == sum(row.rule != "pairs" for row in validation.results)
    assert "larger, GPU, own stack" in text
    assert "not predicted" in text
    rows = [line for line in text.splitlines() if line.startswith("nvidia")]
    assert max(map(len, rows)) <= 80
    assert all("[" in line for line in rows)
