"""The section on classes: numbers as they are in the file, and nothing of a hostile file but text."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from megabatch.report.classes import MAX_MATRIX, classes_section
from megabatch.report.page import build_page
from megabatch.report.run import Run, read_run
from tests.report.folders import make_run

JPEG = base64.b64encode(b"\xff\xd8 an image").decode()
FOUND: dict[str, Any] = {
    "classes": [["ant", 4, 1, "0.25", "bee"], ["bee", 2, 2, "1", ""]],
    "confusions": [[0, 1, 3]],
    "mistakes": [{"image": "a.jpg", "true": "ant", "predicted": "bee", "probability": 0.97, "jpeg": JPEG}],
}


def run_with(found: dict[str, Any]) -> Run:
    return replace(Run("a", Path("a")), classes=found)


def cells(html: str) -> list[str]:
    return re.findall(r"<td[^>]*>(.*?)</td>", html)


def test_accuracy_matrix_and_mistakes() -> None:
    html = classes_section([run_with(FOUND)])
    matrix = ["ant", "1", "3", "bee", "0", "2"]
    assert cells(html) == ["ant", "4", "1", "25.0%", "bee", "bee", "2", "2", "100.0%", "", *matrix]
    assert f'<img alt="a.jpg" src="data:image/jpeg;base64,{JPEG}">' in html
    assert "ant, taken for bee (97.0%)" in html


def test_many_classes_are_a_list() -> None:
    classes = [[f"c{n}", 2, 1, "", ""] for n in range(MAX_MATRIX + 1)]
    html = classes_section([run_with({"classes": classes, "confusions": [[3, 0, 9], [99, 0, 1]]})])
    assert "Confusion matrix" not in html
    assert cells(html)[-3:] == ["c3", "c0", "9"]


def test_the_page_has_the_section_when_there_is_something_to_say(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a"))
    assert "classes" not in build_page([run]).parts
    assert list(build_page([replace(run, classes=FOUND)]).parts)[-2:] == ["classes", "repeat"]
    assert classes_section([run_with(FOUND), run_with(FOUND)]) == ""


def test_a_hostile_file_is_only_text() -> None:
    evil = "<script>alert(1)</script>"
    bad = [{"image": evil, "true": evil, "jpeg": jpeg} for jpeg in ('"><script>', JPEG + '"', 7, "A" * 10**6, None)]
    rows: list[object] = [[evil, 3, 1, "", evil], ["x", -1, 0], ["x", 1, 2], "no", [evil] * 9]
    pairs: list[object] = [[0, 5, 1], [evil, 0, 1], None, [0.5, 0, 1]]
    html = classes_section([run_with({"classes": rows, "confusions": pairs, "mistakes": bad})])
    assert "<script" not in html
    assert "<img" not in html
    assert "&lt;script&gt;" in html
    assert classes_section([run_with({"classes": evil})]) == ""
