"""Parts of the HTML report around the findings: verdict, timeline, what is not claimed, cost.

Formats what `html_data` put together; decides nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

from tpwatch.report.charts import Series, lines
from tpwatch.report.html_data import RunView
from tpwatch.report.html_evidence import count
from tpwatch.report.html_findings import title_of
from tpwatch.report.markup import Child, Html, dotted, el, join
from tpwatch.report.summary import UNMEASURED, StepRow, largest
from tpwatch.report.table import NOT_MEASURED, measure, number

HEADLINES = {"clean": "Clean", "faults": "Faults found", "nothing-checked": "Nothing was checked"}
GLYPHS = {"clean": "✓", "faults": "✕", "nothing-checked": "?"}

POINTS_DRAWN = 300
"""Steps drawn in a timeline; of more, several share a point that has the worst of them."""

ROWS_LISTED = 60
"""Rows of the table behind the timeline."""


# --------------------------------------------------------------------------------------- verdict


def verdict(view: RunView) -> Html:
    """The answer, why, and how much was looked at."""
    summary = view.summary
    mark = el("span", GLYPHS[summary.verdict], class_="glyph", aria_hidden="true")
    headline = HEADLINES[summary.verdict]
    if summary.verdict == "faults":
        headline = f"{count(len(summary.causes), 'fault')} found"
    aborted = summary.aborted_at
    stopped = el("p", f"tpwatch stopped the run at step {aborted}.", class_="stopped") if aborted is not None else ""
    tiles = [el("div", el("dt", name), el("dd", value)) for name, value in _tiles(view)]
    return el(
        "section",
        el("div", mark, el("div", el("h1", headline), list(_because(view)), stopped), class_="answer"),
        el("dl", tiles, class_="tiles"),
        class_=f"verdict {summary.verdict}",
        id="verdict",
    )


def _because(view: RunView) -> Iterator[Html]:
    """One line per kind of fault, or what a clean verdict covers."""
    summary = view.summary
    kinds = Counter(f.kind for f in summary.causes)
    if kinds:
        yield el("ul", [_kind_line(kind, n) for kind, n in kinds.items()], class_="because")
    elif summary.verdict == "clean":
        yield el("p", f"No fault in {count(summary.steps_checked, 'checked step')}.")
    else:
        yield el("p", "No check was completed, so this run proves nothing.")
    open_ends = len(summary.not_exercised) + len(summary.unverified) + len(summary.not_watched)
    if open_ends and not kinds:
        yield el("p", el("a", f"{count(open_ends, 'parameter')} not covered by this verdict", href="#not-claimed"))


def _kind_line(kind: str, parameters: int) -> Html:
    link = el("a", title_of(kind), href=f"#kind-{kind}")
    return el("li", link, el("span", f" {kind}, {count(parameters, 'parameter')}", class_="muted"))


def _tiles(view: RunView) -> Iterator[tuple[str, str]]:
    summary = view.summary
    yield "Steps checked", f"{summary.steps_checked:,}"
    yield "Replicas watched", f"{summary.replicas:,}"
    yield "Replica groups", f"{len(summary.groups):,}"
    if summary.causes:
        yield "First seen at step", f"{min(f.first_step for f in summary.causes):,}"
    if summary.overhead:
        yield "Cost of a check", f"{1e3 * summary.overhead['check_seconds_mean']:.2f} ms"


# -------------------------------------------------------------------------------------- timeline


def timeline_section(view: RunView) -> Child:
    """How many replicas differ at each step, and by how much."""
    if not view.steps:
        return ""
    steps = thinned(view.steps)
    # Gradients before the reduction are left out: partial ones differ on healthy runs, too.
    counts = [
        Series("values", [(s.step, s.differing.get("param", 0)) for s in steps]),
        Series("reduced gradients", [(s.step, s.differing.get("grad_post", 0)) for s in steps], "dashed"),
    ]
    sizes = [
        Series("max abs", [(s.step, s.max_abs) for s in steps]),
        Series("max rel", [(s.step, s.max_rel) for s in steps], "dashed"),
    ]
    size_chart = lines(sizes, _worst_of(steps), log=True)
    measured = _panel(f"Largest difference measured (log scale{_sparse(steps)})", size_chart)
    charts = el(
        "div",
        _panel("Replicas that are not bit-identical", lines(counts, _most_of(steps))),
        measured if size_chart else _ratio_panel(view),
        class_="panels",
    )
    readout = el("p", class_="readout muted", aria_live="polite")
    area = el("div", charts, readout, class_="timeline", tabindex="0", role="group", aria_label="Timeline by step")
    return el("section", el("h2", "Timeline"), _agreement(view), area, _numbers(view.steps), id="timeline")


def _sparse(steps: Sequence[StepRow]) -> str:
    """How to read a line that goes on over steps at which nothing was measured."""
    return "; dots: measured" if any(s.max_abs is None for s in steps) else ""


def _ratio_panel(view: RunView) -> Html:
    """What stands for the differences where none was measured: ratios of norms, if there are any."""
    ratios: dict[int, float] = {}
    for seen in chain.from_iterable(view.sightings.values()):
        if seen.ratio is not None:
            ratios[seen.step] = max(seen.ratio, ratios.get(seen.step, 0.0))
    if not ratios:
        return _panel("Largest difference measured", el("p", "No difference was measured.", class_="muted"))
    label = f"Largest ratio of gradient norms in findings: at most {number(max(ratios.values()))}"
    # The ends make both charts span the same steps.
    points = {view.steps[0].step: None, view.steps[-1].step: None, **ratios}
    chart = lines([Series("ratio", sorted(points.items()))], label)
    return _panel("Largest gradient norm after / before, in findings", chart)


def timeline_data(view: RunView) -> list[tuple[object, ...]]:
    """(step, values, gradients, max abs, max rel) of each point of the charts; null: not measured."""
    return [
        (r.step, r.differing.get("param", 0), r.differing.get("grad_post", 0), as_json(r.max_abs), as_json(r.max_rel))
        for r in thinned(view.steps)
    ]


def as_json(value: float | None) -> float | str | None:
    """A measure for the script: JSON has no word for one beyond all bounds."""
    return value if value is None or math.isfinite(value) else "inf"


def thinned(steps: Sequence[StepRow]) -> list[StepRow]:
    """At most `POINTS_DRAWN` rows and the first: each the worst of some neighbours, at the last of them."""
    size = -(-len(steps) // POINTS_DRAWN) or 1
    first = [steps[0]] if size > 1 else []
    return first + [_worst(steps[at : at + size]) for at in range(0, len(steps), size)]


def _worst(rows: Sequence[StepRow]) -> StepRow:
    points = {point for row in rows for point in row.differing}
    differing = {point: max(row.differing.get(point, 0) for row in rows) for point in points}
    return StepRow(rows[-1].step, differing, largest(r.max_abs for r in rows), largest(r.max_rel for r in rows))


def _panel(title: str, chart: Html) -> Html:
    return el("figure", el("figcaption", el("b", title)), chart)


def _agreement(view: RunView) -> Child:
    """A word where the timeline is flat although there are faults."""
    flat = not any(row.differing.get(point) for row in view.steps for point in ("param", "grad_post"))
    if flat and any(f.kind == "double-reduce" for f in view.summary.causes):
        return el("p", "All copies agree at every checked step. The fault is one that all ranks share.", class_="point")
    return ""


def _most_of(steps: Sequence[StepRow]) -> str:
    values, gradients = (max(s.differing.get(point, 0) for s in steps) for point in ("param", "grad_post"))
    span = f"steps {steps[0].step} to {steps[-1].step}"
    return f"Replicas that differ, {span}: at most {values} values, {gradients} gradients"


def _worst_of(steps: Sequence[StepRow]) -> str:
    absolute, relative = largest(s.max_abs for s in steps), largest(s.max_rel for s in steps)
    return f"Largest difference measured: max abs {measure(absolute)}, max rel {measure(relative)}"


def _numbers(steps: Sequence[StepRow]) -> Html:
    """The timeline as a table, for those who cannot or would rather not read a chart."""
    half = ROWS_LISTED // 2
    shown = list(steps) if len(steps) <= ROWS_LISTED else [*steps[:half], *steps[-half:]]
    left_out = f", {len(steps) - len(shown):,} in the middle left out" if len(shown) < len(steps) else ""
    points = ("param", "grad_pre", "grad_post")
    rows = [
        (str(s.step), *(str(s.differing.get(p, 0)) for p in points), measure(s.max_abs), measure(s.max_rel))
        for s in shown
    ]
    heads = ("step", "values differ", "gradients before", "gradients after", "max abs", "max rel")
    note = "Partial gradients differ before the reduction by design."
    if any(s.max_abs is None for s in shown):
        note += f" {NOT_MEASURED}: {UNMEASURED}."
    return el("details", el("summary", f"As numbers{left_out}"), el("p", note, class_="muted"), grid(heads, rows))


def grid(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Html:
    """A table of numbers that scrolls by itself where it is too wide."""
    head = el("thead", el("tr", [el("th", head, scope="col") for head in heads]))
    body = el("tbody", [el("tr", [el("td", cell) for cell in row]) for row in rows])
    return el("div", el("table", head, body), class_="scroll", tabindex="0", role="group", aria_label="Table")


# ----------------------------------------------------------------------------- what is not claimed


def not_claimed(view: RunView) -> Html:
    """What the verdict does not cover; every list in full, closed."""
    summary = view.summary
    lists = (
        ("Not exercised", "The gradient was never seen non-zero, so nothing is known about it.", summary.not_exercised),
        ("Unverified", "Which reduction was applied could not be decided.", summary.unverified),
    )
    unwatched = [(name, why) for name, why in summary.not_watched]
    items = [
        *(_names(heading, note, [(name, "") for name in names]) for heading, note, names in lists),
        _names("Not watched", "These were looked at and left out.", unwatched),
    ]
    notes = el("ul", [el("li", note) for note in summary.notes]) if summary.notes else ""
    return el(
        "section",
        el("h2", "What the verdict does not cover"),
        items,
        join(el("h3", "Notes"), notes) if notes else "",
        id="not-claimed",
    )


def _names(heading: str, note: str, names: Sequence[tuple[str, str]]) -> Html:
    title = el("span", heading, " ", el("span", f"{len(names):,}", class_="n"))
    if not names:
        return el("p", title, class_="none muted")
    items = [el("li", dotted(name), el("span", why, class_="muted") if why else "") for name, why in names]
    return el("details", el("summary", title), el("p", note, class_="muted"), el("ul", items, class_="names"))


# ----------------------------------------------------------------------------- cost and settings


def overhead_section(view: RunView) -> Child:
    """What watching cost."""
    cost = view.summary.overhead
    if not cost:
        return ""
    tiles = (
        ("Mean check", f"{1e3 * cost['check_seconds_mean']:.2f} ms"),
        ("Share of the checked steps", f"{100 * cost['step_fraction']:.2f} %"),
        ("Collectives a check", number(cost["collectives_per_check"])),
        ("Collectives for drill-down", number(cost["deep_collectives_per_check"])),
    )
    seconds = view.check_seconds
    size = -(-len(seconds) // POINTS_DRAWN) or 1
    blocks = [seconds[at : at + size] for at in range(0, len(seconds), size)]
    series = Series("ms", [(block[-1][0], 1e3 * max(s for _, s in block)) for block in blocks])
    longest = max((s for _, s in seconds), default=0.0)
    chart = lines([series], f"Milliseconds of each check: at most {1e3 * longest:.2f}")
    return el(
        "section",
        el("h2", "Overhead"),
        el("dl", [el("div", el("dt", name), el("dd", value)) for name, value in tiles], class_="tiles"),
        _panel("Milliseconds of each check, slowest group", chart),
        id="overhead",
    )


def settings_section(view: RunView) -> Html:
    """How it was watched: what differs from the defaults first."""
    ordered = sorted(view.settings, key=lambda setting: not setting.changed)
    rows = [
        el(
            "tr",
            el("th", el("code", s.key), scope="row"),
            el("td", s.value),
            el("td", "set" if s.changed else "default"),
        )
        for s in ordered
    ]
    facts = [join(el("dt", name), el("dd", value)) for name, value in view.facts]
    table = el("details", el("summary", f"All {len(rows)} settings"), el("table", el("tbody", rows), class_="settings"))
    return el(
        "section", el("h2", "Configuration"), el("dl", facts, class_="facts"), table if rows else "", id="settings"
    )
