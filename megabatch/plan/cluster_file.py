"""Cluster files: TOML with units in the key names; see `megabatch/plan/clusters` and docs/planning.md.

A class here is a section of the file. A field that is a quantity says in which units its key may stand:
`latency_microseconds` and `latency_milliseconds` are both the `latency` of their section.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from megabatch.errors import ConfigError, nearest
from megabatch.files import parse_toml, read_text
from megabatch.plan import quantity
from megabatch.plan.cluster import NOT_TOLD, Cluster
from megabatch.plan.compute import BACKWARD_SHARE, ComputeTable, Name, check_points
from megabatch.plan.quantity import Bounds, Quantity, check_certainty, read_quantity, shown

CLUSTERS = Path(__file__).parent / "clusters"

_RATES = {"gigabits_per_second": 1e9 / 8, "gigabytes_per_second": 1e9, "bytes_per_second": 1.0}
_TIMES = {"microseconds": 1e-6, "milliseconds": 1e-3, "seconds": 1.0, "hours": 3600.0}
_WITHOUT_UNIT = ("rate", "bandwidth", "speed", "latency")
"""What people write for a key whose unit is missing."""
_HEAD = ("accelerator", "backend", "num_nodes", "workers_per_node", "nodes_per_rack")
_EXAMPLE = 'milliseconds_by_local_batch = { "32" = 50.0, "64" = 98.0 }'


@dataclass(frozen=True, slots=True)
class _In:
    """What a quantity may be, in bytes per second or seconds, and the units in which its key may stand."""

    bounds: Bounds
    units: Mapping[str, float] = field(default_factory=dict)

    def keys(self, name: str) -> Mapping[str, float]:
        """The keys of the field `name`, each with its unit."""
        if name == "rate":
            return self.units
        return {f"{name}_{unit}": size for unit, size in self.units.items()} or {name: 1.0}


Value = TypeVar("Value", Quantity, Quantity | None)
_Rate = Annotated[Value, _In(quantity.RATE, _RATES)]
_Latency = Annotated[Value, _In(quantity.LATENCY, _TIMES)]
_Duration = Annotated[Value, _In(quantity.DURATION, _TIMES)]
_Count = Annotated[int, BeforeValidator(quantity.COUNT.check)]


class _Section(BaseModel):
    """A section; its title is its name in the file. Without a default a section that is not there counts as empty."""

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _read_quantities(cls, table: Any, info: ValidationInfo) -> Any:
        """Refuse keys that are unknown or lack their unit, and read quantities; the context is the file's name."""
        path, source = str(cls.model_config.get("title") or ""), str(info.context)
        where = f"[{path}] of {source}" if path else source
        if not isinstance(table, Mapping):
            name = path.rpartition(".")[2]
            raise ConfigError(
                f"'{name}' of {source} is {shown(table)}, but a section is needed; write its keys below a line [{path}]"
            )
        fields = cls.model_fields
        places = {name: one for name in fields for one in fields[name].metadata if isinstance(one, _In)}
        keys = {name: places[name].keys(name) if name in places else {name: 1.0} for name in fields}
        for key in table:
            _refuse_unknown(key, keys, [*places], where)
        found = {key: value for key, value in table.items() if key not in chain(*(keys[name] for name in places))}
        for name, one in fields.items():
            given = [key for key in keys[name] if key in table]
            if len(given) > 1:
                raise ConfigError(f"{where} has both {' and '.join(given)}; give one of them")
            if name in places and given:
                key = given[0]
                unit = keys[name][key]
                found[name] = read_quantity(table[key], f"{path}.{key} of {source}", places[name].bounds, unit)
            elif one.is_required() and not given and name in places:
                raise ConfigError(f"{where} lacks its {name}; give one of {', '.join(keys[name])}")
            elif one.is_required() and not given and isinstance(one.annotation, type(_Section)):
                found[name] = {}
        return found


