"""Line charts as SVG, for previews of what another program draws. Knows numbers, not what they mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

COLORS = ("#3d71d9", "#e0662c", "#2a9d6f", "#a352cc", "#c4162a", "#8a6d00")
LEFT, BOTTOM, TOP, RIGHT = 52, 20, 8, 16
"""Space around the drawing area for labels, in pixels."""

Words = Callable[[float], str]


@dataclass(frozen=True)
class Line:
    """One curve."""

    name: str
    points: Sequence[tuple[float, float]]

    @property
    def last(self) -> float:
        """The last value."""
        return self.points[-1][1]


@dataclass(frozen=True)
class Axes:
    """What all lines of a chart share."""

    size: tuple[int, int]
    """In pixels, labels included."""
    span: tuple[float, float]
    """Ends of the horizontal axis."""
    words: tuple[Words, Words]
    """Labels of the horizontal and of the vertical axis."""
    marks: Sequence[tuple[float, str]] = ()
    """Vertical strokes: where, and in which colour."""


def chart(lines: Sequence[Line], axes: Axes) -> str:
    """Lines on common axes, from 0 or below on."""
    (width, height), (first, last), (across, upwards) = axes.size, axes.span, axes.words
    values = [y for line in lines for _, y in line.points]
    ticks = _ticks(min(0.0, *values), max(values))

    def place(x: float, y: float) -> tuple[float, float]:
        right = LEFT + (x - first) / (last - first) * (width - LEFT - RIGHT)
        return right, height - BOTTOM - (y - ticks[0]) / (ticks[-1] - ticks[0]) * (height - TOP - BOTTOM)

    parts = []
    for y in ticks:
        down = place(first, y)[1]
        parts.append(f'<path class="grid" d="M{LEFT} {down:.1f}H{width - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{down + 4:.1f}" text-anchor="end">{escape(upwards(y))}</text>')
    for x in (tick for tick in _ticks(first, last) if first <= tick <= last):
        right = place(x, 0)[0]
        parts.append(f'<text x="{right:.1f}" y="{height - 4}" text-anchor="middle">{escape(across(x))}</text>')
    for x, shade in axes.marks:
        stroke = f"M{place(x, 0)[0]:.1f} {TOP}V{height - BOTTOM}"
        parts.append(f'<path d="{stroke}" stroke="{shade}" stroke-dasharray="4 3"/>')
    for number, line in enumerate(lines):
        path = "L".join(f"{right:.1f} {down:.1f}" for right, down in (place(*point) for point in line.points))
        dashes = ' stroke-dasharray="7 4"' if number % 2 else ""  # so that no line hides the one below it
        parts.append(f'<path class="line" stroke="{_color(number)}"{dashes} d="M{path}"/>')
    return f'<svg width="{width}" height="{height}">{"".join(parts)}</svg>'


def legend(lines: Sequence[Line], words: Words) -> str:
    """Name and last value of each line."""
    rows = []
    for number, line in enumerate(lines):
        name = f'<i style="background:{_color(number)}"></i>{escape(line.name)}'
        rows.append(f'<tr><td>{name}</td><td class="n">{escape(words(line.last))}</td></tr>')
    return f'<table class="legend">{"".join(rows)}</table>'


def plain(value: float) -> str:
    """A number without a unit."""
    return f"{value:.4g}"


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers, the first not above `low`, the last not below `high`."""
    if high <= low:
        high = low + 1.0
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    begin, end = math.floor(low / step), math.ceil(high / step)
    return [step * count for count in range(begin, end + 1)]
