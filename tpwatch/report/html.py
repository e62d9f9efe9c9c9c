"""A run as one HTML file: self-contained, offline, and safe to open whatever a parameter is called.

Puts the parts together. The page may run its own script and use its own style sheet, both known by
their hash, and load nothing: its content security policy forbids the rest.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from tpwatch.errors import printable
from tpwatch.report.events import RunEvents
from tpwatch.report.html_data import STATUSES, Parameter, RunView, view
from tpwatch.report.html_evidence import evidence
from tpwatch.report.html_findings import cards
from tpwatch.report.html_map import heat_section
from tpwatch.report.html_parts import (
    as_json,
    not_claimed,
    overhead_section,
    settings_section,
    timeline_data,
    timeline_section,
    verdict,
)
from tpwatch.report.markup import Html, data_block, el

COLUMNS = ("Status", "Parameter", "Kind", "Since", "Checks", "Ratio", "Max abs", "Max rel", "Confidence")
"""Columns of the list of parameters; the script builds its rows, in this order."""

# Level stripes: the heat map is stretched sideways only.
HATCH = Html(
    '<svg width="0" height="0" aria-hidden="true" class="defs"><defs><pattern id="hatch" width="9" height="3"'
    ' patternUnits="userSpaceOnUse"><path d="M0 1H9" class="hatch"/></pattern></defs></svg>'
)


def render_html(run: RunEvents, title: str, version: str) -> str:
    """The report of a run as a whole document; `title` names the run, `version` is that of tpwatch."""
    shown = view(run, title)
    style, script = _asset("report.css"), _asset("report.js")
    return f"<!doctype html>\n{el('html', _head(shown, style, script), _body(shown, script, version), lang='en')}\n"


def _asset(name: str) -> Html:
    return Html((files("tpwatch.report") / "assets" / name).read_text(encoding="utf-8"))


def _head(shown: RunView, style: Html, script: Html) -> Html:
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )
    return el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("link", rel="icon", href="data:,"),
        el("title", f"{shown.summary.verdict}: {shown.title} - tpwatch"),
        el("style", style),
    )


def _hash(text: str) -> str:
    """The text as a source of a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _body(shown: RunView, script: Html, version: str) -> Html:
    links = [el("a", text, href=f"#{anchor}") for text, anchor in _contents(shown)]
    return el(
        "body",
        HATCH,
        el("a", "Skip to the verdict", href="#main", class_="skip"),
        el(
            "header",
            el("p", el("b", "tpwatch"), el("code", shown.title)),
            el("nav", links, aria_label="Contents"),
            class_="top",
        ),
        el(
            "main",
            verdict(shown),
            timeline_section(shown),
            cards(shown),
            heat_section(shown),
            _parameters(shown),
            not_claimed(shown),
            overhead_section(shown),
            settings_section(shown),
            id="main",
        ),
        el("footer", f"tpwatch {version}. This file is complete in itself and loads nothing."),
        data_block("timeline-data", timeline_data(shown)),
        data_block("parameter-data", _rows(shown)),
        el("script", script),
    )


def _contents(shown: RunView) -> list[tuple[str, str]]:
    """Link texts and anchors of the sections that are there."""
    summary = shown.summary
    causes = [f for f in summary.findings if f.role == "cause"]
    there = (
        ("Timeline", "timeline", bool(shown.steps)),
        ("Faults", "faults", any(f.counts for f in causes)),
        ("Information", "for-information", any(not f.counts for f in causes)),
        ("Where and when", "map", bool(summary.findings and shown.names)),
        ("Parameters", "parameters", True),
        ("Not covered", "not-claimed", True),
        ("Overhead", "overhead", bool(summary.overhead)),
        ("Configuration", "settings", True),
    )
    return [(text, anchor) for text, anchor, is_there in there if is_there]


# ---------------------------------------------------------------------------- list of parameters


def _parameters(shown: RunView) -> Html:
    """The list that the script fills, filters and sorts: one row per parameter and finding."""
    heads = [el("th", el("button", name, type="button"), scope="col", aria_sort="none") for name in COLUMNS]
    return el(
        "section",
        el("h2", "Parameters"),
        el("noscript", el("p", "This list needs JavaScript; everything else on this page does not.", class_="muted")),
        el(
            "div",
            _controls(shown),
            el("p", id="shown", class_="muted", aria_live="polite"),
            el("table", el("thead", el("tr", heads)), el("tbody"), id="list"),
            el("button", "Show more", type="button", id="more", hidden=True),
            class_="scripted",
        ),
        id="parameters",
    )


def _controls(shown: RunView) -> Html:
    counts = {status: sum(p.status == status for p in shown.parameters) for status in STATUSES}
    choices = [("all", "All", len(shown.parameters))]
    choices += [(status, heading, counts[status]) for status, heading in STATUSES.items() if counts[status]]
    chips = [
        el(
            "label",
            el("input", type="radio", name="status", value=value, checked=value == "all"),
            el("span", f"{heading} ", el("span", f"{n:,}", class_="n")),
        )
        for value, heading, n in choices
    ]
    field = el(
        "input", type="search", id="filter", placeholder="name, kind or code", autocomplete="off", spellcheck="false"
    )
    keys = el("span", "press ", el("kbd", "/"), " to filter, ", el("kbd", "Esc"), " to clear", class_="keys muted")
    return el(
        "div",
        el("label", el("span", "Filter", class_="sr"), field, class_="search"),
        keys,
        el("fieldset", el("legend", "Status", class_="sr"), chips, class_="chips"),
        class_="controls",
    )


def _rows(shown: RunView) -> list[list[object]]:
    """Cells in the order of `COLUMNS`, then the evidence as HTML, the rule's code and a reason."""
    return [_row(parameter, shown) for parameter in shown.parameters]


def _row(parameter: Parameter, shown: RunView) -> list[object]:
    found, name = parameter.finding, printable(parameter.name)
    if found is None:
        return [parameter.status, name, *[None] * (len(COLUMNS) - 2), None, "", printable(parameter.reason)]
    return [
        parameter.status,
        name,
        found.kind,
        found.first_step,
        found.count,
        found.ratio,
        _sortable(found.max_abs),
        _sortable(found.max_rel),
        found.confidence,
        evidence(found, shown),
        found.code,
        "",
    ]


def _sortable(measure: float) -> float | str | None:
    """A measure above 0."""
    return as_json(measure) if measure > 0.0 else None
