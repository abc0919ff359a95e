"""`megabatch report` from folders to files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from megabatch.errors import ConfigError, DataError
from megabatch.report.make import write_report, write_report_files
from tests.report.folders import make_hostile_run, make_run


def report(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megabatch", "report", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )


def test_a_page_in_the_run_folder_and_a_comparison_beside(tmp_path: Path) -> None:
    one, other = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    done = report(str(one))
    assert (done.returncode, done.stderr) == (0, "")
    first = (one / "report.html").read_bytes()
    assert len(first) < 8_000_000
    assert b"91.17 % top-1" in first
    write_report([one], one / "report.html")
    assert (one / "report.html").read_bytes() == first
    done = report(str(one), str(other), cwd=tmp_path)
    assert done.returncode == 0
    assert b"2 runs compared" in (tmp_path / "comparison.html").read_bytes()


def test_figures_are_written_beside(tmp_path: Path) -> None:
    said: list[str] = []
    write_report_files([make_run(tmp_path / "a")], tmp_path / "x.html", tmp_path / "figures", None, said.append)
    names = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert {"loss.svg", "loss.png", "loss.csv", "ranks.csv"} <= set(names)
    assert said[1] == f"figures        {len(names)} files in {tmp_path / 'figures'}"


def test_a_hostile_folder_gives_a_page(tmp_path: Path) -> None:
    write_report([make_hostile_run(tmp_path / "a")], tmp_path / "x.html")
    assert (tmp_path / "x.html").stat().st_size < 8_000_000


@pytest.mark.parametrize(
    "words", [["nowhere"], ["a", "--output", "missing/x.html"], ["a", "--network", "nothing.json"]]
)
def test_mistakes_are_one_line_and_exit_code_2(tmp_path: Path, words: list[str]) -> None:
    make_run(tmp_path / "a", num_steps=3)
    done = report(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_mistakes_are_our_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        write_report([tmp_path / "none"], tmp_path / "x.html")
    with pytest.raises(ConfigError):
        write_report_files([make_run(tmp_path / "a")], tmp_path, None, None, print)


def test_the_live_page_is_served_until_ctrl_c(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", finished=False)
    words = [sys.executable, "-u", "-m", "megabatch", "report", "--live", str(folder)]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        said = server.stdout.readline()
        url = said.split()[2]
        with urllib.request.urlopen(url, timeout=20) as answer:
            assert answer.status == 200
        server.send_signal(signal.SIGINT)
        begin = time.monotonic()
        out, err = server.communicate(timeout=20)
        assert time.monotonic() - begin < 20
        assert (server.returncode, out, err) == (0, "stopped\n", "")
    finally:
        server.kill()
        server.communicate()
