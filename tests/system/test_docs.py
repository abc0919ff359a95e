"""The documentation keeps its word: its Python runs, its commands exist, its links lead somewhere, its site builds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import megabatch
from docs import site_hooks
from megabatch.config import Config
from megabatch.recipes import load_config
from tests.ranks import run_ranks
from tests.system.runs import REPOSITORY
from tests.test_repo import check_command, commands_in

DOCS = sorted((REPOSITORY / "docs").rglob("*.md"))
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *DOCS]


def name_of(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


def snippets() -> list[tuple[str, str]]:
    text = (REPOSITORY / "docs" / "library.md").read_text(encoding="utf-8")
    parts = re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return [(title, block) for title, part in parts for block in re.findall(r"```python\n(.*?)```", part, re.DOTALL)]


def _execute(rank: int, source: str, folder: str = ".") -> None:
    os.chdir(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # documented use gives no warnings, torch's included
        exec(compile(source, "snippet", "exec"), {"__name__": "snippet"})


@pytest.mark.parametrize(("title", "source"), snippets(), ids=[title for title, _ in snippets()])
def test_every_piece_of_the_library_page_runs_as_it_stands(title: str, source: str) -> None:
    assert len(source.splitlines()) <= 16  # about ten lines, or it is not simple
    run_ranks(2, _execute, source)


@pytest.mark.slow
def test_the_python_of_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        run_ranks(2, _execute, block, str(tmp_path))


def test_the_library_page_has_a_piece_for_every_method() -> None:
    assert len(snippets()) >= 9


@pytest.mark.parametrize("page", DOCS, ids=name_of)
def test_commands_exist(page: Path) -> None:
    for line in commands_in(page.read_text(encoding="utf-8")):
        if "..." not in line and "RECIPE" not in line:
            check_command(line)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{name_of(page)} links to {target}"
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found), f"{name_of(page)} links to {target}"


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        words, cwd=REPOSITORY, capture_output=True, text=True, timeout=110, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "index.html").is_file()
    api = (tmp_path / "site" / "api.html").read_text()
    for name in megabatch.__all__:
        assert name == "__version__" or f".{name}" in api
    settings = (tmp_path / "site" / "settings.html").read_text()
    assert "global_batch_size" in settings
    outside = re.compile(r'<(?:script|link)[^>]+(?:src|href)="https?://')
    assert [page.name for page in (tmp_path / "site").glob("*.html") if outside.search(page.read_text())] == []


def test_the_settings_page_has_every_key_with_its_default() -> None:
    """Counted from a dumped recipe, not from the classes."""
    named = dict(site_hooks.sections(Config, ""))
    text = site_hooks.settings_markdown()
    dumped = load_config("codreanu2017").model_dump()
    for section, values in dumped.items():
        part = text[text.index(f"## {section}\n") :].split("\n## ")[0]
        for key, value in values.items():
            is_section = f"{section}.{key}" in named
            assert is_section or f"| `{key}` |" in part
            assert isinstance(value, dict) <= (is_section or key == "settings")
    all_rows = [(name, *row) for name, section in named.items() for row in site_hooks.setting_rows(section)]
    assert [f"{name}.{key}" for name, key, _, _, sentence in all_rows if not sentence] == []
    assert len(all_rows) > 130
    rows = {row[0]: row for row in site_hooks.setting_rows(named["train"])}
    assert rows["ghost_batch_size"][1:] == (
        "int, >= 2",
        "`32`",
        "images that share one batch-norm; it divides the global batch",
    )
    assert rows["precision"][1] == "fp32 | bf16 | fp16"
    assert rows["channels_last"][1:3] == ("true | false", "`true`")
