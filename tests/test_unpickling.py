"""What comes from disk or network is never unpickled: it could run code."""

from __future__ import annotations

import ast

import pytest

from tests.test_repo import ROOT, python_files

UNPICKLING = {
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "Unpickler"),
}
# Pipes between a process and the child it has started; nobody else can write into them.
MAY_UNPICKLE = {"megabatch/data/loader_process.py"}


def unpickles(source: str) -> set[str]:
    """Calls in a source that run code found in what they read."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute | ast.Name):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            found |= {name} & UNPICKLING
        if isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names} & (
                UNPICKLING | ({"load", "loads"} if node.module == "pickle" else set())
            )
        if isinstance(node, ast.Call):
            call, keywords = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
            if call in ("pickle.load", "pickle.loads"):
                found.add(call)
            if call == "torch.load" and keywords.get("weights_only") != "True":
                found.add(call)
            if call.endswith("np.load") and keywords.get("allow_pickle", "False") != "False":
                found.add(call)
    return found


def test_nothing_that_comes_from_elsewhere_is_unpickled() -> None:
    sources = {str(path): (ROOT / path).read_text(encoding="utf-8") for path in python_files("megabatch")}
    assert {path for path, source in sources.items() if unpickles(source)} == MAY_UNPICKLE


@pytest.mark.parametrize(
    "source",
    [
        *("dist.all_gather_object(a, b)", "from torch.distributed import broadcast_object_list", "torch.load(file)"),
        *("torch.load(file, weights_only=False)", "pickle.loads(data)", "from pickle import loads"),
        *("np.load(file, allow_pickle=True)", "pickle.Unpickler(file).load()"),
    ],
)
def test_unpickling_is_seen(source: str) -> None:
    assert unpickles(source)
    assert not unpickles("torch.load(file, weights_only=True); json.loads(data); np.load(file)")
