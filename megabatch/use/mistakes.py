"""What went wrong, class by class: tables and the most confident mistakes, written into the run folder.

classes.csv     images, hits and accuracy of every class, and what it is taken for most often
confusion.csv   how many images of one class were taken for another; pairs that occur
mistakes.csv    every image that was classified wrongly, the most confident first
classes.json    the same for the report, with the first mistakes as small images
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from megabatch.data.batches import fit
from megabatch.data.randomness import Floats, Ints
from megabatch.data.sources import Source
from megabatch.errors import DataError
from megabatch.files import write_atomically, write_json
from megabatch.report.run import CLASSES_FILE
from megabatch.text import csv_text

NUM_SHOWN = 12
_THUMBNAIL = 96  # pixels
_MAX_PAIRS = 400
_OF_MISTAKE = ("image", "true", "predicted", "probability")


def confusion(labels: Ints, predicted: Ints, num_classes: int) -> Ints:
    """Counts by true class and predicted class."""
    counts = np.bincount(labels * num_classes + predicted, minlength=num_classes**2)
    return counts.reshape(num_classes, num_classes).astype(np.int64)


def write_mistakes(
    folder: Path, source: Source, class_names: Sequence[str], predicted: Ints, confidence: Floats
) -> None:
    """Write the four files.

    predicted, confidence: for each image of the source the class with the largest probability, and that probability.
    """
    matrix = confusion(source.labels, predicted, len(class_names))
    classes = [_class_row(matrix, label, class_names) for label in range(len(class_names))]
    true, taken = np.nonzero(matrix - np.diag(np.diag(matrix)))
    pairs = sorted((-int(matrix[t, p]), int(t), int(p)) for t, p in zip(true, taken, strict=True))
    named = [(class_names[t], class_names[p], -count) for count, t, p in pairs]
    wrong = np.nonzero(predicted != source.labels)[0]
    wrong = wrong[np.lexsort((wrong, -confidence[wrong]))]
    mistakes = [
        (source.name_of(i), class_names[source.labels[i]], class_names[predicted[i]], float(confidence[i]))
        for i in wrong.tolist()
    ]
    tables: dict[str, list[Sequence[object]]] = {
        "classes": [("class", "images", "correct", "accuracy", "most_often_taken_for"), *classes],
        "confusion": [("true", "predicted", "images"), *named],
        "mistakes": [_OF_MISTAKE, *((*one[:3], f"{one[3]:.6f}") for one in mistakes)],
    }
    for name, rows in tables.items():
        write_atomically(folder / f"{name}.csv", csv_text(rows))
    shown = [
        dict(zip(_OF_MISTAKE, one, strict=True)) | {"jpeg": _thumbnail(source, index)}
        for index, one in zip(wrong[:NUM_SHOWN].tolist(), mistakes, strict=False)
    ]
    found: dict[str, Any] = {
        "num_images": len(source),
        "classes": [list(row) for row in classes],
        "confusions": [[t, p, -count] for count, t, p in pairs[:_MAX_PAIRS]],
        "mistakes": shown,
    }
    write_json(folder / CLASSES_FILE, found)


def _class_row(matrix: Ints, label: int, names: Sequence[str]) -> tuple[str, int, int, str, str]:
    images, correct = int(matrix[label].sum()), int(matrix[label, label])
    others = matrix[label].copy()
    others[label] = 0
    taken_for = names[int(others.argmax())] if others.any() else ""
    return names[label], images, correct, f"{correct / images:.4f}" if images else "", taken_for


def _thumbnail(source: Source, index: int) -> str:
    """A small JPEG in base64; empty for an image that cannot be read."""
    try:
        pixels = fit(source.read(index), _THUMBNAIL)
    except DataError:
        return ""
    out = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(out, "JPEG", quality=80)
    return base64.b64encode(out.getvalue()).decode()
