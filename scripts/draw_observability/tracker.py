"""A preview of the section "replica consistency" in W&B: the panels that tpwatch saves, drawn from an offline run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from browser import Browser
from charts import Axes, Line, chart, legend, plain
from page import page
from scene import Scene

from tests.export._wandb import Recorded, recorded
from tpwatch.export.wandb import SCALARS, STEP, TABLE
from tpwatch.export.wandb_workspace import NAME, View

SIZE = (1280, 815)
STYLE = """
.panels { display: grid; grid-template-columns: repeat(3, 1fr); gap: 12px; margin-bottom: 12px }
.panels section { height: 280px }
td { vertical-align: top }
td:first-child { white-space: nowrap }
p { margin: 0 0 10px }
"""


def section(scene: Scene, browser: Browser) -> bytes:
    """The section, the table of findings and the alerts."""
    run = recorded(scene.directory)
    plots = "".join(_plot(run, config) for config in _plots())
    alerts = "".join(f"<p><b>{level}: {escape(title)}</b><br>{escape(text)}</p>" for title, text, level in run.alerts)
    body = (
        f'<div class="panels">{plots}<section><h2>Alerts sent</h2>{alerts}</section></div>'
        f"<section><h2>{TABLE}</h2>{_findings(run)}</section>"
    )
    return browser.html(page(NAME, "preview, from an offline run", body, STYLE), SIZE)


def _plots() -> Iterator[Mapping[str, Any]]:
    """The line plots of the view that `tpwatch wandb workspace` saves."""
    (found,) = View("my-team", "my-project").spec()["spec"]["section"]["panelBankConfig"]["sections"]
    for panel in found["panels"]:
        if "chartTitle" in panel["config"]:
            yield panel["config"]


def _plot(run: Recorded, config: Mapping[str, Any]) -> str:
    names = config["metrics"] or sorted(
        {name for row in run.rows for name in row if re.fullmatch(config["metricRegex"], name)}
    )
    lines = [
        Line(name.removeprefix(f"{SCALARS}/"), [(row[STEP], row[name]) for row in run.rows if name in row])
        for name in names
    ]
    lines = [line for line in lines if line.points]
    axes = Axes((386, 230 - 19 * len(lines)), (0, run.column(STEP)[-1]), (plain, plain))
    drawing = chart(lines, axes)
    return f"<section><h2>{escape(config['chartTitle'])}</h2>{drawing}{legend(lines, plain)}</section>"


def _findings(run: Recorded) -> str:
    rows = run.table(TABLE)
    head = "".join(f"<th>{escape(column)}</th>" for column in rows[0])
    body = ("".join(f"<td>{escape(_cell(value))}</td>" for value in row.values()) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in body)}</table>"


def _cell(value: object) -> str:
    return plain(value) if isinstance(value, float) else "" if value is None else str(value)
