"""A preview of a Grafana dashboard: the committed JSON laid out as a page, with real answers to its queries.

Knows the few panel types and options that the dashboards of this repository use.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from browser import Browser
from charts import Axes, Line, chart, legend, plain
from page import page
from scene import RUN, Scene

from tests.export._grafana import DASHBOARDS, filled_in

Panel = Mapping[str, Any]

WIDTH, ROW, GAP = 1360, 28, 8
"""Of the page, of one unit of height and between panels, in pixels."""

WINDOW = "10s"
"""What Grafana would choose as rate interval in practice is longer, as scrapes are rarer."""

SHADES = {"green": "#2f9e5b", "orange": "#e8820c", "red": "#d63346", "blue": "#3d71d9"}

STYLE = """
.board { display: grid; grid-template-columns: repeat(24, 1fr); gap: 8px; grid-auto-rows: 28px }
.row { align-self: center; font-weight: 600; padding-left: 4px }
.row::before { content: "\\25be\\00a0 " }
.stat { border: 0; color: #fff; display: flex; flex-direction: column }
.stat h2 { color: #fff }
.numbers { flex: 1; display: flex; flex-direction: column; justify-content: center; align-items: center }
.numbers b { font-size: 30px; font-weight: 500; line-height: 1.15 }
"""


def overview(scene: Scene, browser: Browser) -> bytes:
    """The first dashboard."""
    name = "tpwatch-overview"
    board = DASHBOARDS[name]
    marks = [mark for event in board["annotations"]["list"] for mark in _marks(scene, event)]
    body = "".join(_panel(scene, panel, marks) for panel in board["panels"])
    chosen = f"Run <b>{RUN}</b> &nbsp; Replica group <b>All</b> &nbsp; preview of {name}.json"
    bottom = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    html = page(board["title"], chosen, f'<div class="board">{body}</div>', STYLE)
    return browser.html(html, (WIDTH, 60 + bottom * (ROW + GAP)))


def _panel(scene: Scene, panel: Panel, marks: Sequence[tuple[float, str]]) -> str:
    at = panel["gridPos"]
    where = f"grid-column:{at['x'] + 1}/span {at['w']};grid-row:{at['y'] + 1}/span {at['h']}"
    title = escape(panel["title"])
    if panel["type"] == "row":
        return f'<div class="row" style="{where}">{title}</div>'
    if panel["type"] == "stat":
        shade, numbers = _stat(scene, panel)
        style = f"{where};background:{shade}"
        return f'<section class="stat" style="{style}"><h2>{title}</h2><div class="numbers">{numbers}</div></section>'
    body = _table(scene, panel) if panel["type"] == "table" else _curves(scene, panel, marks)
    return f'<section style="{where}"><h2>{title}</h2>{body}</section>'


def _ask(scene: Scene, target: Panel) -> Sequence[Mapping[str, Any]]:
    return scene.ask(filled_in(target["expr"], run=RUN, window=WINDOW), now=bool(target.get("instant")))


def _lines(scene: Scene, panel: Panel) -> list[Line]:
    """Every series of a panel that has a number, under the name that the legend gives it."""
    lines = []
    for target in panel["targets"]:
        for series in _ask(scene, target):
            found = [(float(at), float(value)) for at, value in series.get("values", [series.get("value")])]
            points = [point for point in found if math.isfinite(point[1])]
            name = target["legendFormat"]
            for label, value in series["metric"].items():
                name = name.replace(f"{{{{{label}}}}}", value)
            if points:
                lines.append(Line(name, points))
    return lines


# ------------------------------------------------------------------------------------ numbers


def _stat(scene: Scene, panel: Panel) -> tuple[str, str]:
    """Ground and numbers of a panel, one for each series."""
    defaults = panel["fieldConfig"]["defaults"]
    steps = defaults["thresholds"]["steps"]
    lines = _lines(scene, panel)
    if not lines:
        return SHADES.get(steps[0]["color"], steps[0]["color"]), f"<b>{escape(defaults.get('noValue', 'No data'))}</b>"
    shade, parts = "", []
    for line in lines:
        value = line.last
        chosen = [step for step in steps if step["value"] is None or step["value"] <= value][-1]["color"]
        text = _number(value, defaults["unit"])
        for mapping in defaults.get("mappings", []):
            if found := mapping["options"].get(f"{value:g}"):
                text, chosen = found["text"], found["color"]
        shade = SHADES.get(chosen, chosen)
        name = f"<span>{escape(line.name)}</span>" if panel["options"]["textMode"] == "value_and_name" else ""
        parts.append(f"{name}<b>{escape(text)}</b>")
    return shade, "".join(parts)


def _number(value: float, unit: str) -> str:
    """A number in one of Grafana's units."""
    if unit == "s":
        factor, name = (1e3, "ms") if abs(value) < 1 else (1, "s")
        return f"{value * factor:.3g} {name}" if value else "0 s"
    written = {"percentunit": f"{100 * value:.3g}%", "sci": f"{value:.2e}", "cps": f"{value:.3g} c/s"}
    return written.get(unit, plain(value))


# -------------------------------------------------------------------------- curves and tables


def _curves(scene: Scene, panel: Panel, marks: Sequence[tuple[float, str]]) -> str:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    lines = _lines(scene, panel)
    if not lines:
        return f'<div class="numbers">{escape(panel["fieldConfig"]["defaults"].get("noValue", "No data"))}</div>'
    at = panel["gridPos"]
    size = (int(at["w"] * (WIDTH - 24) / 24) - 34, at["h"] * (ROW + GAP) - 60 - 19 * len(lines))

    def clock(seconds: float) -> str:
        return time.strftime("%H:%M:%S", time.gmtime(seconds))

    def written(value: float) -> str:
        return _number(value, unit)

    axes = Axes(size, (scene.since, scene.until), (clock, written), marks)
    return chart(lines, axes) + legend(lines, written)


def _table(scene: Scene, panel: Panel) -> str:
    """Series of all queries, merged by their labels, columns named and ordered as the JSON says."""
    arranged = next(t["options"] for t in panel["transformations"] if t["id"] == "organize")
    rows: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}
    units = {
        o["matcher"]["options"]: p["value"]
        for o in panel["fieldConfig"]["overrides"]
        for p in o["properties"]
        if p["id"] == "unit"
    }
    for target in panel["targets"]:
        column = f"Value #{target['refId']}"
        unit = units.get(arranged["renameByName"][column], "none")
        for series in _ask(scene, target):
            row = rows.setdefault(tuple(sorted(series["metric"].items())), dict(series["metric"]))
            row[column] = _number(float(series["value"][1]), unit)
    columns = sorted(arranged["indexByName"], key=arranged["indexByName"].get)
    head = "".join(f"<th>{escape(arranged['renameByName'].get(column, column))}</th>" for column in columns)
    cells = ("".join(f"<td>{escape(row.get(column, ''))}</td>" for column in columns) for row in rows.values())
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _marks(scene: Scene, event: Panel) -> Iterator[tuple[float, str]]:
    """Where an annotation begins to hold."""
    for series in scene.ask(filled_in(event["expr"], run=RUN, window=WINDOW), now=False):
        holding = [float(at) for at, value in series["values"] if float(value) > 0]
        if holding:
            yield holding[0], SHADES.get(event["iconColor"], event["iconColor"])
