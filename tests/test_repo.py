"""The repository holds to its own rules: size of files, direction of imports, mirrored tests, commands that exist."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.exceptions import TyperException

import megabatch
from megabatch.__main__ import with_values
from megabatch.cli import app
from megabatch.recipes import load_config, recipe_names

ROOT = Path(__file__).parents[1]
MAX_LINES = 400
NOT_OURS = {
    *(".git", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "__pycache__"),
    *("build", "dist", "runs"),
}

# Who may import whom, besides itself; CONTRIBUTING.md draws it as one chain.
# `report` and `plan` stay light enough for any laptop; `plan` prices the phases that `comm` executes.
BELOW = {"errors", "files", "text", "foreign", "machine", "schedule", "config"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "files": {"errors"},
    "text": {"errors"},
    "foreign": {"errors"},
    "machine": {"errors", "files"},
    "schedule": {"errors", "files"},
    "config": {"errors", "files", "foreign", "schedule"},
    "recipes": BELOW,
    "comm": BELOW,
    "optim": BELOW,
    "model": BELOW,
    "data": BELOW,
    "launch": {"errors", "files", "config", "recipes", "comm.shape"},
    "report": {"errors", "files", "text", "comm.shape", "comm.phases", "comm.price", "comm.calibration"},
    "plan": BELOW
    | {
        "recipes",
        "report.run",
        "report.metrics_log",
        "report.drawing",
        "report.figure",
        "report.metrics",
        "report.plan_compare",
        "comm.phases",
        "comm.shape",
        "comm.price",
        "comm.calibration",
    },
    "workers": BELOW | {"comm"},
    "train": BELOW | {"recipes", "comm", "optim", "model", "data", "report", "workers"},
    "study": BELOW | {"recipes", "report", "train.run_dir", "workers.stop", "workers.world", "plan.convergence"},
    "tune": BELOW | {"recipes", "report", "data.formats", "study", "train.run_dir"},
    "use": BELOW | {"recipes", "model", "data", "report", "workers", "train"},
    "integrations": {"errors", "comm"},
    "bench": BELOW | {"recipes", "comm", "optim", "model", "data", "report", "workers", "train", "plan.memory"},
    "cli": BELOW
    | {"recipes", "comm", "optim", "model", "data", "report", "plan"}
    | {"study", "tune", "launch", "workers", "train", "bench", "use"},
    "__main__": {"cli", "errors"},
}

TORCH_FREE = (
    *("megabatch", "megabatch.files", "megabatch.recipes", "megabatch.recipes.scale", "megabatch.cli"),
    *("megabatch.report.run", "megabatch.report.page", "megabatch.report.live", "megabatch.report.figure"),
    *("megabatch.launch.script", "megabatch.launch.kubernetes"),
    *("megabatch.comm.phases", "megabatch.comm.shape"),
    *("megabatch.comm.price", "megabatch.comm.calibration"),
    # A mistake in a recipe, a folder or a launcher's variables is told without the seconds that torch takes to load.
    *("megabatch.train.entry", "megabatch.train.run_dir", "megabatch.cli.words"),
    *("megabatch.workers.token", "megabatch.workers.world"),
    *("megabatch.study.conduct", "megabatch.tune.conduct", "megabatch.tune.journal"),
    *("megabatch.plan.request", "megabatch.plan.show", "megabatch.plan.validate"),
    *("benchmarks.simulators.simgrid", "benchmarks.simulators.simgrid_child", "benchmarks.check_plan"),
)

WHOLE_RUNS = "only whole runs show what it does: tests/system"
WITHOUT_A_TEST_FILE = {
    "megabatch/__main__.py": "every test in tests/test_cli.py runs it",
    "megabatch/train/__init__.py": "tests/train/test_entry.py calls it",
    "megabatch/train/request.py": "plain values, which tests/train/test_entry.py fills in",
    "megabatch/train/elastic_entry.py": WHOLE_RUNS,
    "megabatch/train/trainer.py": WHOLE_RUNS,
}
# Folders whose files only make sense together: one test file, or one of its own beside it.
TESTED_TOGETHER = {"megabatch/config": "tests/config/test_config.py", "megabatch/cli": "tests/test_cli.py"}
WITHOUT_A_SOURCE_FILE = {
    "tests/accelerator/test_accelerator.py": "its sources are all that a step runs through",
    "tests/test_conftest.py": "tests the tests' own scheduling",
    "tests/test_repo.py": "it is about the repository",
    "tests/test_unpickling.py": "it is about the whole package",
    "tests/test_ranks.py": "its source is tests/ranks.py",
    "tests/test_cli.py": "its sources are all verbs of megabatch/cli",
    "tests/recipes/test_codreanu2017.py": "its sources are the recipes codreanu2017*.toml",
}


@cache
def files(*folders: str) -> tuple[Path, ...]:
    """The repository's own files, relative to its root."""

    def walk(folder: Path) -> Iterator[Path]:
        for path in sorted(folder.iterdir()):
            if path.name in NOT_OURS or path.name.startswith(".venv") or path.name.endswith(".egg-info"):
                continue
            if path.is_dir():
                yield from walk(path)
            elif path.is_file():
                yield path.relative_to(ROOT)

    starts = [ROOT / folder for folder in folders] or [ROOT]
    return tuple(path for start in starts if start.is_dir() for path in walk(start))