def _refuse_unknown(key: str, keys: Mapping[str, Mapping[str, float]], quantities: list[str], where: str) -> None:
    """Raise for a key that is none of a section's `keys`, which belong to its fields."""
    known = list(chain(*keys.values()))
    if key in known:
        return
    if quantities and key in (*quantities, *_WITHOUT_UNIT):
        meant = key if key in keys else "rate"
        units = keys.get(meant) or chain(*(keys[name] for name in quantities))
        raise ConfigError(f"{shown(key)} in {where} has no unit; write {' or '.join(units)}")
    hint = nearest(key, known) or f"; known: {', '.join(known)}"
    raise ConfigError(f"unknown key {shown(key)} in {where}{hint}")


class _Worker(_Section, title="link.worker"):
    rate: _Rate[Quantity]
    latency: _Latency[Quantity]


class _Nic(_Worker, title="link.nic"):
    count_per_node: Annotated[Quantity | None, _In(Bounds(0.01, 1e4))] = None  # nodes may share one
    efficiency: Annotated[Quantity | None, _In(quantity.SHARE)] = None


class _Rack(_Section, title="link.rack"):
    rate: _Rate[Quantity | None] = None
    latency: _Latency[Quantity]
    oversubscription: Annotated[Quantity | None, _In(quantity.OVERSUBSCRIPTION)] = None


class _Links(_Section, title="link"):
    worker: _Worker
    nic: _Nic
    rack: _Rack | None = None


class _Software(_Section, title="software"):
    collectives: Literal["ring", "tree"] = "ring"
    latency: _Latency[Quantity]


def _steps(value: object) -> object:
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f'is {shown(value)}; give at least one batch and its step, such as {{ "32" = 50.0 }}')
    return value


class _Compute(_Section, title="compute"):
    model: Name = "resnet50"
    milliseconds_by_local_batch: Annotated[dict[str, Any], BeforeValidator(_steps)] = {}
    certainty: Any = "given"
    source: Name = ""
    backward_share: Annotated[float, BeforeValidator(BACKWARD_SHARE.check)] = 2 / 3


class _Straggler(_Section, title="straggler"):
    relative_deviation: Annotated[Quantity, _In(quantity.SCATTER)] = Quantity(0.01, "assumed")
    deviation: _Latency[Quantity] = Quantity(0.0, "assumed")
    measured_ratios: list[Annotated[float, BeforeValidator(quantity.RATIO.check)]] = Field(default=[], min_length=2)


class _Loader(_Section, title="loader"):
    images_per_second_per_node: Annotated[Quantity | None, _In(Bounds(1e-3, 1e12))] = None


class _Start(_Section, title="start"):
    initialisation: _Duration[Quantity] = NOT_TOLD
    first_steps: _Duration[Quantity] = NOT_TOLD


class _Price(_Section, title="price"):
    currency: Name = ""
    per_node_hour: Annotated[Quantity | None, _In(quantity.PRICE)] = None


class _Failures(_Section, title="failures"):
    node_mtbf: Annotated[Quantity | None, _In(quantity.MTBF, _TIMES)] = None
    checkpoint: Annotated[Quantity, _In(quantity.CHECKPOINT, _TIMES)] = Quantity(20.0, "assumed")
    restart: _Duration[Quantity] = Quantity(300.0, "assumed")


