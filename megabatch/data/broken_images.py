"""Images that cannot be read: what stands in for them, how they are listed, and when there are too many.

The rule: in training a broken image is replaced by the next readable one by index, with that one's label, under the
random draws of the image it stands in for. Batches stay whole, and the outcome depends on the set alone, not on
ranks or loader processes. In evaluation a broken image is shown as plain grey under its own label, so that the
set keeps its size and a network is not rewarded for what cannot be seen.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megabatch.errors import DataError

__all__ = ["MAX_NEIGHBOURS", "Broken", "BrokenLog"]

MAX_NEIGHBOURS = 16
"""So many broken images in a row by index mean that a shard or a disk is gone: the run stops."""

JUDGED_OVER_IMAGES = 10_000
"""The share of broken images is taken of no fewer than so many, or the first one would be 100 %."""


@dataclass(frozen=True)
class Broken:
    """An image that could not be read, and why."""

    index: int
    name: str
    reason: str


class BrokenLog:
    """Counts the broken images that one rank met, lists each once, stops the run when they are too many.

    `max_share` is the largest tolerated share of the images read; with 0 the first broken image stops the run.
    Written as lines of JSON to `path`, which is made when the first line is.
    """

    def __init__(self, max_share: float, path: Path | None = None, set_name: str = "") -> None:
        self.max_share = max_share
        self.num_read = 0
        self.num_broken = 0
        self._path, self._set_name = path, set_name
        self._listed: set[int] = set()

    @property
    def is_tolerant(self) -> bool:
        return self.max_share > 0

    def note(self, num_read: int, broken: list[Broken]) -> None:
        """Adds what a batch brought. Raises DataError when too many images are broken."""
        self.num_read += num_read
        self.num_broken += len(broken)
        new = [one for one in broken if one.index not in self._listed]
        self._listed.update(one.index for one in new)
        if new and self._path is not None:
            lines = "".join(json.dumps({"set": self._set_name, **asdict(one)}) + "\n" for one in new)
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with open(self._path, "a", encoding="utf-8") as file:
                    file.write(lines)
            except OSError as error:
                raise DataError(
                    f"cannot write {self._path}: {error.strerror}; make room there, then --resume"
                ) from None
        if broken and self.num_broken > self.max_share * max(self.num_read, JUDGED_OVER_IMAGES):
            where = f" (listed in {self._path})" if self._path and self.max_share else ""
            raise DataError(
                f"{self.num_broken} of {self.num_read} images read were broken{where}, data.max_broken_share allows "
                f"{self.max_share:g}; the last: {broken[-1].reason}"
            )
