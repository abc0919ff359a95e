"""The four sections of the page as HTML.

Every text goes through `escape` here; nothing else in the report writes a tag around text of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from megabatch.report import claim
from megabatch.report.claim import Tile, conditions, settings_of
from megabatch.report.figure import Constant, Figure, Missing, csv_rows
from megabatch.report.membership import change_rows
from megabatch.report.run import Run

MAX_TABLE_ROWS = 40


def chip(value: str, kind: str = "") -> str:
    """A small rounded label."""
    return f'<span class="chip{" " + escape(kind) if kind else ""}">{escape(value)}</span>'


def html_table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], numeric: bool = True) -> str:
    """A table with a caption, scoped headings, and columns of numbers aligned."""

    def is_number(column: int) -> bool:
        cells = [row[column] for row in rows if row[column] not in ("", "-")]
        return numeric and bool(cells) and all(cell[:1].isdigit() or cell[:1] == "-" for cell in cells)

    right = [is_number(column) for column in range(len(head))]
    align = [' class="number"' if one else "" for one in right]
    top = "".join(f'<th scope="col"{a}>{escape(cell)}</th>' for cell, a in zip(head, align, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{a}>{escape(cell)}</td>" for cell, a in zip(row, align, strict=True)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table><caption>{escape(caption)}</caption>"
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def definitions(rows: Sequence[tuple[str, str]]) -> str:
    """Names and values."""
    return (
        '<dl class="facts">'
        + "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in rows)
        + "</dl>"
    )


def claim_section(runs: Sequence[Run]) -> str:
    """The sentence, the numbers, what the recipe's reference says, and what was wrong with the folder."""
    # A hyphen at which no line breaks: "top-1" and names of runs stay whole.
    out = [f'<h1 id="claim-title">{escape(claim.headline(runs)).replace("-", "&#8209;")}</h1>']
    out += [f'<p class="soft">{escape(", ".join(run.name for run in runs))}</p>']
    for run in runs:
        out += [f'<p class="problem" role="note">{escape(run.name)}: {escape(problem)}</p>' for problem in run.problems]
    if len(runs) > 1:
        head, rows = claim.result_rows(runs)
        out.append(html_table("Results, all measured", head, rows))
    else:
        found = "".join(_tile(tile) for tile in claim.tiles(runs[0]))
        out.append(f'<div class="tiles">{found}</div>' if found else "<p>Nothing is measured yet.</p>")
    return "\n".join(out)


def _tile(tile: Tile) -> str:
    verdict = {True: chip("reached", "good"), False: chip("not reached", "bad"), None: ""}[tile.is_reached]
    reference = (
        f'<div class="reference">{chip("quoted")} reference: {escape(tile.reference)} {verdict}</div>'
        if tile.reference
        else ""
    )
    return (
        f'<div class="tile"><div class="label"><span>{escape(tile.label)}</span>{chip("measured")}</div>'
        f'<div class="value">{escape(tile.value)}</div><div class="sub">{escape(tile.detail)}</div>{reference}</div>'
    )


def conditions_section(runs: Sequence[Run]) -> str:
    """Machines, versions, grid, batch stages; for several runs what differs."""
    out = ['<h2 id="conditions-title">Conditions</h2>']
    if len(runs) == 1:
        return out[0] + definitions(conditions(runs[0])) + _changes(runs[0]) + _settings(runs[0], 0)
    rows = [[name, *values] for name, values in claim.differing_settings(runs)]
    head = ["setting", *(run.name for run in runs)]
    out.append(
        html_table("Settings that differ", head, rows, numeric=False)
        if rows
        else "<p>The settings of these runs are equal.</p>"
    )
    by_run = [dict(conditions(run)) for run in runs]
    names = dict.fromkeys(name for one in by_run for name in one)
    facts = [[name, *(one.get(name, "-") for one in by_run)] for name in names]
    facts = [row for row in facts if len(set(row[1:])) > 1]
    if facts:
        out.append(html_table("Conditions that differ", ["condition", *head[1:]], facts, numeric=False))
    out += [_settings(run, index) for index, run in enumerate(runs)]
    return "\n".join(out)


def _changes(run: Run) -> str:
    """Who came and who went in an elastic run."""
    head, rows = change_rows(run)
    if not rows:
        return ""
    shown = [rows[index] for index in thin(len(rows), MAX_TABLE_ROWS)]
    part = f", {len(shown)} of {len(rows):,}" if len(shown) < len(rows) else ""
    return html_table(f"Changes of the workers{part}", head, shown)


def _settings(run: Run, index: int) -> str:
    rows = [[name, value] for name, value in settings_of(run).items()]
    if not rows:
        return ""
    inside = html_table(f"Settings of {run.name}", ["setting", "value"], rows, numeric=False)
    return f'<details id="settings-{index}"><summary>All settings of {escape(run.name)}</summary>{inside}</details>'


def figures_section(
    figures: Sequence[Figure],
    missing: Sequence[Missing],
    torus: dict[str, Any] | None,
    constant: Sequence[Constant] = (),
) -> str:
    """A card per figure with its table, what never changed, the animation, and what is not there."""
    wide = _wide(figures)
    cards = [_card(figure, figure.key in wide) for figure in figures]
    if torus is not None:
        cards.append(_torus_card(torus))
    out = ['<h2 id="figures-title">Figures</h2>']
    if constant:
        rows = "".join(f"<li><b>{escape(one.title)}</b>: {escape(one.text)}.</li>" for one in constant)
        out.append(f'<ul class="constant" aria-label="What stayed the same">{rows}</ul>')
    out.append(f'<div class="figures">{"".join(cards)}</div>')
    if missing:
        count = "1 figure is" if len(missing) == 1 else f"{len(missing)} figures are"
        rows = "".join(
            f'<li><b>{escape(one.title)}</b> <span class="soft">- {escape(one.why)}</span></li>' for one in missing
        )
        out.append(
            f'<details id="missing"><summary>{count} not here, and why</summary>'
            f'<ul class="missing">{rows}</ul></details>'
        )
    return "\n".join(out)