class _File(_Section):
    name: Name = ""
    title: Name = ""
    accelerator: Name = ""
    backend: Literal["nccl", "gloo"] = "nccl"
    num_nodes: _Count = 0
    workers_per_node: _Count
    nodes_per_rack: _Count = 0
    measured_here: StrictBool = False
    link: _Links
    software: _Software
    compute: _Compute
    straggler: _Straggler
    loader: _Loader
    start: _Start
    price: _Price
    failures: _Failures


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
        file = _File.model_validate(parse_toml(text), context=source)
    except ValidationError as error:  # a ValueError too
        raise ConfigError(_one_line(error, source)) from None
    except ValueError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}; fix that line") from None
    nic, rack = file.link.nic, file.link.rack
    # What the NICs of a node could send together, before protocols take their part.
    line_rate = nic.rate.by(nic.count_per_node) if nic.count_per_node else nic.rate
    return Cluster(
        name=file.name or source,
        title=file.title,
        accelerator=file.accelerator,
        backend=file.backend,
        num_nodes=file.num_nodes,
        workers_per_node=file.workers_per_node,
        nodes_per_rack=file.nodes_per_rack if rack else 0,
        measured_here=file.measured_here,
        worker_rate=file.link.worker.rate,
        worker_latency=file.link.worker.latency,
        nic_rate=line_rate.by(nic.efficiency) if nic.efficiency else line_rate,
        nic_latency=nic.latency,
        rack_rate=_rack_rate(rack, file.nodes_per_rack, line_rate, source) if rack else None,
        rack_latency=rack.latency if rack else None,
        collectives=file.software.collectives,
        software_latency=file.software.latency,
        straggler_deviation=file.straggler.relative_deviation,
        jitter_seconds=file.straggler.deviation,
        straggler_ratios=tuple(file.straggler.measured_ratios),
        loader_images_per_second=file.loader.images_per_second_per_node,
        initialisation_seconds=file.start.initialisation,
        first_steps_seconds=file.start.first_steps,
        currency=file.price.currency,
        price_per_node_hour=file.price.per_node_hour,
        node_mtbf_seconds=file.failures.node_mtbf,
        checkpoint_seconds=file.failures.checkpoint,
        restart_seconds=file.failures.restart,
        compute=_compute_table(file, source),
    )


def _rack_rate(rack: _Rack, nodes_per_rack: int, line_rate: Quantity, source: str) -> Quantity:
    """Of all uplinks of a rack; refuse racks whose uplinks are not given, or given twice."""
    if not nodes_per_rack:
        raise ConfigError(f"{source} lacks nodes_per_rack; add it above the first section, such as nodes_per_rack = 8")
    if rack.rate and rack.oversubscription:
        raise ConfigError(f"[link.rack] of {source} has both a rate and an oversubscription; give one of them")
    if rack.oversubscription:
        return line_rate.times(nodes_per_rack).over(rack.oversubscription)
    if rack.rate is None:
        raise ConfigError(f"[link.rack] of {source} lacks its rate; give one of {', '.join(_RATES)}")
    return rack.rate


def _compute_table(file: _File, source: str) -> ComputeTable:
    """The step times of a file; the least certain speaks for all. The machine at hand has none yet."""
    compute = file.compute
    if file.measured_here:
        if compute.model_fields_set:
            raise ConfigError(f"{source} has both measured_here and step times in [compute]; give one of them")
        return ComputeTable("", ())
    if not compute.milliseconds_by_local_batch:
        raise ConfigError(f"{source} has no measured step times; add [compute] with model and {_EXAMPLE}")
    usual = check_certainty(compute.certainty, f"[compute] of {source}")
    steps: list[tuple[int, Quantity]] = []
    for text, entry in compute.milliseconds_by_local_batch.items():
        if not re.fullmatch("[0-9]{1,10}", text, re.ASCII) or quantity.BATCH.why_not(int(text)):
            raise ConfigError(
                f"local batch {shown(text)} in [compute] of {source} is not a whole number above 0, at most "
                f"{quantity.BATCH.most:g}; write images in quotes"
            )
        where = f"step time of local batch {text} in {source}"
        steps.append((int(text), read_quantity(entry, where, quantity.STEP, 1e-3, usual)))
    points = tuple(sorted((float(batch), one.value) for batch, one in steps))
    check_points(points, source)
    worst = max((one.certainty for _, one in steps), key=lambda name: quantity.CERTAINTIES[name])
    return ComputeTable(compute.model, points, worst, compute.source, compute.backward_share)


def _one_line(error: ValidationError, source: str) -> str:
    """The first complaint of pydantic: given, needed, what to do."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"{source} lacks {where}; add it above the first section, such as {where} = 8"
    reason = first["msg"].removeprefix("Value error, ").replace("Input should be", "give")
    if first["type"] == "value_error":  # `Bounds.check` and `check_text` say what was given
        return f"{where} of {source} {reason}"
    return f"{where} of {source} is {shown(first['input'])}; {reason[0].lower()}{reason[1:]}"


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
