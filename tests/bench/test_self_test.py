"""The self-test: good where all is well, and a bad check for each thing that is broken on purpose."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from megabatch.bench import self_test
from megabatch.bench.self_test import SelfTestRequest, count_waits, page
from megabatch.comm.allreduce import AllReducer
from megabatch.comm.grid import ProcessGrid
from megabatch.errors import ConfigError, LaunchError
from tests.ranks import run_ranks
from tests.system.runs import REPOSITORY, clean_environment


def test_on_a_host_without_accelerators_the_whole_list_is_good(tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    done = subprocess.run(
        [sys.executable, "-m", "megabatch", "doctor", "--self-test", "--workers", "2", "--json", "--output", output],
        cwd=REPOSITORY,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    findings = json.loads(done.stdout.splitlines()[-1])
    assert [one for one in findings if one["good"] is False] == []
    by_name = {one["name"]: one for one in findings}
    assert by_name["training"]["text"].startswith("the same bits as one worker after 6 steps")
    assert " times the " in by_name["training"]["text"]
    assert by_name["killed rank"]["good"]
    assert by_name["killed rank"]["text"].startswith("on the CPU: the other ended")
    assert "connection to rank 1 broke" in by_name["killed rank"]["text"]
    assert [one["good"] for one in findings if one["name"] in ("sum", "integers")] == [True] * 16
    assert output.read_text(encoding="utf-8").count('<span class="chip good">good</span>') >= 19


def _with_a_wrong_torus(rank: int) -> list[tuple[bool, str]]:
    right = AllReducer.run

    def wrong(self: AllReducer, tensor: torch.Tensor, **options: Any) -> None:
        right(self, tensor, **options)
        if self.algorithm == "torus" and rank == 1 and tensor.numel() > 1000:
            tensor[-1] += 1

    with pytest.MonkeyPatch.context() as patch, ProcessGrid.build(timeout_seconds=20) as grid:
        patch.setattr(AllReducer, "run", wrong)
        return [check(grid, name) for check in (self_test._sums, self_test._integers) for name in ("ring", "torus")]


def test_a_wrong_element_on_one_rank_is_bad_on_all() -> None:
    for found in run_ranks(2, _with_a_wrong_torus):
        assert [good for good, _ in found] == [True, False, True, False]
        assert found[3][1].startswith("2 integers differ")  # one for each of two lengths


def _with_other_weights(rank: int, folder: str) -> tuple[bool, str]:
    rows = [{"step_seconds": 1.0, "weights_digest": str(step)} for step in range(6)]
    blank: dict[str, str] = {}
    with pytest.MonkeyPatch.context() as patch, ProcessGrid.build(timeout_seconds=20) as grid:
        patch.setattr(self_test, "_train", lambda *_: None)
        patch.setattr(self_test, "_python", lambda _, environment: blank.update(environment))
        patch.setattr(self_test, "_rows", lambda path: [*rows[:-1], {**rows[-1], "weights_digest": path.name}])
        patch.setattr(self_test, "planned_seconds", lambda _: 0.25)
        found = self_test._training(grid, Path(folder))
    # The twin has no device of any maker.
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    assert blank == (dict.fromkeys(names, "") if rank == 0 else {})
    return found


def test_other_weights_than_those_of_one_worker_are_bad(tmp_path: Path) -> None:
    for good, text in run_ranks(2, _with_other_weights, str(tmp_path)):
        assert not good
        assert text.startswith("other bits as one worker")
        assert "a step takes 1e+03 ms (median of 5), 4 times the 250 ms" in text


def test_a_rank_that_never_ends_and_an_error_are_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "_NOTICED_SECONDS", 0.5)
    monkeypatch.setattr(
        self_test,
        "_LOSE",
        "import os, signal, time; os.environ['RANK'] == '1' and os.kill(os.getpid(), 9); time.sleep(60)",
    )
    assert self_test._killed_rank() == (False, "the other rank did not end within 1 s")

    def broken() -> tuple[bool, str]:
        raise LaunchError("no way\nmore")

    assert self_test._done("sum", broken, "torus: ") == {
        "name": "sum",
        "good": False,
        "text": "torus: LaunchError: no way",
    }


def test_waits_are_counted_by_what_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def action() -> None:
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    assert count_waits(action) == 3
    assert modes == ["warn", "default"]


def test_the_page_shows_what_is_bad_and_escapes_it() -> None:
    findings: list[dict[str, Any]] = [
        {"name": "sum", "good": False, "text": "<b>"},
        {"name": "host", "good": None, "text": "good"},
    ]
    html = page(findings, 4, "nccl")
    assert "1 of 2 checks are bad" in html
    assert '<span class="chip bad">bad</span></td><td>&lt;b&gt;</td>' in html


def test_a_page_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a file in an existing folder"):
        self_test.self_test(SelfTestRequest(output=tmp_path / "nowhere" / "page.html"), {})