def python_files(*folders: str) -> list[Path]:
    return [path for path in files(*folders) if path.suffix == ".py"]


def test_no_file_is_too_long() -> None:
    counts = {
        str(path): len((ROOT / path).read_text(encoding="utf-8").splitlines())
        for path in python_files("megabatch", "tests", "benchmarks", "examples")
    }
    assert {path: count for path, count in counts.items() if count > MAX_LINES} == {}
    assert len(counts) > 50


def imports_in(source: str, module: str) -> set[str]:
    """The modules of this package that a source imports, wherever in it: `comm.shape`, `errors`, ..."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            origin = ".".join([*above, node.module] if node.module else above)
            # `from megabatch.comm import shape` may name a module or something in one: both spellings count.
            is_package = (ROOT / origin.replace(".", "/")).is_dir()
            found |= {f"{origin}.{alias.name}" for alias in node.names} if is_package else {origin}
    return {name.removeprefix("megabatch.") for name in found if name.startswith("megabatch.")}


def forbidden(module: str, imported: set[str]) -> set[str]:
    area = module.split(".")[0]
    allowed = MAY_IMPORT[area] | {area}
    return {name for name in imported if not any(name == one or name.startswith(f"{one}.") for one in allowed)}


def module_name(path: Path) -> str:
    return ".".join(part for part in path.with_suffix("").parts[1:] if part != "__init__")


def test_imports_go_one_way() -> None:
    wrong = {}
    for path in python_files("megabatch"):
        if path == Path("megabatch/__init__.py"):
            continue  # hands out names of all areas on demand
        source = (ROOT / path).read_text(encoding="utf-8")
        full_name = ".".join(path.with_suffix("").parts)
        if bad := forbidden(module_name(path), imports_in(source, full_name)):
            wrong[str(path)] = bad
    assert wrong == {}


@pytest.mark.parametrize(
    ("module", "source", "bad"),
    [
        ("report.run", "from megabatch.config import Config", {"config.Config"}),
        ("report.run", "from megabatch import config", {"config"}),
        ("model.norm", "def f():\n    import megabatch.comm.grid", {"comm.grid"}),
        ("comm.grid", "from ..workers import world", {"workers.world"}),
        ("comm.grid", "from .shape import GridShape\nfrom ..errors import GridError", set()),
        ("schedule.batch", "from megabatch.config import Config", {"config.Config"}),
        ("plan.network", "from megabatch.comm.phases import x\nfrom megabatch.comm.grid import y", {"comm.grid"}),
        ("plan.network", "from megabatch.comm import shape, phases", set()),
        ("train.trainer", "from megabatch.cli import app", {"cli.app"}),
        ("data.loader", "from megabatch.schedule.batch import shard_range\nimport torch", set()),
    ],
)
def test_a_wrong_import_is_seen(module: str, source: str, bad: set[str]) -> None:
    assert forbidden(module, imports_in(source, f"megabatch.{module}")) == bad


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "docs/design.md"])
def test_the_chain_of_imports_in_the_documents_is_true(document: str) -> None:
    chain = re.search(r"errors <- .*?<- cli", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL)
    assert chain is not None
    links = [set(link.split(", ")) for link in " ".join(chain[0].split()).split(" <- ")]
    left: set[str] = set()
    for link in links:
        for area in link:
            assert {name.split(".")[0] for name in MAY_IMPORT[area]} <= left, area
        left |= link
    assert left == MAY_IMPORT.keys() - {"__main__"}


def test_what_must_start_at_once_does_not_load_torch() -> None:
    code = f"""
import importlib, sys
for name in {TORCH_FREE!r}:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name + " imports torch"
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_one_version_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == megabatch.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^#+ .*?(\d+\.\d+\.\d+)", changelog, re.MULTILINE)
    assert newest is not None, "CHANGELOG.md has no heading with a version"
    assert newest[1] == megabatch.__version__


def mirror_of(source: Path) -> Path:
    """megabatch/x/y.py -> tests/x/test_y.py; a package's own file is tested under the package's name."""
    inside = source.parent.parts[1:] if source.parts[0] == "megabatch" else ("_".join(source.parent.parts),)
    name = source.parent.name if source.name == "__init__.py" else source.stem.strip("_")
    return Path("tests", *inside, f"test_{name}.py")


def has_code(path: Path) -> bool:
    return bool((ROOT / path).read_text(encoding="utf-8").strip())


