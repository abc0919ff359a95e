"""Cluster files: TOML with units in the key names; see `megabatch/plan/clusters` and docs/planning.md."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from megabatch.errors import ConfigError, nearest
from megabatch.files import parse_toml, read_text
from megabatch.plan import quantity
from megabatch.plan.cluster import RATES, Cluster, Place
from megabatch.plan.compute import BACKWARD_SHARE, ComputeTable, check_points
from megabatch.plan.quantity import Bounds, Quantity, check_certainty, check_text, read_quantity, shown

CLUSTERS = Path(__file__).parent / "clusters"

_LINKS = ("worker", "nic", "rack")
_WITHOUT_UNIT = ("rate", "bandwidth", "speed", "latency")
"""What people write for a key whose unit is missing."""
_HEAD = ("accelerator", "backend", "num_nodes", "workers_per_node", "nodes_per_rack")
_EXAMPLE = 'milliseconds_by_local_batch = { "32" = 50.0, "64" = 98.0 }'


def _steps(value: object) -> object:
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f'is {shown(value)}; give at least one batch and its step, such as {{ "32" = 50.0 }}')
    return value


_OF_CLUSTER: Mapping[str, Place] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Cluster, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}
_OF_LINKS = (
    Place("link.nic.count_per_node", Bounds(0.01, 1e4)),  # nodes may share one
    Place("link.nic.efficiency", quantity.SHARE),
    Place("link.rack.oversubscription", quantity.OVERSUBSCRIPTION),
)
"""What becomes part of the rates of a cluster."""
_OF_COMPUTE = (
    Place("compute.model", check_text),
    Place("compute.milliseconds_by_local_batch", _steps),
    Place("compute.certainty", lambda value: value),
    Place("compute.source", check_text),
    Place("compute.backward_share", BACKWARD_SHARE.check),
)
_PLACES = (*_OF_CLUSTER.values(), *_OF_LINKS, *_OF_COMPUTE)
_SECTIONS = tuple(dict.fromkeys(place.section for place in _PLACES if place.section))


def cluster_names() -> list[str]:
    """The clusters that come with the package."""
    return sorted(path.stem for path in CLUSTERS.glob("*.toml"))


def load_cluster(name: str) -> Cluster:
    """Read a shipped cluster by name, or a TOML file."""
    return read_cluster(*cluster_text(name))


def cluster_text(name: str) -> tuple[str, str]:
    """The text of a shipped cluster, or of a TOML file, and what errors call it."""
    path = Path(name) if name.endswith(".toml") else CLUSTERS / f"{name}.toml"
    if not name.endswith(".toml") and name not in cluster_names():
        hint = nearest(name, cluster_names()) or f"; known: {', '.join(cluster_names())}"
        raise ConfigError(f"unknown cluster '{name}'{hint}; or give a TOML file, see docs/planning.md")
    try:
        return read_text(path), f"cluster file '{path.name}'"
    except OSError as error:
        raise ConfigError(f"cluster file '{name}' cannot be read ({error.strerror}); give a TOML file") from None


def read_cluster(text: str, source: str) -> Cluster:
    """The cluster that the text of a file describes; `source` names the file in errors.

    Raises:
        ConfigError: a key that is unknown or lacks its unit, or a value that cannot be.
    """
    try:
        file = parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}; fix that line") from None
    sections = {name: _section(file, name, source) for name in _SECTIONS} | {"": file}
    _refuse_unknown_keys(sections, source)
    values = {name: _read(place, sections, source) for name, place in _OF_CLUSTER.items()}
    told = {name: value for name, value in values.items() if value is not None}
    for one in dataclasses.fields(Cluster):
        if one.name in _OF_CLUSTER and one.name not in told and one.default is dataclasses.MISSING:
            raise ConfigError(_lacks(_OF_CLUSTER[one.name], source))
    count, efficiency, oversubscription = (_read(place, sections, source) for place in _OF_LINKS)
    # What the NICs of a node could send together, before protocols take their part.
    line_rate = told["nic_rate"].by(count) if count else told["nic_rate"]
    told["nic_rate"] = line_rate.by(efficiency) if efficiency else line_rate
    if "rack" in file["link"]:
        _check_rack(told, oversubscription, source)
        if oversubscription:
            told["rack_rate"] = line_rate.times(told["nodes_per_rack"]).over(oversubscription)
    else:
        told["nodes_per_rack"] = 0
    told["name"] = told.get("name") or source
    if told.get("measured_here") and "compute" in file:
        raise ConfigError(f"{source} has both measured_here and step times in [compute]; give one of them")
    compute = ComputeTable("", ()) if told.get("measured_here") else _compute_table(sections, source)
    return Cluster(**told, compute=compute)


def _check_rack(told: Mapping[str, Any], oversubscription: Quantity | None, source: str) -> None:
    """Refuse racks whose uplinks are not told, or told twice."""
    if "rack_latency" not in told:
        raise ConfigError(_lacks(_OF_CLUSTER["rack_latency"], source))
    if "nodes_per_rack" not in told:
        raise ConfigError(f"{source} lacks nodes_per_rack; add it above the first section, such as nodes_per_rack = 8")
    if "rack_rate" in told and oversubscription:
        raise ConfigError(f"[link.rack] of {source} has both a rate and an oversubscription; give one of them")
    if "rack_rate" not in told and not oversubscription:
        raise ConfigError(_lacks(_OF_CLUSTER["rack_rate"], source))


def _compute_table(sections: Mapping[str, Mapping[str, Any]], source: str) -> ComputeTable:
    """The step times of a file; the least certain speaks for all."""
    model, milliseconds, certainty, whence, share = (_read(place, sections, source) for place in _OF_COMPUTE)
    if milliseconds is None:
        raise ConfigError(f"{source} has no measured step times; add [compute] with model and {_EXAMPLE}")
    usual = check_certainty("given" if certainty is None else certainty, f"[compute] of {source}")
    steps: dict[int, Quantity] = {}
    for text, entry in milliseconds.items():
        if not re.fullmatch("[0-9]{1,10}", text, re.ASCII) or quantity.BATCH.why_not(int(text)):
            raise ConfigError(
                f"local batch {shown(text)} in [compute] of {source} is not a whole number above 0, at most "
                f"{quantity.BATCH.most:g}; write images in quotes"
            )
        if int(text) in steps:
            raise ConfigError(f"step times of {source} hold local batch {int(text)} twice; keep one of the two")
        steps[int(text)] = read_quantity(
            entry, f"step time of local batch {text} in {source}", quantity.STEP, 1e-3, usual
        )
    points = tuple((float(batch), one.value) for batch, one in sorted(steps.items()))
    check_points(points, source)
    worst = max((one.certainty for one in steps.values()), key=lambda name: quantity.CERTAINTIES[name])
    return ComputeTable("resnet50" if model is None else model, points, worst, whence or "", share or 2 / 3)


def _section(file: Mapping[str, Any], name: str, source: str) -> Mapping[str, Any]:
    """A section, empty when it is not there."""
    table, path = file, ""
    for part in name.split("."):
        table, path = table.get(part, {}), f"{path}.{part}".lstrip(".")
        if not isinstance(table, Mapping):
            raise ConfigError(
                f"'{part}' of {source} is {shown(table)}, but a section is needed; write its keys below a line [{path}]"
            )
    return table


def _refuse_unknown_keys(sections: Mapping[str, Mapping[str, Any]], source: str) -> None:
    for key in sections[""].get("link", {}):
        if key not in _LINKS:
            raise ConfigError(f"link {shown(key)} of {source} is unknown; links are {', '.join(_LINKS)}")
    for name, table in sections.items():
        mine = [place for place in _PLACES if place.section == name]
        known = [key for place in mine for key in place.keys]
        known += [] if name else list(dict.fromkeys(one.partition(".")[0] for one in _SECTIONS))
        where = f"[{name}] of {source}" if name else source
        for key in table:
            if key in known:
                continue
            if key in _WITHOUT_UNIT or key in [place.name for place in mine]:
                units = [one for one in known if one.startswith(f"{key}_")] or [one for one in known if one in RATES]
                raise ConfigError(f"{shown(key)} in {where} has no unit; write {' or '.join(units or known)}")
            hint = nearest(key, known) or f"; known: {', '.join(known)}"
            raise ConfigError(f"unknown key {shown(key)} in {where}{hint}")


def _read(place: Place, sections: Mapping[str, Mapping[str, Any]], source: str) -> Any:
    """The value at a place, None when it is not there."""
    table = sections[place.section]
    present = [key for key in place.keys if key in table]
    if len(present) > 1:
        raise ConfigError(f"[{place.section}] of {source} has both {' and '.join(present)}; give one of them")
    if not present:
        return None
    where = f"{place.section}.{present[0]} of {source}".lstrip(".")
    if isinstance(place.may_be, Bounds):
        return read_quantity(table[present[0]], where, place.may_be, place.keys[present[0]])
    try:
        return place.may_be(table[present[0]])
    except ValueError as error:
        raise ConfigError(f"{where} {error}") from None


def _lacks(place: Place, source: str) -> str:
    if place.section:
        return f"[{place.section}] of {source} lacks its {place.name}; give one of {', '.join(place.keys)}"
    return f"{source} lacks {place.name}; add it above the first section, such as {place.name} = 8"


def cluster_as_data(text: str) -> list[dict[str, Any]]:
    """One entry a value: where it stands, the value, its certainty ("given" for a bare number) and its source."""
    file = parse_toml(text)
    found = [_entry(key, file[key]) for key in _HEAD if key in file]
    for name, section in file.items():
        if isinstance(section, Mapping):
            found += _entries(name, section)
    return found


def _entries(name: str, section: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The values of a section; the step times of [compute] share its certainty and source."""
    if name == "compute":
        shared = {"certainty": section.get("certainty", "given"), "source": section.get("source", "")}
        for batch, entry in section["milliseconds_by_local_batch"].items():
            whole = entry if isinstance(entry, Mapping) else {"value": entry, **shared}
            yield _entry(f"compute.{section.get('model', 'resnet50')}.milliseconds.{batch}", whole)
        section = {key: section[key] for key in ("backward_share",) if key in section}
    for key, entry in section.items():
        yield from _entries(f"link.{key}", entry) if name == "link" else [_entry(f"{name}.{key}", entry)]


def _entry(key: str, entry: Any) -> dict[str, Any]:
    table = entry if isinstance(entry, Mapping) else {"value": entry}
    return {
        "key": key,
        "value": entry,
        "certainty": "" if isinstance(entry, str | bool | list) else "given",
        "source": "",
        **table,
    }
