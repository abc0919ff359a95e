"""The page: one file, nothing from elsewhere, same bytes, its data equal to the CSV, nothing injected."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megabatch.errors import ConfigError, DataError
from megabatch.report.figure import Constant, Figure, Missing, figure_csv
from megabatch.report.page import (
    all_figures,
    build_page,
    html_of,
    json_for_script,
    script_hash,
    write_report,
    write_report_files,
)
from megabatch.report.run import read_run, read_runs
from tests.report.folders import HOSTILE, make_hostile_run, make_run


def html(*folders: Path) -> str:
    runs = read_runs(folders)
    return html_of(build_page(runs), runs)


def data_in(text: str) -> Any:
    match = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', text, re.DOTALL)
    assert match is not None
    return json.loads(match[1])


def test_same_input_same_bytes(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "a"), make_run(tmp_path / "b", seed=1)]
    assert html(*folders) == html(*folders)
    assert html(folders[0]) == html(folders[0])


def test_claim_conditions_figures_repeat_in_this_order(tmp_path: Path) -> None:
    assert re.findall(r'<section id="(\w+)"', html(make_run(tmp_path / "a"))) == [
        "claim",
        "conditions",
        "figures",
        "repeat",
    ]


def test_nothing_comes_from_elsewhere(tmp_path: Path) -> None:
    text = html(make_run(tmp_path / "a"))
    assert not re.search(r'\b(src|href)\s*=\s*"(?!#)', text)
    assert "@import" not in text
    assert "url(" not in text


def test_the_policy_allows_exactly_the_scripts_of_the_page(tmp_path: Path) -> None:
    text = html(make_run(tmp_path / "a"))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    allowed = set(re.findall(r"sha256-[\w+/=]+", policy[1]))
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 4
    assert {script_hash(source).strip("'") for source in scripts} == allowed
    assert "default-src &#x27;none&#x27;" in policy[1]


def test_data_of_every_figure_equals_its_csv(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", num_steps=2000)
    drawn = {figure["key"]: figure for figure in data_in(html(folder))["figures"]}
    figures = [one for one in all_figures([read_run(folder)]) if isinstance(one, Figure)]
    assert set(drawn) == {figure.key for figure in figures}
    for figure in figures:
        rows = list(csv.reader(io.StringIO(figure_csv(figure))))[1:]
        points = [
            (one["name"], one["tag"], str(x) if isinstance(x, str) else repr(x), repr(y))
            for one in drawn[figure.key]["series"]
            for x, y in zip(one["x"], one["y"], strict=True)
        ]
        assert [tuple(row[:4]) for row in rows] == points


def test_a_hostile_run_injects_nothing(tmp_path: Path) -> None:
    folder = make_hostile_run(tmp_path / "<img src=x onerror=alert(1)>")
    text = html(folder)
    assert len(re.findall(r"<script", text)) == 5  # theme, data, three of ours
    assert "<img" not in text
    assert HOSTILE[:20] not in text
    assert data_in(text)["figures"]


def test_the_version_follows_the_content(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", finished=False)
    before = build_page([read_run(folder)]).version
    assert build_page([read_run(folder)]).version == before
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 101, "epoch": 4.04, "loss": 0.1}\n')
    assert build_page([read_run(folder)]).version != before


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
    assert len(first) < 1_500_000
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
    assert (tmp_path / "x.html").stat().st_size < 1_500_000


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


KEYS = [
    *("accuracy", "loss", "lr", "global_batch_size", "momentum", "gradient_norm", "images_per_second"),
    *("step_split", "ranks"),
    *("membership", "all_reduce", "efficiency", "predicted", "noise_scale", "ensemble"),
]


def test_every_figure_is_there_or_explained(tmp_path: Path) -> None:
    for runs in (
        [read_run(make_run(tmp_path / "a"))],
        read_runs([make_run(tmp_path / "b"), make_run(tmp_path / "c", workers=2, grid="1x2")]),
        [read_run(make_hostile_run(tmp_path / "d"))],
    ):
        found = all_figures(runs)
        several = ["accuracy_by_time", "accuracy", "accuracy_by_step"]
        assert [one.key for one in found] == (several + KEYS[1:] if len(runs) > 1 else KEYS)
        for one in found:
            assert one.title
            if isinstance(one, Missing):
                assert one.why
            elif isinstance(one, Constant):
                assert one.text
            else:
                assert one.caption
                assert all(series.y for series in one.series)


def test_json_cannot_end_its_script_element_and_reads_back() -> None:
    value = {"a": "</script><!--", "b": ["&amp;", "\u2028"]}
    dumped = json_for_script(value)
    assert not set("<>&") & set(dumped)
    assert json.loads(dumped) == value
    with pytest.raises(ValueError, match="JSON"):
        json_for_script({"a": float("nan")})


def test_the_hash_is_what_a_policy_wants() -> None:
    digest = base64.b64encode(hashlib.sha256(b"let a = 1;").digest()).decode()
    assert script_hash("let a = 1;") == f"'sha256-{digest}'"