def test_every_source_file_has_its_test_file() -> None:
    sources = {path for path in python_files("megabatch") if has_code(path)}
    missing = {
        str(path)
        for path in sources
        if not (ROOT / mirror_of(path)).is_file() and path.parent.as_posix() not in TESTED_TOGETHER
    }
    assert [test for test in TESTED_TOGETHER.values() if not (ROOT / test).is_file()] == []
    assert missing == WITHOUT_A_TEST_FILE.keys()  # an exception that is no longer needed is one too many


def test_every_test_file_has_its_source_file() -> None:
    """tests/system, where many processes and hosts play together, mirrors nothing."""
    mirrored = {mirror_of(path) for path in python_files("megabatch", "benchmarks") if has_code(path)}
    tests = {path for path in python_files("tests") if path.name.startswith("test_") and path.parts[1] != "system"}
    assert {str(path) for path in tests - mirrored} == WITHOUT_A_SOURCE_FILE.keys()


def commands_in(text: str) -> list[str]:
    """The shell commands in the fenced blocks of a Markdown text, continued lines joined."""
    found = []
    for language, block in re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language in ("", "bash", "sh", "shell", "console"):
            joined = block.replace("\\\n", " ")
            found += [line.strip().removeprefix("$ ") for line in joined.splitlines()]
    return [line for line in found if re.search(r"(^|[\s/])(megabatch|make)\s", f"{line} ")]


def check_command(line: str) -> bool:
    """Whether the line runs `megabatch` or `make` at all; raises when it does and asks for what does not exist."""
    ran = False
    for part in re.split(r"&&|\|\||;|\||>", line.partition(" #")[0]):
        words = shlex.split(part)
        names = [Path(word).name for word in words]
        if names[:1] == ["make"]:
            check_make(words[1:])
            ran = True
        elif "megabatch" in names and ("install" not in words):
            check_megabatch(words[names.index("megabatch") + 1 :])
            ran = True
    return ran


def check_megabatch(words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    words = with_values(words)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"megabatch has no verb '{words[0]}'"
        command, words = command.commands[words[0]], words[1:]
    if words != ["--help"] and not hasattr(command, "commands"):
        command.make_context(command.name, list(words))  # parses and checks, runs nothing


def check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words:
        name, equals, _ = word.partition("=")
        pattern = rf"^{re.escape(name)}\s*[?:]?=" if equals else rf"^{re.escape(name)}\s*:(?!=)"
        assert word.startswith("-") or re.search(pattern, makefile, re.MULTILINE), f"make knows no '{word}'"


def test_the_commands_of_the_readme_exist() -> None:
    commands = commands_in((ROOT / "README.md").read_text(encoding="utf-8"))
    if not commands:
        pytest.skip("README.md has no fenced megabatch or make command yet")
    for line in commands:
        check_command(line)
    assert any(check_command(line) for line in commands)


def test_the_commands_of_the_makefile_and_of_the_recipes_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    lines = re.findall(r"\$\(BIN\)/megabatch [^;\\\n]*", makefile)
    values = dict(re.findall(r"^(\w+) \?= (\S+)$", makefile, re.MULTILINE))
    assert lines
    for line in lines:
        assert check_command(re.sub(r"\$\((\w+)\)", lambda match: values.get(match[1], "x"), line))
    for name in recipe_names():
        if command := load_config(name).reference.command:
            assert check_command(command)


@pytest.mark.parametrize(
    "line",
    [
        *(
            "megabatch trian demo",
            "megabatch train demo --worker 3",
            "megabatch train",
            "python -m megabatch data fetch x",
        ),
        *("torchrun --nproc-per-node 4 -m megabatch train demo --nope 1", "make dmeo", "make demo NOBODY=3"),
        *("cd x && megabatch recipes demo demo", ".venv/bin/megabatch evaluate"),
    ],
)
def test_a_command_that_does_not_exist_is_seen(line: str) -> None:
    assert commands_in(f"text\n```bash\n$ {line}\n```\n") == [line]
    with pytest.raises((AssertionError, TyperException)):
        check_command(line)


def test_the_readme_of_the_benchmarks_lists_every_script() -> None:
    told = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    names = [path.stem for path in (ROOT / "benchmarks").glob("*.py")]
    missing = [name for name in names if f"benchmarks.{name}" not in told and f"`{name}.py`" not in told]
    assert not missing, f"benchmarks/README.md does not name {missing}"


def test_a_class_name_occurs_once() -> None:
    sources = [(ROOT / path).read_text(encoding="utf-8") for path in python_files("megabatch")]
    names = Counter(node.name for one in sources for node in ast.walk(ast.parse(one)) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_file_speaks_of_the_machine_it_was_written_on() -> None:
    places = tuple("/" + name + "/" for name in ("work", "root"))
    found = []
    for path in files():
        content = (ROOT / path).read_bytes()
        found += [f"{path}: {place}" for place in places if place.encode() in content]
    assert found == []


def test_sources_are_ascii() -> None:
    suffixes = {".py", ".toml", ".c", ".txt", ""}
    assert [str(path) for path in files() if path.suffix in suffixes and not (ROOT / path).read_bytes().isascii()] == []
