"""Charts as inline SVG: lines over steps, a heat map over steps, bars. Knows numbers, not findings.

The drawing area is stretched to the width at hand; labels stand beside it as text, and so keep
their size on a phone. Differences are told by shape (solid, dashed) as well as by shade.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from tpwatch.report.markup import Child, Html, el
from tpwatch.report.table import number

WIDTH, HEIGHT = 1000.0, 100.0
"""The drawing area in its own units, whatever size it is shown in."""

LARGEST, SMALLEST = 1e300, 1e-300
"""Beyond the first nothing is drawn, below the second nothing on a log scale: the next power of ten is no float."""

LABELLED_ROWS = 24
"""A heat map of more rows than this names only the first and the last."""

FEW_POINTS = 12
"""Of no more points each is marked by a dot."""

FEW_ROWS, TALL, LOW = 8, 26, 16
"""Up to so many rows are this tall, in pixels; more are this low."""

Point = tuple[float, float | None]
"""A step and a value, None where there is none: a line goes on over it."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line: its name, its points in order of steps, and how it is drawn (`solid` or `dashed`)."""

    name: str
    points: Sequence[Point]
    style: str = "solid"

    def only(self, *, positive: bool) -> Series:
        """The same with NaN, a gap, for a value that cannot be drawn; where there is none, it stays so."""
        return replace(self, points=[(x, _drawable(y, positive=positive)) for x, y in self.points])

    @property
    def drawn(self) -> list[float]:
        """Values of the points that are drawn."""
        return [y for _, y in self.points if _drawn(y)]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some steps in one row of a heat map, `weight` (0 to 1) dark; `faint` ones are hatched."""

    row: int
    first: int
    last: int
    weight: float
    title: str
    faint: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """A labelled amount; `strong` in the colour of a fault."""

    label: str
    value: float
    strong: bool = False


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where steps and values lie in the drawing area."""

    first: float
    last: float
    low: float
    high: float
    log: bool

    @classmethod
    def around(cls, series: Sequence[Series], *, log: bool) -> _Frame:
        steps = [x for one in series for x, _ in one.points]
        values = [y for one in series for y in one.drawn]
        low, high = min(values), max(values)
        if log:
            low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))
        else:
            low = min(low, 0.0)
        if low == high:
            high = 10.0 * high if log else high + 1.0
        return cls(min(steps), max(steps), low, high, log)

    def place(self, x: float, y: float) -> str:
        across = (x - self.first) / (self.last - self.first) if self.last > self.first else 0.5
        low, high, y = (math.log10(v) if self.log else v for v in (self.low, self.high, y))
        return f"{WIDTH * across:.1f} {HEIGHT * (1.0 - (y - low) / (high - low)):.1f}"


# --------------------------------------------------------------------------------------- lines


def lines(series: Sequence[Series], label: str, *, log: bool = False) -> Html:
    """Lines over steps, or nothing if no value can be drawn; a log scale has values above 0 only."""
    shown = [one.only(positive=log) for one in series]
    if not any(one.drawn for one in shown):
        return Html("")
    frame = _Frame.around(shown, log=log)
    strokes = [
        (f"{kind} {one.style}", d)
        for one in shown
        for kind, d in (("line", _path(one, frame)), ("dots", _dots(one, frame)))
    ]
    paths = [el("path", d=d, class_=class_) for class_, d in strokes if d]
    drawing = _svg([_grid(), paths], label, "lines")
    legend = el("p", [_key(one) for one in shown], class_="legend") if len(shown) > 1 else ""
    values = el("div", *(el("span", number(v)) for v in (frame.high, frame.low)), class_="values")
    steps = _steps(int(frame.first), int(frame.last))
    return el("div", legend, el("div", values, drawing, steps, class_="axes"), class_="chart")


def _drawable(value: float | None, *, positive: bool) -> float | None:
    if value is None:
        return None
    beyond = not math.isfinite(value) or abs(value) > LARGEST or (positive and value < SMALLEST)
    return math.nan if beyond else value


def _drawn(value: float | None) -> TypeGuard[float]:
    return value is not None and not math.isnan(value)


