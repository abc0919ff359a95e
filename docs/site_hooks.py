"""Fills in the generated parts of the site: the settings from the config classes, the API from the public names."""

from __future__ import annotations

import inspect
import io
import tokenize
from collections.abc import Iterator
from typing import Any, get_args

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

import megabatch
from megabatch.config import Config
from megabatch.config.section import Section

SETTINGS, API = "<!-- settings -->", "<!-- api -->"
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """What MkDocs calls for every page."""
    return markdown.replace(SETTINGS, settings_markdown()).replace(API, api_markdown())


def api_markdown() -> str:
    """One entry for mkdocstrings per public name."""
    places = megabatch._PUBLIC | {"train": "megabatch.train.entry"}
    modules = {"schedules": "megabatch.schedule.schedules"}
    return "\n\n".join(f"::: {modules.get(name) or f'{place}.{name}'}" for name, place in sorted(places.items()))


def settings_markdown() -> str:
    """A table per section: key, type, default, sentence."""
    out = []
    for name, section in sections(Config, ""):
        head, rows = inspect.getdoc(section) or "", setting_rows(section)
        out.append(f"## {name}\n\n{head}\n\n| key | type | default | what it does |\n| --- | --- | --- | --- |")
        out += [f"| `{key}` | {_cell(kind)} | {_cell(default)} | {_cell(text)} |" for key, kind, default, text in rows]
        out.append("")
    return "\n".join(out)


def sections(section: type[Section], name: str) -> Iterator[tuple[str, type[Section]]]:
    """Every section below one, with its dotted name, in the order of the classes."""
    for key, field in section.model_fields.items():
        if inner := _section_of(field.annotation):
            yield f"{name}{key}", inner
            yield from sections(inner, f"{name}{key}.")


def setting_rows(section: type[Section]) -> list[tuple[str, str, str, str]]:
    """(key, type, default, sentence) of every key of a section that is no section itself."""
    comments = field_comments(section)
    rows = []
    for key, field in section.model_fields.items():
        if _section_of(field.annotation) is None:
            default = "required" if field.default is PydanticUndefined else f"`{_plain(field.default)}`"
            rows.append((key, type_text(field), default, comments.get(key, "")))
    return rows


def type_text(field: FieldInfo) -> str:
    """ "int, >= 1", "fp32 | bf16", "float, list or text"."""
    limits = [(kind, getattr(one, kind)) for one in _flat(field) for kind in _BOUNDS if hasattr(one, kind)]
    bounds = [f"{_BOUNDS[kind]} {limit:g}" for kind, limit in limits if limit < 1e12]  # beyond: what a machine holds
    return ", ".join([_name(field.annotation), *dict.fromkeys(bounds)])


def field_comments(section: type[Section]) -> dict[str, str]:
    """The comment behind each field, as it stands in the class."""
    found: dict[str, str] = {}
    key = ""
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(section)).readline):
        if token.type == tokenize.NAME and token.start[1] == 4:
            key = token.string
        elif token.type == tokenize.COMMENT and key in section.model_fields:
            found.setdefault(key, token.string.removeprefix("#").strip())
    return found


def _flat(field: FieldInfo) -> list[Any]:
    """What restricts the values: of the field, and inside `X | None`."""
    inside = [one for part in get_args(field.annotation) for one in getattr(part, "__metadata__", ())]
    of_inside = [one for part in inside for one in getattr(part, "metadata", [part])]
    return [*field.metadata, *of_inside]


def _section_of(annotation: Any) -> type[Section] | None:
    for part in (annotation, *get_args(annotation)):
        if inspect.isclass(part) and issubclass(part, Section):
            return part
    return None


def _name(annotation: Any) -> str:
    if hasattr(annotation, "__metadata__"):
        return _name(annotation.__origin__)
    origin, parts = getattr(annotation, "__origin__", None), get_args(annotation)
    if origin in (tuple, dict):
        return "list of " + _name(parts[0]) if origin is tuple else "table"
    if parts and all(isinstance(part, str | int) for part in parts):
        return " | ".join(map(str, parts))
    if parts:
        return " or ".join(dict.fromkeys(_name(part) for part in parts if part is not type(None)))
    name = str(getattr(annotation, "__name__", annotation))
    return {"str": "text", "bool": "true | false"}.get(name, name)


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return str([float(f"{one:.4g}") if isinstance(one, float) else one for one in value])
    return f"{value:.6g}" if isinstance(value, float) else repr(value).replace("'", '"')


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
