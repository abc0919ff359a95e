"""The command line: every mistake is one line on stderr with exit code 2, and options arrive where they belong."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import typer

import megabatch
from megabatch.__main__ import main
from megabatch.cli import app
from megabatch.data import idx
from megabatch.data.fit_to_set import Fitted
from megabatch.errors import DataError
from megabatch.recipes import load_config
from megabatch.train import entry
from megabatch.train.request import TrainRequest
from megabatch.train.run_dir import hold

LAUNCHER_PREFIXES = ("SLURM_", "OMPI_", "PMI", "MPI_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "MEGABATCH_")
TINY = (
    *("data.source=generated", "data.generated.num_train=128", "data.generated.num_val=16"),
    *("data.image_size=8", "train.global_batch_size=128", "train.ghost_batch_size=64", "train.epochs=1"),
)


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


class Command:
    """Runs `megabatch WORDS` in this process, as the installed command does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *words: str) -> Outcome:
        self._monkeypatch.setattr(sys, "argv", ["megabatch", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        assert isinstance(code, int)
        return Outcome(code, *self._capsys.readouterr())

    def refuses(self, *words: str) -> str:
        """The one line of a user's mistake."""
        done = self(*words)
        assert done.code == 2
        assert done.out == ""
        lines = done.err.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("megabatch: ")
        return lines[0].removeprefix("megabatch: ")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(LAUNCHER_PREFIXES):
            monkeypatch.delenv(name)

    def started(*_: object) -> int:
        raise AssertionError("workers were started")

    monkeypatch.setattr(entry, "start_workers", started)
    num_threads = torch.get_num_threads()
    yield Command(monkeypatch, capsys)
    torch.set_num_threads(num_threads)


MISTAKES: list[tuple[str, list[str]]] = [
    ("nonsense", ["nonsense"]),
    ("train", ["recipe"]),
    ("train demo extra", ["extra"]),
    ("train demo --nope", ["--nope"]),
    ("train demo --workers 0", ["--workers", "1"]),
    ("train demo --workers many", ["--workers", "integer"]),
    ("train demo --set", ["--set"]),
    ("train dmo", ["unknown recipe 'dmo'", "did you mean 'demo'?"]),
    ("train nowhere.toml", ["nowhere.toml", "does not exist"]),
    ("train demo --set train.epochs", ["section.key=value"]),
    ("train demo --set train.epoch=2", ["train.epoch", "did you mean 'epochs'?"]),
    ("train demo --set train.global-batch-size=2", ["train.global-batch-size", "did you mean 'global_batch_size'?"]),
    ("train demo --set epochs=2", ["unknown key 'epochs'"]),
    ("train demo --set train.epochs=-1", ["train.epochs", "-1"]),
    (
        "train demo --set train.ghost_batch_size=64 --set train.global_batch_size=1000",
        ["1000", "train.ghost_batch_size 64", "960, 1024"],
    ),
    ("train demo --set train.global_batch_size=0:1024,nan:2048", ["global_batch_size"]),
    ("train demo --set optimizer.name=adam", ["optimizer.name", "adam"]),
    ("train demo --grid 2x2 --workers 3", ["grid 2x2 needs 4", "world has 3", "1x3, 3x1"]),
    ("train demo --grid two", ["grid 'two'", "2x4"]),
    ("train demo --grid 0x4 --workers 4", ["0x4"]),
    ("train demo --resume", ["--resume", "--output"]),
    ("evaluate", ["run"]),
    ("evaluate nowhere", ["'nowhere' is not a run folder"]),
    ("recipes dmo", ["unknown recipe 'dmo'"]),
    ("recipes demo demo", ["demo"]),
    ("doctor --nope", ["--nope"]),
    ("data nope", ["nope"]),
    ("data get", ["name"]),
    ("data get fashion-mnits", ["fashion-mnits", "did you mean 'fashion-mnist'?"]),
]


@pytest.mark.parametrize(("words", "said"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_is_one_line_that_names_it(command: Command, words: str, said: list[str]) -> None:
    line = command.refuses(*words.split())
    for part in said:
        assert part in line


def test_debug_shows_where_and_still_exits_with_2(command: Command) -> None:
    done = command("train", "demo", "--grid", "two", "--debug")
    assert done.code == 2
    assert "Traceback" in done.err
    assert done.err.splitlines()[-1].startswith("megabatch: grid 'two'")


@pytest.mark.parametrize("words", [(), ("data",)])
def test_a_bare_command_shows_help_and_no_empty_complaint(command: Command, words: tuple[str, ...]) -> None:
    done = command(*words)
    assert "Usage" in done.out
    assert done.err == ""


@pytest.mark.parametrize("words", ["", "train", "evaluate", "recipes", "doctor", "data", "data get"])
def test_every_verb_has_help(command: Command, words: str) -> None:
    done = command(*words.split(), "--help")
    assert (done.code, done.err) == (0, "")
    assert "Usage" in done.out


def _verbs(command: Any) -> Iterator[Any]:
    if not hasattr(command, "commands"):
        yield command
        return
    for inner in command.commands.values():
        yield from _verbs(inner)


def test_no_two_options_of_a_verb_have_one_name() -> None:
    verbs = list(_verbs(typer.main.get_command(app)))
    assert len(verbs) > 15
    for verb in verbs:
        names = [name for one in verb.params for name in (*one.opts, *one.secondary_opts)]
        assert len(names) == len(set(names)), verb.name


def test_what_is_typed_after_launch_reaches_the_script(command: Command) -> None:
    words = ["demo", "--output", "/runs/a", "--workers", "2", "--grid", "2x2", "--data", "/images", "--grace", "33"]
    words += ["--set", "train.seed=5", "--set", "train.epochs=3", "--python", "python9"]
    slurm = command("launch", "slurm", *words, "--nodes", "2", "--cores", "7", "--time", "01:02:03", "--name", "n1").out
    for part in ("--nodes=2", "--cpus-per-task=14", "--time=01:02:03", "--job-name=n1", "USR1@33"):
        assert part in slurm
    ssh = command("launch", "ssh", *words, "--host", "one", "--host", "two", "--no-health-check").out
    for script in (slurm, ssh):
        for part in ("--output /runs/a", "--nproc-per-node 2", "--grid 2x2", "--data /images", "--shutdown-timeout 33"):
            assert part in script
        assert "--set train.seed=5 --set train.epochs=3" in script
        assert "python9" in script
    assert ("megabatch doctor" in slurm, 'everywhere "$doctor"' in ssh) == (True, False)


def test_a_folder_that_is_taken_is_refused_before_any_worker_starts(command: Command, tmp_path: Path) -> None:
    with hold(tmp_path / "run", load_config("demo", ["train.seed=5"]), resume=False):
        pass
    assert "--resume" in command.refuses("train", "demo", "--output", "run")
    line = command.refuses("train", "demo", "--output", "run", "--resume", "--set", "train.seed=3")
    assert "train.seed is 5, given 3" in line
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").touch()
    assert "is not a run folder" in command.refuses("train", "demo", "--output", "other")


def test_half_a_launcher_is_refused(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert "WORLD_SIZE" in command.refuses("train", "demo")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert "--workers 3" in command.refuses("train", "demo", "--workers", "3")


def test_a_slurm_allocation_needs_srun_unless_local_workers_are_asked_for(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message offers `--workers N` as a way out, so it must be one: the grid is what is refused next."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert "`srun`" in command.refuses("train", "demo")
    assert "grid 3x3" in command.refuses("train", "demo", "--workers", "2", "--grid", "3x3")


def test_bounds_of_workers_that_make_no_sense(command: Command) -> None:
    assert "add --elastic" in command.refuses("train", "demo", "--min-workers", "2")
    bounds = ("--workers", "4", "--elastic", "--min-workers", "3", "--max-workers", "1")
    assert "--min-workers 3 is more than --max-workers 1" in command.refuses("train", "demo", *bounds)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[TrainRequest, int | None]]:
    """What `train` asks for, instead of a training."""
    seen: list[tuple[TrainRequest, int | None]] = []

    def note(request: TrainRequest, workers: int | None, _environ: object) -> int:
        seen.append((request, workers))
        return 0

    monkeypatch.setattr(entry, "train_here", note)
    return seen


def test_options_reach_the_training(command: Command, requests: list[tuple[TrainRequest, int | None]]) -> None:
    assert command("train", "demo").code == 0
    words = "train demo --workers 4 --grid 2x2 --output runs/a --resume --debug --set train.seed=1 --set train.epochs=2"
    assert command(*words.split()).code == 0
    changed = load_config("demo", ["train.seed=1", "train.epochs=2"])
    assert requests == [
        (TrainRequest(load_config("demo"), name="demo"), None),
        (TrainRequest(changed, Path("runs/a"), "2x2", resume=True, debug=True, name="demo"), 4),
    ]


@pytest.mark.parametrize(
    "path", ["plain", "/with space/and=equals", 'quote"d \\ back', "caf\u00e9", "\U0001f600/x", "3"]
)
def test_any_path_survives_on_its_way_to_the_settings(
    command: Command, requests: list[tuple[TrainRequest, int | None]], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megabatch.cli.words.fit_to_set", lambda *_: Fitted((), ()))  # there is nothing to look at
    assert command("train", "demo", "--data", path).code == 0
    # Absolute, because workers, a resumed run and `evaluate` may stand in another folder.
    assert requests[0][0].config.data.path == str(Path(path).absolute())


def test_the_exit_code_of_a_training_is_that_of_the_command(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "train_here", lambda *_: 143)
    assert command("train", "demo").code == 143

    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(entry, "train_here", interrupted)
    assert command("train", "demo") == (130, "", "")


def test_recipes_are_listed_and_shown(command: Command) -> None:
    done = command("recipes")
    assert (done.code, done.err) == (0, "")
    assert "demo" in done.out
    done = command("recipes", "demo")
    assert "[optimizer]" in done.out


def test_the_doctor_speaks_to_people_and_to_programs(command: Command) -> None:
    done = command("doctor")
    assert (done.code, done.err) == (0, "")
    assert "software" in done.out
    assert {finding["name"] for finding in json.loads(command("doctor", "--json").out)} >= {"software", "disk"}


def test_a_set_that_can_and_one_that_cannot_be_had(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*_: object, **__: object) -> Path:
        raise DataError("fashion-mnist cannot be had (no network); use generated images")

    monkeypatch.setattr(idx, "get_fashion_mnist", unavailable)
    assert "cannot be had" in command.refuses("data", "get", "fashion-mnist")
    monkeypatch.setattr(idx, "get_fashion_mnist", lambda *_, **__: Path("/here"))
    assert command("data", "get", "fashion-mnist").out == "fashion-mnist: /here\n"


def test_a_run_without_a_usable_model_is_one_line(command: Command, tmp_path: Path) -> None:
    with hold(tmp_path / "run", load_config("demo", list(TINY)), resume=False):
        pass
    assert "neither a model nor a checkpoint" in command.refuses("evaluate", "run")
    (tmp_path / "run" / "model.safetensors").write_bytes(b"not a model")
    assert "neither a model nor a checkpoint" in command.refuses("evaluate", "run")  # of an earlier end of the run
    (tmp_path / "run" / "summary.json").write_text("{}")
    assert "damaged" in command.refuses("evaluate", "run")
    (tmp_path / "run" / "config.toml").write_text("[train\n")
    assert "config.toml" in command.refuses("evaluate", "run")


def run_process(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)}
    return subprocess.run(
        [sys.executable, "-m", "megabatch", *words],
        cwd=folder,
        env={**environ, "PYTHONPATH": str(Path(__file__).parents[1]), **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_real_process_prints_one_line_and_exits_with_2(tmp_path: Path) -> None:
    done = run_process(tmp_path, "train", "dmo")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "megabatch: unknown recipe 'dmo'; did you mean 'demo'?; `megabatch recipes` shows what each one does"
    ]


def test_missing_images_are_one_line_from_a_worker_too(tmp_path: Path) -> None:
    """A world of one, as torchrun would start it; the mistake is found after the worker has joined."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = ("train", "demo", "--set", "data.source=folder", "--data", "not/there", "--output", "run")
    done = run_process(tmp_path, *words, **world)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "not/there does not exist" in done.stderr
    assert os.listdir(tmp_path) == []


def test_the_version_is_said(command: Command) -> None:
    assert command("--version") == (0, f"megabatch {megabatch.__version__}\n", "")


def test_every_example_of_the_help_is_a_command_that_exists_on_lines_of_its_own(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = command("train", "--help").out
    assert max(map(len, shown.splitlines())) <= 80
    found = [line.strip(" \u2022") for line in shown.splitlines() if "megabatch train demo" in line]
    assert "megabatch train demo --workers 2" in found


def test_a_folder_that_is_no_run_cannot_be_resumed(command: Command, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert command.refuses("train", "--resume", "empty").startswith("'empty' is not a run folder (it has no config.")