def _wide(figures: Sequence[Figure]) -> set[str]:
    """Figures that take a whole row: those that need it, and the last of an odd number between two of them."""
    wide, narrow = {"step_split", "ranks", "membership", "all_reduce", "arms"}, []
    for figure in figures:
        if figure.key not in wide:
            narrow.append(figure.key)
            continue
        if len(narrow) % 2:
            wide.add(narrow[-1])
        narrow = []
    return wide | ({narrow[-1]} if len(narrow) % 2 else set())


def _card(figure: Figure, is_wide: bool) -> str:
    tags = "".join(chip(tag) for tag in sorted({one.tag for one in figure.series if one.tag != "ideal"}))
    rows = csv_rows(figure)
    shown = [rows[1 + index] for index in thin(len(rows) - 1, MAX_TABLE_ROWS)]
    part = f"{len(shown)} of {len(rows) - 1:,} values" if len(shown) < len(rows) - 1 else f"all {len(shown)} values"
    key, wide = escape(figure.key), " wide" if is_wide else ""
    plot = "plot low" if figure.horizontal else "plot"
    height = f' style="height: {80 + 26 * len(figure.x.ticks)}px"' if figure.horizontal and figure.x.ticks else ""
    label = f"{figure.title}. {figure.y.title} by {figure.x.title}. The table below holds the values."
    return (
        f'<figure class="card{wide}" id="figure-{key}">'
        f'<div class="head"><h3>{escape(figure.title)}</h3><span class="tags">{tags}</span></div>'
        f'<div class="legend" id="legend-{key}" role="group" aria-label="Series shown"></div>'
        f'<div class="{plot}" id="plot-{key}"{height} role="img" aria-label="{escape(label)}"></div>'
        f"<figcaption>{escape(figure.caption)}</figcaption>"
        f'<details id="table-{key}"><summary>Values as a table</summary>'
        f'<div class="controls"><button type="button" data-csv="{key}">Save all {len(rows) - 1:,} as CSV</button></div>'
        f"{html_table(part, rows[0], shown)}</details></figure>"
    )


def thin(indices: int, limit: int) -> Sequence[int]:
    """At most `limit` positions spread evenly over `indices`, first and last among them."""
    if indices <= limit:
        return range(indices)
    return sorted({round(step * (indices - 1) / (limit - 1)) for step in range(limit)})


def _torus_card(torus: dict[str, Any]) -> str:
    names = [algorithm["name"] for algorithm in torus["algorithms"]]
    chosen = torus["chosen"] if torus["chosen"] in names else names[0]
    options = "".join(
        f'<option value="{escape(name)}"{" selected" if name == chosen else ""}>'
        f"{escape(name)}{' (this run)' if name == torus['chosen'] else ''}</option>"
        for name in names
    )
    part = (
        f" {torus['rows']} by {torus['columns']} of the {torus['real_grid']} workers are drawn."
        if torus["is_part"]
        else ""
    )
    timed = any(phase["seconds"] is not None for algorithm in torus["algorithms"] for phase in algorithm["phases"])
    times = (
        " Times are the phase list priced with measured links."
        if timed
        else " Times need a measured network: `megabatch bench allreduce --output FILE`, then --network FILE."
    )
    return (
        '<figure class="card wide" id="figure-torus"><div class="head"><h3>How gradients travel on the grid of '
        f"{escape(torus['real_grid'])} workers</h3></div>"
        '<div class="controls"><label for="torus-algorithm">Algorithm</label>'
        f'<select id="torus-algorithm">{options}</select><button type="button" id="torus-play">Play</button>'
        '<button type="button" id="torus-step">Step</button><span id="torus-status" class="soft"></span></div>'
        '<div class="stage"><svg id="torus-drawing" role="img" preserveAspectRatio="xMidYMid meet" aria-label="'
        'Grid of workers; messages move between them. The list beside it names the phases."></svg>'
        '<ol id="torus-phases" aria-label="Phases"></ol></div>'
        "<figcaption>Each box is a worker; the bar in it is the part of the gradient it holds, the darker the more "
        f"workers are summed in it.{part}{escape(times)} Not to scale in time.</figcaption></figure>"
    )


def repeat_section(runs: Sequence[Run]) -> str:
    """The commands that make the runs and this page again."""
    out = ['<h2 id="repeat-title">How to repeat it</h2>']
    for index, run in enumerate(runs):
        lines = "\n".join(claim.repeat_commands(run))
        out.append(
            f'<pre id="commands-{index}">{escape(lines)}</pre>'
            f'<button type="button" data-copy="commands-{index}">Copy'
            f'<span class="sr"> the commands of {escape(run.name)}</span></button>'
        )
    out.append(
        '<p class="soft">With exact sums (comm.sums) the same seed gives the same weights bit for bit on any number of '
        "workers of like processors, versions and threads; with float sums on as many workers.</p>"
    )
    return "\n".join(out)
