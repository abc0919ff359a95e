"""Cluster files: which sections and keys there are, their units, and the bounds in which each number can be.

Units are in the key names: `latency_microseconds` and `latency_milliseconds` are both the latency of their section.
Bits and bytes are told apart here and nowhere else: what comes out is bytes and seconds.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, ValidationInfo, model_validator

from megabatch.errors import ConfigError, nearest
from megabatch.plan import quantity
from megabatch.plan.compute import BACKWARD_SHARE
from megabatch.plan.quantity import BATCH, COUNT, RATIO, STEP, Bounds, Quantity, read_quantity, shown

__all__ = ["ClusterFile", "cluster_as_data", "parse_cluster"]

_RATES = {"gigabits_per_second": 1e9 / 8, "gigabytes_per_second": 1e9, "bytes_per_second": 1.0}
_TIMES = {"microseconds": 1e-6, "milliseconds": 1e-3, "seconds": 1.0, "hours": 3600.0}
_WITHOUT_UNIT = ("rate", "bandwidth", "speed", "latency")
"""What people write for a key whose unit is missing."""
_HEAD = ("accelerator", "backend", "num_nodes", "workers_per_node", "nodes_per_rack")
_EXAMPLE = 'milliseconds_by_local_batch = { "32" = 50.0, "64" = 98.0 }'


@dataclass(frozen=True, slots=True)
class _Number:
    """A number of a section. units: what the key's name may end in; none for a plain number."""

    bounds: Bounds
    units: Mapping[str, float] = field(default_factory=dict)

    def keys(self, stem: str) -> dict[str, float]:
        """The names under which it may stand, each with its unit in bytes per second or seconds."""
        if not self.units:
            return {stem: 1.0}
        return {unit if stem == "rate" else f"{stem}_{unit}": factor for unit, factor in self.units.items()}


def _switch(value: object) -> object:
    if not isinstance(value, bool):
        raise ValueError(f"is {shown(value)}; give true or false")
    return value


def _ratios(value: object) -> object:
    if not isinstance(value, list) or len(value) < 2:
        raise ValueError(f"is {shown(value)}; give a list of at least 2 numbers")
    for one in value:
        if needed := RATIO.why_not(one):
            raise ValueError(f"holds {shown(one)}; {needed}")
    return value


def _steps(value: object) -> object:
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f'is {shown(value)}; give at least one batch and its step, such as {{ "32" = 50.0 }}')
    return value


Text = Annotated[str, BeforeValidator(quantity.check_text)]
Count = Annotated[int, BeforeValidator(COUNT.check)]
_RATE, _LATENCY = _Number(quantity.RATE, _RATES), _Number(quantity.LATENCY, _TIMES)
_DURATION = _Number(quantity.DURATION, _TIMES)
Rate = Annotated[Quantity, _RATE]
Latency = Annotated[Quantity, _LATENCY]


