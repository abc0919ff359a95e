"""The programs in docs/methods.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.splitlines()[-1][:40])
def test_a_program_runs(program: str) -> None:
    assert len(program.splitlines()) <= 14
    exec(compile(program, "docs/methods.md", "exec"), {})


def test_there_are_programs() -> None:
    assert len(PROGRAMS) >= 5
