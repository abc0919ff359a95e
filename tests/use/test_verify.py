"""A stretch of a run, computed again, has its bits; whatever was altered is found and named; the run stays as it is."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megabatch.__main__ import main
from megabatch.errors import CheckpointError, ConfigError, DataError, LaunchError, MegabatchError
from megabatch.recipes.scale import over_epochs
from megabatch.train.run_dir import config_of_run
from megabatch.use import verify
from megabatch.use.verify import Verification, verify_run
from tests.ranks import RankFailureError, run_ranks
from tests.system.runs import read_checkpoint, rows_of, train_on_ranks

SETTINGS = (
    *("comm.algorithm=torus", "train.max_steps=14", "train.digest_every_steps=3", "checkpoint.every_steps=5"),
    "optimizer.momentum=0.9",
)
DIGESTS = [3, 5, 6, 9, 10, 12, 14]  # every third, at checkpoints, at the end


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on 2 workers with checkpoints of steps 5, 10 and 14."""
    folder = tmp_path_factory.mktemp("verify") / "run"
    train_on_ranks(2, folder, *SETTINGS)
    assert [row["step"] for row in rows_of(folder) if "weights_digest" in row] == DIGESTS
    return folder


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "run", symlinks=True))


def content_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(folder.rglob("*")) if path.is_file()
    }


