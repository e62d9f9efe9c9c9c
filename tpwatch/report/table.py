"""Aligned plain text: tables, short lists, and names from outside made safe to print.

Knows nothing of what it prints.
"""

from __future__ import annotations

from collections.abc import Sequence

from tpwatch.errors import printable

NOT_MEASURED = "-"
"""In a table, where there is no number."""


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "") -> list[str]:
    """Lines of a left-aligned table with a rule below the headers."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    lines = [headers, ["-" * width for width in widths], *cells]
    return [indent + _row(line, widths) for line in lines]


def some(names: Sequence[str], limit: int = 6) -> str:
    """The first few names, and how many more there are."""
    more = f", and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(printable(name) for name in names[:limit]) + more


def number(value: float) -> str:
    """A measure in at most four significant digits; zero as 0."""
    return f"{value:.4g}"


def measure(value: float | None) -> str:
    """`number`, or `NOT_MEASURED` where there is none: no 0, which would claim that copies are equal."""
    return NOT_MEASURED if value is None else number(value)


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