class _Section(BaseModel):
    """A table of the file. Numbers stand under keys with their unit, and become quantities in bytes and seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _read_units(cls, table: Any, info: ValidationInfo) -> Any:
        assert info.context is not None
        source, section = info.context["source"], cls.model_config.get("title") or ""
        if not isinstance(table, Mapping):
            name = section.rpartition(".")[2]
            raise ConfigError(
                f"'{name}' of {source} is {shown(table)}, but a section is needed; write its keys below a line "
                f"[{section}]"
            )
        cls._refuse_unknown(table, source, section)
        # A section that is needed and not there is read as an empty one, which says what it lacks.
        left: dict[str, Any] = {
            name: {} for name, one in cls.model_fields.items() if one.is_required() and _is_section(one.annotation)
        }
        left |= table
        for stem, number in cls._numbers().items():
            keys = number.keys(stem)
            present = [key for key in keys if key in table]
            if len(present) > 1:
                raise ConfigError(f"[{section}] of {source} has both {' and '.join(present)}; give one of them")
            if present:
                where = f"{section}.{present[0]} of {source}"
                left[stem] = read_quantity(left.pop(present[0]), where, number.bounds, keys[present[0]])
            elif cls.model_fields[stem].is_required():
                raise ConfigError(f"[{section}] of {source} lacks its {stem}; give one of {', '.join(keys)}")
        return left

    @classmethod
    def _numbers(cls) -> dict[str, _Number]:
        fields = cls.model_fields.items()
        return {stem: one for stem, info in fields for one in info.metadata if isinstance(one, _Number)}

    @classmethod
    def _refuse_unknown(cls, table: Mapping[str, Any], source: str, section: str) -> None:
        numbers = cls._numbers()
        plain = [name for name in cls.model_fields if name not in numbers]
        known = [*plain, *(key for stem, number in numbers.items() for key in number.keys(stem))]
        where = f"[{section}] of {source}" if section else source
        for key in table:
            if key in known:
                continue
            if section == "link":
                raise ConfigError(f"link {shown(key)} of {source} is unknown; links are {', '.join(known)}")
            if key in _WITHOUT_UNIT or key in numbers:
                units = [name for name in known if name.startswith(f"{key}_")] or [n for n in known if n in _RATES]
                raise ConfigError(f"{shown(key)} in {where} has no unit; write {' or '.join(units or known)}")
            hint = nearest(key, known) or f"; known: {', '.join(known)}"
            raise ConfigError(f"unknown key {shown(key)} in {where}{hint}")


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, _Section)


class WorkerLinkSection(_Section, title="link.worker"):
    rate: Rate
    latency: Latency


class NicSection(_Section, title="link.nic"):
    rate: Rate
    latency: Latency
    count_per_node: Annotated[Quantity | None, _Number(Bounds(0.01, 1e4))] = None  # nodes may share one
    efficiency: Annotated[Quantity | None, _Number(quantity.SHARE)] = None


class RackSection(_Section, title="link.rack"):
    latency: Latency
    rate: Annotated[Quantity | None, _RATE] = None
    oversubscription: Annotated[Quantity | None, _Number(quantity.OVERSUBSCRIPTION)] = None


class LinksSection(_Section, title="link"):
    worker: WorkerLinkSection
    nic: NicSection
    rack: RackSection | None = None


class SoftwareSection(_Section, title="software"):
    collectives: Literal["ring", "tree"] = "ring"
    latency: Latency


class ComputeSection(_Section, title="compute"):
    """The `certainty` of the section holds for bare numbers."""

    model: Text = "resnet50"
    milliseconds_by_local_batch: Annotated[dict[str, Any], BeforeValidator(_steps)] = {}
    certainty: Any = "given"
    source: Text = ""
    backward_share: Annotated[float, BeforeValidator(BACKWARD_SHARE.check)] = 2 / 3

    def steps(self, file: str) -> dict[int, Quantity]:
        """Seconds by local batch."""
        found: dict[int, Quantity] = {}
        usual = quantity.check_certainty(self.certainty, f"[compute] of {file}")
        for text, entry in self.milliseconds_by_local_batch.items():
            if not re.fullmatch("[0-9]{1,10}", text, re.ASCII) or BATCH.why_not(int(text)):
                raise ConfigError(
                    f"local batch {shown(text)} in [compute] of {file} is not a whole number above 0, at most "
                    f"{BATCH.most:g}; write images in quotes"
                )
            if int(text) in found:
                raise ConfigError(f"step times of {file} hold local batch {int(text)} twice; keep one of the two")
            found[int(text)] = read_quantity(entry, f"step time of local batch {text} in {file}", STEP, 1e-3, usual)
        return found


class StragglerSection(_Section, title="straggler"):
    relative_deviation: Annotated[Quantity, _Number(quantity.SCATTER)] = Quantity(0.01, "assumed")
    deviation: Latency = Quantity(0.0, "assumed")
    measured_ratios: Annotated[tuple[float, ...], BeforeValidator(_ratios)] = ()


class LoaderSection(_Section, title="loader"):
    images_per_second_per_node: Annotated[Quantity | None, _Number(Bounds(1e-3, 1e12))] = None


class StartSection(_Section, title="start"):
    initialisation: Annotated[Quantity | None, _DURATION] = None
    first_steps: Annotated[Quantity | None, _DURATION] = None


class PriceSection(_Section, title="price"):
    currency: Text = ""
    per_node_hour: Annotated[Quantity | None, _Number(quantity.PRICE)] = None


class FailuresSection(_Section, title="failures"):
    node_mtbf: Annotated[Quantity | None, _Number(quantity.MTBF, _TIMES)] = None
    checkpoint: Annotated[Quantity, _Number(quantity.CHECKPOINT, _TIMES)] = Quantity(20.0, "assumed")
    restart: Annotated[Quantity, _DURATION] = Quantity(300.0, "assumed")


class ClusterFile(_Section):
    """A whole file. `num_nodes` 0: as many as wanted."""

    name: Text = ""
    title: Text = ""
    accelerator: Text = ""
    backend: Literal["nccl", "gloo"] = "nccl"
    num_nodes: Count = 0
    workers_per_node: Count
    nodes_per_rack: Count = 0
    measured_here: Annotated[bool, BeforeValidator(_switch)] = False
    link: LinksSection
    software: SoftwareSection
    compute: ComputeSection | None = None
    straggler: StragglerSection = StragglerSection.model_construct()
    loader: LoaderSection = LoaderSection.model_construct()
    start: StartSection = StartSection.model_construct()
    price: PriceSection = PriceSection.model_construct()
    failures: FailuresSection = FailuresSection.model_construct()


def parse_cluster(text: str, source: str) -> ClusterFile:
    """Read TOML; `source` names it in errors.

    Raises:
        ConfigError: a key that is unknown or lacks its unit, or a value that cannot be.
    """
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not valid TOML: {error}; fix that line") from None
    try:
        file = ClusterFile.model_validate(table, context={"source": source})
    except ValidationError as error:
        raise ConfigError(_one_line(error, source)) from None
    if file.link.rack and not file.nodes_per_rack:
        raise ConfigError(f"{source} lacks nodes_per_rack; add it above the first section, such as nodes_per_rack = 8")
    if file.link.rack and file.link.rack.rate and file.link.rack.oversubscription:
        raise ConfigError(f"[link.rack] of {source} has both a rate and an oversubscription; give one of them")
    if file.link.rack and not (file.link.rack.rate or file.link.rack.oversubscription):
        raise ConfigError(f"[link.rack] of {source} lacks its rate; give one of {', '.join(_RATES)}")
    if file.measured_here and file.compute:
        raise ConfigError(f"{source} has both measured_here and step times in [compute]; give one of them")
    if not file.measured_here and not (file.compute and file.compute.milliseconds_by_local_batch):
        raise ConfigError(f"{source} has no measured step times; add [compute] with model and {_EXAMPLE}")
    return file


def _one_line(error: ValidationError, source: str) -> str:
    """The first complaint of pydantic in our words: given, needed, what to do."""
    first, (key, message) = error.errors()[0], quantity.complaint(error)
    where = f"{key} of {source}"
    if first["type"] == "missing":
        return f"{source} lacks {key}; add it above the first section, such as {key} = 8"
    if first["type"] == "literal_error":
        known = ", ".join(re.findall(r"'(\w+)'", first["ctx"]["expected"]))
        return f"{where} is {shown(first['input'])}; choose one of {known}"
    return f"{where} {message}"


def cluster_as_data(file: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One entry a value: where it stands, the value, its certainty ("given" for a bare number) and its source."""
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
    bare = {"key": key, "value": entry, "certainty": "given", "source": ""}
    if isinstance(entry, Mapping):
        return bare | dict(entry)
    return bare | {"certainty": "" if isinstance(entry, str | bool | list) else "given"}
