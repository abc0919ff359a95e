"""Cluster files as tables: which keys there are, their units, and the span in which each number can be.

Units are in the key names: `latency_microseconds` and `latency_milliseconds` are both the latency of their section.
Bits and bytes are told apart here and nowhere else: what comes out is bytes and seconds.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from megabatch.errors import ConfigError, nearest
from megabatch.plan import edge
from megabatch.plan.edge import Span, plain_text, shown
from megabatch.plan.quantity import Quantity, read_quantity

__all__ = ["ClusterFile", "parse_cluster"]

_RATES = {"gigabits_per_second": 1e9 / 8, "gigabytes_per_second": 1e9, "bytes_per_second": 1.0}
_TIMES = {"microseconds": 1e-6, "milliseconds": 1e-3, "seconds": 1.0, "hours": 3600.0}


@dataclass(frozen=True, slots=True)
class _Number:
    """A number of a section. units: what the key's name may end in; none for a plain number."""

    span: Span
    units: Mapping[str, float] = field(default_factory=dict)

    def keys(self, stem: str) -> dict[str, float]:
        """The names under which it may stand, each with its unit in bytes per second or seconds."""
        if not self.units:
            return {stem: 1.0}
        return {unit if stem == "rate" else f"{stem}_{unit}": factor for unit, factor in self.units.items()}


_RATE = _Number(edge.RATE, _RATES)
_LATENCY = _Number(edge.LATENCY, _TIMES)
_DURATION = _Number(edge.DURATION, _TIMES)

_NUMBERS: Mapping[str, Mapping[str, _Number]] = {
    "": {},
    "link.worker": {"latency": _LATENCY, "rate": _RATE},
    "link.nic": {
        "latency": _LATENCY,
        "rate": _RATE,
        "count_per_node": _Number(Span(0.01, 1e4)),  # nodes may share one
        "efficiency": _Number(edge.SHARE),
    },
    "link.rack": {"latency": _LATENCY, "rate": _RATE, "oversubscription": _Number(edge.OVERSUBSCRIPTION)},
    "software": {"latency": _LATENCY},
    "straggler": {"relative_deviation": _Number(edge.SCATTER), "deviation": _LATENCY},
    "loader": {"images_per_second_per_node": _Number(Span(1e-3, 1e12))},
    "start": {"initialisation": _DURATION, "first_steps": _DURATION},
    "price": {"per_node_hour": _Number(edge.PRICE)},
    "failures": {
        "node_mtbf": _Number(edge.MTBF, _TIMES),
        "checkpoint": _Number(edge.CHECKPOINT, _TIMES),
        "restart": _DURATION,
    },
}
_OTHER_KEYS: Mapping[str, tuple[str, ...]] = {
    "": ("name", "title", "accelerator", "backend", "num_nodes", "workers_per_node", "nodes_per_rack", "measured_here"),
    "software": ("collectives",),
    "straggler": ("measured_ratios",),
    "price": ("currency",),
}
"""Keys that hold something else than a number with its source."""
_WITHOUT_UNIT = ("rate", "bandwidth", "speed", "latency")
"""What people write for a key whose unit is missing."""


def parse_cluster(text: str, source: str) -> ClusterFile:
    """Read TOML; `source` names it in errors."""
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not valid TOML: {error}; mend that line") from None
    return ClusterFile(table, source)


