"""Tables of what went wrong, against counts made by hand."""

from __future__ import annotations

import base64
import csv
import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

from megabatch.data.sources import ImageArray
from megabatch.use.mistakes import confusion, write_mistakes

LABELS = [0, 0, 0, 1, 1, 2]
PREDICTED = np.array([0, 1, 1, 1, 0, 2])
CONFIDENCE = np.array([0.9, 0.6, 0.8, 0.7, 0.8, 0.5])


def test_confusion_counts_by_true_and_predicted_class() -> None:
    found = confusion(np.array(LABELS), PREDICTED, 4)
    assert found.tolist() == [[1, 2, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]


def test_the_files(tmp_path: Path) -> None:
    pixels = np.zeros((6, 20, 20, 3), dtype=np.uint8)
    pixels[2] = (250, 5, 5)
    source = ImageArray("test", pixels, LABELS, 4, ("ant", "bee, wild", "fly"))
    write_mistakes(tmp_path, source, ("ant", "bee, wild", "fly", "3"), PREDICTED, CONFIDENCE)
    names = ("classes", "confusion", "mistakes")
    rows = {name: list(csv.reader(io.StringIO((tmp_path / f"{name}.csv").read_text()))) for name in names}
    assert rows["classes"][1:] == [
        ["ant", "3", "1", "0.3333", "bee, wild"],
        ["bee, wild", "2", "1", "0.5000", "ant"],
        ["fly", "1", "1", "1.0000", ""],
        ["3", "0", "0", "", ""],
    ]
    assert rows["confusion"][1:] == [["ant", "bee, wild", "2"], ["bee, wild", "ant", "1"]]
    assert [row[1:] for row in rows["mistakes"][1:]] == [  # equal probabilities: by place in the set
        ["ant", "bee, wild", "0.800000"],
        ["bee, wild", "ant", "0.800000"],
        ["ant", "bee, wild", "0.600000"],
    ]
    found = json.loads((tmp_path / "classes.json").read_text())
    assert found["confusions"] == [[0, 1, 2], [1, 0, 1]]
    first = Image.open(io.BytesIO(base64.b64decode(found["mistakes"][0]["jpeg"])))
    assert first.size == (96, 96)
    assert np.asarray(first)[40, 40, 0] > 200  # image 2, the red one


def test_a_model_without_mistakes(tmp_path: Path) -> None:
    source = ImageArray("test", np.zeros((2, 8, 8, 1), dtype=np.uint8), [0, 1], 2, ("a", "b"))
    write_mistakes(tmp_path, source, ("a", "b"), np.array([0, 1]), np.array([1.0, 1.0]))
    assert (tmp_path / "mistakes.csv").read_text() == "image,true,predicted,probability\n"