def _path(series: Series, frame: _Frame) -> str:
    """Moves and lines: broken where a value cannot be drawn, going on over steps that have none."""
    parts: list[str] = []
    joined = False
    for x, y in series.points:
        if _drawn(y):
            parts.append(f"{'L' if joined else 'M'}{frame.place(x, y)}")
        joined = _drawn(y) or (joined and y is None)
    return "".join(parts)


def _dots(series: Series, frame: _Frame) -> str:
    """Strokes of no length at the points between which a line says nothing: few, alone, or next to a step without."""
    values = [y for _, y in series.points]
    few = len(series.drawn) <= FEW_POINTS
    parts: list[str] = []
    for i, (x, y) in enumerate(series.points):
        beside = [*values[max(0, i - 1) : i], *values[i + 1 : i + 2]]
        if _drawn(y) and (few or None in beside or not any(map(_drawn, beside))):
            parts.append(f"M{frame.place(x, y)}h.01")
    return "".join(parts)


def _grid() -> Html:
    heights = (0.0, HEIGHT / 2, HEIGHT)
    return el("path", d="".join(f"M0 {y:g}H{WIDTH:g}" for y in heights), class_="grid")


def _key(series: Series) -> Html:
    """A stroke as in the chart, and what it stands for."""
    stroke = el("path", d="M0 5H28", class_=f"line {series.style}")
    return el("span", el("svg", stroke, viewBox="0 0 28 10", aria_hidden="true"), series.name)


def _steps(first: int, last: int) -> Html:
    """Labels below the drawing area."""
    ends = (first, last) if last > first else (first,)
    return el("div", [el("span", f"step {step}") for step in ends], class_="steps")


def _svg(children: Sequence[Child], label: str, class_: str, pixels: int | None = None) -> Html:
    """A stretched drawing; `pixels` is its height on the screen and in its own units."""
    return el(
        "svg",
        children,
        height=pixels,
        viewBox=f"0 0 {WIDTH:g} {pixels or HEIGHT:g}",
        preserveAspectRatio="none",
        role="img",
        aria_label=label,
        class_=class_,
    )


# ------------------------------------------------------------------------------------ heat map


def heat_map(rows: Sequence[str], stretches: Sequence[Stretch], steps: tuple[int, int], label: str) -> Html:
    """One row per name, steps from left to right, dark where much was found."""
    first, last = steps
    tall = len(rows) <= LABELLED_ROWS
    row_height = (TALL if len(rows) <= FEW_ROWS else LOW) if tall else max(3, LABELLED_ROWS * LOW // len(rows))
    per_step = WIDTH / (last - first + 1)
    rects = [
        el(
            "rect",
            el("title", cell.title),
            x=round(per_step * (cell.first - first), 2),
            y=cell.row * row_height + (1 if tall else 0),
            width=round(per_step * (cell.last - cell.first + 1), 2),
            height=row_height - (2 if tall else 0),
            fill_opacity=round(0.25 + 0.75 * cell.weight, 2),
            class_="cell faint" if cell.faint else "cell",
        )
        for cell in stretches
    ]
    height = row_height * len(rows)
    ground = el("rect", width=WIDTH, height=height, class_="ground")
    drawing = _svg([ground, rects], label, "heat", height)
    names = [el("span", name, title=name) for name in (rows if tall else (rows[0], rows[-1]))]
    labels = el("div", names, class_=f"rows h{row_height}" if tall else "rows")
    return el("div", el("div", labels, drawing, _steps(first, last), class_="axes"), class_="chart")


# ---------------------------------------------------------------------------------------- bars


def bars(items: Sequence[Bar], label: str) -> Html:
    """Horizontal bars on one scale from 0, each with its label and its value."""
    top = max((bar.value for bar in items if math.isfinite(bar.value)), default=0.0)
    return el("div", [_bar(bar, top) for bar in items], class_="bars", role="group", aria_label=label)


def _bar(bar: Bar, top: float) -> Html:
    share = min(1.0, bar.value / top) if top > 0.0 and math.isfinite(bar.value) else 0.0
    fill = el("rect", width=f"{100 * share:.1f}%", height="100%", class_="strong" if bar.strong else None)
    drawing = el("svg", el("rect", width="100%", height="100%", class_="track"), fill, aria_hidden="true")
    return el("div", el("span", bar.label), drawing, el("span", number(bar.value), class_="n"))
