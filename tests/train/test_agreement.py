"""What the workers of an elastic run must have in common, and that it is found where it differs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import megabatch
from megabatch.comm.shape import near_square
from megabatch.data.formats import open_source
from megabatch.data.sources import digest_of_set
from megabatch.train.agreement import agreement_of, code_digest
from megabatch.train.components import build_components
from megabatch.workers.world import ALONE
from tests.ranks import run_ranks
from tests.system.runs import small_config

CHANGES = {
    "comm.algorithm=ring": ["comm.algorithm"],
    "comm.bucket_mb=1": ["comm.bucket_mb"],
    "comm.shared_memory=false": ["comm.shared_memory"],
    "checkpoint.every_steps=3": ["checkpoint.every_steps"],
    "train.evaluation_batch_size=7": ["train.evaluation_batch_size"],
    "train.audit_every_steps=2": ["train.audit_every_steps"],
    "optimizer.lr=0.3": ["[optimizer]"],
    "data.generated.num_val=104": ["[data]", "validation images"],
    "model.width=4": ["[model]", "network"],
    "train.seed=8": ["[train]", "network", "training images", "validation images"],
}
OWN_AFFAIRS = ("checkpoint.keep=9", "comm.hang_seconds=9", "data.loader_threads=2", "log.to=[]", "data.path=elsewhere")


def found(rank: int, changes: list[tuple[str, ...]]) -> list[dict[str, str]]:
    agreements = []
    for overrides in changes:
        config = small_config(*overrides)
        with build_components(config, ALONE, near_square(1), torch.device("cpu"), is_elastic=True) as components:
            agreements.append(agreement_of(components, None, 1, 0))
    return agreements


def test_each_setting_that_matters_is_seen_and_named() -> None:
    """What is sent depends on some that the bits do not depend on: other sizes would end both workers."""
    first, again, own, *others = run_ranks(1, found, [(), (), OWN_AFFAIRS, *((change,) for change in CHANGES)])[0]
    assert first == again == own
    named = [sorted(name for name in first if first[name] != other[name]) for other in others]
    assert dict(zip(CHANGES, named, strict=True)) == {change: sorted(names) for change, names in CHANGES.items()}
    assert {"threads", "torch", "numpy", "pillow", "instructions", "processor", "code"} <= first.keys()


def seen_devices(rank: int) -> list[set[str]]:
    torch.cuda.is_available = lambda: True
    names = []
    with build_components(small_config(), ALONE, near_square(1), torch.device("cpu"), is_elastic=True) as components:
        for variables in ({}, {"CUDA_VISIBLE_DEVICES": "1", "DNNL_VERBOSE": "1"}, {"ONEDNN_MAX_CPU_ISA": "AVX2"}):
            os.environ |= variables
            names.append(set(agreement_of(components, None, 1, 0)))
    return names


def test_devices_and_logs_are_a_workers_own_affair() -> None:
    """Schedulers show each worker other devices; elastic runs compute on CPUs."""
    first, with_devices, with_other_instructions = run_ranks(1, seen_devices)[0]
    assert first == with_devices == with_other_instructions - {"ONEDNN_MAX_CPU_ISA"} != with_other_instructions


def asked(rank: int) -> list[str]:
    with build_components(small_config(), ALONE, near_square(1), torch.device("cpu"), is_elastic=True) as components:
        made = [agreement_of(components, *words) for words in (("2x1", 1, 0), ("02x1", 2, 4), (None, 1, 0))]
    return [f"{one['--grid']}, {one['workers']}" for one in made]


def test_grid_and_bounds_are_told_as_they_were_asked_for() -> None:
    assert run_ranks(1, asked)[0] == ["2x1, 1 to any number", "2x1, 2 to 4", "automatic, 1 to any number"]


def test_another_source_file_is_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = code_digest()
    (tmp_path / "part").mkdir()
    for name in ("__init__.py", "part/kernel.c", "notes.txt"):
        (tmp_path / name).write_text("x")
    monkeypatch.setattr(megabatch, "__file__", str(tmp_path / "__init__.py"))

    def digest() -> str:
        code_digest.cache_clear()
        return code_digest()

    try:
        first = digest()
        assert first not in (own, "")
        (tmp_path / "notes.txt").write_text("y")
        assert digest() == first
        (tmp_path / "part" / "kernel.c").write_text("y")
        assert digest() != first
    finally:
        monkeypatch.undo()
        assert digest() == own


@pytest.mark.parametrize("same", [True, False])
def test_sets_are_compared_without_their_place(same: bool, tmp_path: Path) -> None:
    digests = []
    for place in ("a", "b"):
        for number in range(4):
            image = tmp_path / place / "images" / "train" / f"class{number % 2}" / f"{number}.png"
            image.parent.mkdir(parents=True, exist_ok=True)
            image.write_bytes(b"x" * (10 + (number == 3 and place == "b" and not same)))
        digests.append(digest_of_set(open_source("folder", tmp_path / place / "images", "train")))
    assert (digests[0] == digests[1]) is same