class ClusterFile:
    """Looks values up by section and stem (`latency`), whatever their unit; a key that is not known is refused."""

    def __init__(self, table: Mapping[str, Any], source: str) -> None:
        self._table, self.source = table, source
        self._refuse_unknown()

    def section(self, name: str) -> Mapping[str, Any]:
        """The keys of a section, none when it is not there."""
        table = self._table
        for part in name.split(".") if name else []:
            inner = table.get(part, {})
            if not isinstance(inner, Mapping):
                raise ConfigError(
                    f"'{part}' of {self.source} is {shown(inner)}, but a section is needed; "
                    f"write its keys below a line [{name}]"
                )
            table = inner
        return table

    def find(self, section: str, stem: str) -> Quantity | None:
        """A number of a section in bytes per second, seconds or plain; None when it is not there."""
        number, table = _NUMBERS[section][stem], self.section(section)
        units = number.keys(stem)
        present = [key for key in units if key in table]
        if len(present) > 1:
            raise ConfigError(f"[{section}] of {self.source} has both {' and '.join(present)}; give one of them")
        if not present:
            return None
        return read_quantity(table[present[0]], self._where(section, present[0]), number.span, units[present[0]])

    def need(self, section: str, stem: str) -> Quantity:
        """The same, where the planner cannot do without."""
        found = self.find(section, stem)
        if found is None:
            keys = ", ".join(_NUMBERS[section][stem].keys(stem))
            raise ConfigError(f"[{section}] of {self.source} lacks its {stem}; give one of {keys}")
        return found

    def count(self, key: str, *, optional: bool = False) -> int:
        """A whole number of the head of the file; 0 when it is `optional` and not there."""
        if key not in self._table and not optional:
            raise ConfigError(f"{self.source} lacks {key}; add it above the first section, such as {key} = 8")
        value = self._table.get(key)
        if value is not None and (needed := edge.COUNT.why_not(value)):
            raise ConfigError(f"{key} of {self.source} is {shown(value)}; {needed}")
        return int(value or 0)

    def text(self, section: str, key: str, default: str = "") -> str:
        return plain_text(self.section(section).get(key, default), self._where(section, key))

    def choice(self, section: str, key: str, known: tuple[str, ...]) -> str:
        """One of the known words; the first when the file does not say."""
        value = self.section(section).get(key, known[0])
        if value not in known:
            raise ConfigError(f"{key} of {self.source} is {shown(value)}; choose one of {', '.join(known)}")
        return str(value)

    def switch(self, key: str) -> bool:
        """A yes or no of the head of the file."""
        value = self._table.get(key, False)
        if not isinstance(value, bool):
            raise ConfigError(f"{key} of {self.source} is {shown(value)}; give true or false")
        return value

    def list_of_numbers(self, section: str, key: str, span: Span) -> tuple[float, ...]:
        """Bare numbers, at least 2; none when the key is not there."""
        where, entry = self._where(section, key), self.section(section).get(key)
        if entry is None:
            return ()
        if not isinstance(entry, list) or len(entry) < 2:
            raise ConfigError(f"{where} is {shown(entry)}; give a list of at least 2 numbers")
        for one in entry:
            if needed := span.why_not(one):
                raise ConfigError(f"{where} holds {shown(one)}; {needed}")
        return tuple(float(one) for one in entry)

    def _where(self, section: str, key: str) -> str:
        return f"{section}.{key} of {self.source}" if section else f"{key} of {self.source}"

    def _refuse_unknown(self) -> None:
        links = [name.removeprefix("link.") for name in _NUMBERS if name.startswith("link.")]
        for key in self.section("link"):
            if key not in links:
                raise ConfigError(f"link {shown(key)} of {self.source} is unknown; links are {', '.join(links)}")
        sections = ["link", "compute", *(name for name in _NUMBERS if name and "." not in name)]
        for name in sections:
            self.section(name)
        for name in _NUMBERS:
            known = _known_keys(name)
            for key in self.section(name):
                if key not in known and not (name == "" and key in sections):
                    self._complain(name, key, known if name else [*known, *sections])

    def _complain(self, section: str, key: str, known: Iterable[str]) -> NoReturn:
        where = f"[{section}] of {self.source}" if section else self.source
        allowed = list(known)
        if key in _WITHOUT_UNIT or key in _NUMBERS[section]:
            units = [name for name in allowed if name.startswith(f"{key}_")] or [n for n in allowed if n in _RATES]
            raise ConfigError(f"{shown(key)} in {where} has no unit; write {' or '.join(units or allowed)}")
        hint = nearest(key, allowed) or f"; known: {', '.join(allowed)}"
        raise ConfigError(f"unknown key {shown(key)} in {where}{hint}")


def _known_keys(section: str) -> list[str]:
    numbers = [key for stem, number in _NUMBERS[section].items() for key in number.keys(stem)]
    return [*_OTHER_KEYS.get(section, ()), *numbers]
