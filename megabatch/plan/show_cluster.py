"""What a cluster file says: every value with its certainty and source, and what it does not say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape

from megabatch.plan.cluster import Cluster
from megabatch.plan.cluster_file import ClusterFile

__all__ = ["cluster_as_data", "print_cluster"]

_HEAD = ("accelerator", "backend", "num_nodes", "workers_per_node", "nodes_per_rack")


def cluster_as_data(file: ClusterFile) -> list[dict[str, Any]]:
    """One entry a value: where it stands, the value, its certainty ("given" for a bare number) and its source."""
    return [{"key": key, **_value(entry)} for key, entry in _values(file.section(""))]


def print_cluster(cluster: Cluster, file: ClusterFile, console: Console | None = None) -> None:
    """A line for each value, then what counts as free because the file does not tell."""
    out = console or Console(highlight=False, soft_wrap=True)
    out.print(f"[bold]{escape(cluster.name)}[/bold]  {escape(cluster.title)}")
    for entry in cluster_as_data(file):
        value = entry["value"]
        shown = f"{value:,g}" if isinstance(value, int | float) else str(value)
        line = f"{entry['key']:<33} {shown:>14}  {entry['certainty']:<9}"
        out.print(f"{escape(line)} [dim]{escape(entry['source'])}[/dim]")
    if cluster.unknown:
        out.print(f"not in the file, counted as free: {', '.join(cluster.unknown)}")


def _values(head: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((key, head[key]) for key in _HEAD if key in head)
    for name, section in head.items():
        if not isinstance(section, Mapping):
            continue
        inner = section if name != "link" else {}
        yield from ((f"{name}.{key}", entry) for key, entry in _entries(name, inner))
        for link, keys in section.items() if name == "link" else ():
            yield from ((f"link.{link}.{key}", entry) for key, entry in keys.items())


def _entries(name: str, section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The keys of a section; the step times of [compute] share its certainty and source."""
    if name != "compute":
        yield from section.items()
        return
    shared = {"certainty": section.get("certainty", "given"), "source": section.get("source", "")}
    for batch, entry in section["milliseconds_by_local_batch"].items():
        bare = not isinstance(entry, Mapping)
        yield f"{section.get('model', 'resnet50')}.milliseconds.{batch}", {"value": entry, **shared} if bare else entry
    if "backward_share" in section:
        yield "backward_share", section["backward_share"]


def _value(entry: Any) -> dict[str, Any]:
    if isinstance(entry, Mapping):
        return {
            "value": entry["value"],
            "certainty": entry.get("certainty", "given"),
            "source": entry.get("source", ""),
        }
    is_number = isinstance(entry, int | float) and not isinstance(entry, bool)
    return {"value": entry, "certainty": "given" if is_number else "", "source": ""}