LAUNCHED = {"LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def verified(run: Path, steps: str = "", workers: int = 1, *overrides: str) -> Verification:
    """What ranks that a launcher started find together."""
    before = content_of(run)
    found, *others = run_ranks(workers, verify_on_rank, str(run), steps, overrides)
    assert content_of(run) == before
    assert others == [None] * (workers - 1)
    assert found is not None
    return found


def verify_on_rank(_rank: int, run: str, steps: str, overrides: tuple[str, ...]) -> Verification | None:
    os.environ.update(LAUNCHED)
    return verify_run(Path(run), steps, None, overrides, os.environ)


def change_rows(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    rows = rows_of(run)
    for row in rows:
        change(row)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def change_checkpoint(run: Path, step: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Put another content under a checksum that fits."""
    path = run / "checkpoints" / f"step-{step:08d}.pt"
    state = read_checkpoint(path)
    change(state)
    torch.save(state, path)
    path.with_name(f"{path.name}.sha256").write_text(hashlib.sha256(path.read_bytes()).hexdigest())


def flip_bit(tensor: torch.Tensor, bit: int = 0) -> None:
    tensor.as_strided((tensor.numel(),), (1,)).view(torch.int32)[3] ^= 1 << bit


def test_other_workers_and_algorithms_find_the_recorded_bits(run: Path) -> None:
    found = verified(run)
    assert found == Verification("the bits are those recorded: steps 5 to 14, 6 digests", "", ())
    found = verified(run, "5:9", 3, "comm.algorithm=ring", "comm.bucket_mb=0.01")
    assert found == Verification("the bits are those recorded: steps 5 to 9, 3 digests", "", ())


def test_local_workers_verify_too(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = content_of(run)
    found = verify_run(run, "10:12", 2, ("comm.algorithm=hierarchical",), environ={})
    assert found == Verification("the bits are those recorded: steps 10 to 12, 2 digests", "", ())
    assert content_of(run) == before
    assert "resuming after step 10" in capfd.readouterr().out


def test_the_whole_run_needs_no_checkpoint(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    assert verified(run).line == "the bits are those recorded: steps 0 to 14, 7 digests"
    assert verified(run, "0:9", 2).line == "the bits are those recorded: steps 0 to 9, 4 digests"


def test_an_altered_digest_is_named(run: Path) -> None:
    change_rows(run, lambda row: row.update(weights_digest="ab" * 32) if row["step"] == 9 else None)
    found = verified(run)
    assert found.difference.startswith("first in the weights after step 9: ")
    assert found.difference.endswith(", abababababab is recorded; 4 of 5 digests agree; all losses agree")
    assert found.line == f"the bits differ: {found.difference}"
    assert not verified(run, "10:12").difference  # other steps are as they were


def test_an_altered_loss_is_named(run: Path) -> None:
    change_rows(run, lambda row: row.update(loss=row["loss"] - 1e-9) if row["step"] in (8, 11) else None)
    assert verified(run).difference.startswith("the first loss that differs is that of step 8: ")


def test_a_flipped_bit_in_a_checkpoint_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change_checkpoint(run, 5, lambda state: flip_bit(next(v for v in state["model"].values() if v.dim() == 4)))
    monkeypatch.setattr(verify, "start_workers", lambda *_, **__: pytest.fail("nothing needs to be computed"))
    found = verify_run(run, "5:9", 1, environ={})
    assert found
    assert found.difference.startswith("the checkpoint of step 5 holds ")
    assert not verified(run, "10:12").difference


def test_a_checkpoint_without_a_part_is_one_line(run: Path) -> None:
    change_checkpoint(run, 5, lambda state: state.pop("statistics"))
    with pytest.raises(CheckpointError, match=r"step-00000005\.pt' lacks a part"):
        verify_run(run, "5:9", 1, environ={})


def test_a_flipped_bit_in_the_optimizer_is_found_by_its_effect(run: Path) -> None:
    # A high bit: the lowest may need more than a step to reach the loss.
    change_checkpoint(run, 5, lambda state: flip_bit(state["optimizer"]["state"][0]["momentum_buffer"], 22))
    found = verified(run, "5:9")
    assert found.difference.startswith("first in the weights after step 6: ")
    assert "the first loss that differs is that of step 7: " in found.difference


def test_a_damaged_checkpoint_is_passed_over(run: Path) -> None:
    path = run / "checkpoints" / "step-00000005.pt"
    path.write_bytes(path.read_bytes()[:-1])
    found = verified(run)
    assert found.line == "the bits are those recorded: steps 10 to 14, 3 digests"
    assert "step-00000005.pt' is damaged" in found.notes[0]
    with pytest.raises(CheckpointError, match="has no whole checkpoint at or before step 6"):
        verify_run(run, "6:9", 1, environ={})


def test_what_bits_depend_on_is_compared_and_threads_are_those_of_the_run(run: Path) -> None:
    environment = json.loads((run / "environment.json").read_text())
    (run / "environment.json").write_text(
        json.dumps(environment | {"threads_per_worker": 2, "versions": {**environment["versions"], "torch": "1.0"}})
    )
    (note,) = verified(run, "10:12").notes
    torch_version = environment["versions"]["torch"]
    assert note == f"not as in the run: versions.torch 1.0 -> {torch_version}; bits may differ for that reason"


def test_sums_in_floats_depend_on_the_workers(tmp_path: Path) -> None:
    settings = ("comm.sums=float", "train.max_steps=3", "train.digest_every_steps=1")
    train_on_ranks(2, tmp_path / "run", *settings)
    assert verified(tmp_path / "run", "0:", 2).difference == ""
    found = verified(tmp_path / "run", "0:", 1)
    assert found.difference
    assert found.notes == ("sums are in floats, and the run had 2 workers; bits differ for that reason",)


def test_a_run_with_branches_is_verified(tmp_path: Path) -> None:
    """The last checkpoint lies behind the first member, whose file is in the run folder alone."""
    branches = ("collapse.at_epochs=[0.4, 0.8]", "collapse.epochs=0.3", "train.epochs=0.8")
    train_on_ranks(1, tmp_path / "run", *branches, "train.digest_every_steps=1", "checkpoint.every_steps=3")
    last = rows_of(tmp_path / "run")[-1]
    assert last["phase"] == "collapse-2"
    found = verified(tmp_path / "run", "", 2)
    assert found.difference == ""
    assert f"to {last['step']}," in found.line


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ("5", "--steps '5' cannot be read; write FIRST:LAST"),
        ("a:b", "cannot be read"),
        ("9:5", "ends before it begins"),
        ("0:0", "ends before it begins"),
        (
            "4:9",
            r"no whole checkpoint at or before step 4 to begin from \(the oldest is of step 5; the newest 3 are kept",
        ),
        ("0:2", "records no digest of its weights that could be compared"),
        ("15:20", "records no digest of its weights at these steps; the last one before is of step 14"),
        ("7:8", "records no digest of its weights at these steps; the last one before is of step 6"),
    ],
)
def test_what_cannot_be_verified_is_one_line(run: Path, steps: str, words: str) -> None:
    with pytest.raises((ConfigError, CheckpointError, DataError), match=words) as caught:
        verify_run(run, steps, 1, environ={})
    assert "\n" not in str(caught.value)


def test_other_settings_other_data_and_no_run_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"its train\.seed is 0, given 1"):
        verify_run(run, "", 1, ("train.seed=1",), environ={})
    with pytest.raises(CheckpointError, match="is not a run folder"):
        verify_run(tmp_path / "nothing", environ={})
    with pytest.raises(LaunchError, match="--workers 2 was given but torchrun started 3"):
        verify_run(run, "", 2, environ={"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", **LAUNCHED})
    (run / "metrics.jsonl").unlink()
    with pytest.raises(DataError, match=r"metrics.jsonl' does not exist"):
        verify_run(run, environ={})


def test_data_that_is_gone_is_one_line(run: Path, tmp_path: Path) -> None:
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(
        text.replace('source = "generated"', f'source = "folder"\npath = "{tmp_path}/gone"')
    )
    with pytest.raises(MegabatchError, match="gone") as caught:
        verify_run(run, "", 1, environ={})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("difference", "code"), [("", 0), ("somewhere", 1)])
def test_the_exit_code_says_it_too(
    difference: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def answer(*words: Any) -> Verification:
        asked.append(words[:4])
        return Verification("the line", difference, ("a note",))

    monkeypatch.setattr(verify, "verify_run", answer)
    monkeypatch.setattr("sys.argv", ["megabatch", "verify", "runs/x", "--steps", "4:6", "--workers", "2"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    assert capsys.readouterr().out == "a note\nthe line\n"
    assert asked == [(Path("runs/x"), "4:6", 2, ())]


def test_a_run_that_was_given_another_length_and_killed_is_not_accused(run: Path) -> None:
    """Its settings have the new length at once, its newest checkpoint is still of the old one."""
    longer = over_epochs(config_of_run(run), 9)
    (run / "config.toml").write_text(longer.to_toml())
    with pytest.raises(RankFailureError, match="was given another length after step 14, so earlier steps cannot be"):
        verified(run)
