"""A run as it happens, read from its event files: a live table on a terminal, else progress lines.

Knows `rich` only if it is installed and there is a terminal. The run is another process, and
files are all there is between the two.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from tpwatch.errors import printable
from tpwatch.records import Finding
from tpwatch.report.summary import StepRow
from tpwatch.report.table import number

HEADERS = ("step", "values differ", "reduced gradients differ", "max abs")
ROWS_SHOWN = 12


class Screen(Protocol):
    """Shows the course of one run."""

    def show(self, steps: Sequence[StepRow], findings: Sequence[Finding]) -> None:
        """Everything known so far, again with each call."""


def open_screen(title: str, say: Callable[[str], None], *, live: bool) -> AbstractContextManager[Screen]:
    """A screen for one run: a table that is redrawn if `live` and rich is there, else lines."""
    if live and importlib.util.find_spec("rich") is not None:
        return _rich_screen(title)
    say(title)
    return nullcontext(Lines(say))


class Lines:
    """One line per new step, and one whenever more has been found."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._shown = -1
        self._found = ""

    def show(self, steps: Sequence[StepRow], findings: Sequence[Finding]) -> None:
        """Write what was not there before."""
        for row in steps:
            if row.step > self._shown:
                self._shown = row.step
                cells = zip(HEADERS, _cells(row), strict=True)
                self._say("  " + ", ".join(f"{name} {cell}" for name, cell in cells))
        if (found := _found(findings)) != self._found:
            self._found = found
            self._say(f"  {found}")


class Redrawn:
    """A table of the last steps that is redrawn in place."""

    def __init__(self, title: str, update: Callable[[Any], None]) -> None:
        self._title = title
        self._update = update

    def show(self, steps: Sequence[StepRow], findings: Sequence[Finding]) -> None:
        """Redraw."""
        from rich.table import Table
        from rich.text import Text

        found = Text(_found(findings))
        table = Table(title=Text(self._title), caption=found, title_justify="left")
        table.caption_justify = "left"
        for header in HEADERS:
            table.add_column(header, justify="right")
        for row in steps[-ROWS_SHOWN:]:
            table.add_row(*(Text(cell) for cell in _cells(row)))
        self._update(table)


@contextmanager
def _rich_screen(title: str) -> Iterator[Screen]:
    from rich.live import Live

    with Live(title, refresh_per_second=8) as live:
        yield Redrawn(title, live.update)


def _cells(row: StepRow) -> tuple[str, ...]:
    # Gradients before the reduction are left out: partial ones differ on healthy runs, too.
    values, gradients = row.differing.get("param", 0), row.differing.get("grad_post", 0)
    return (str(row.step), str(values), str(gradients), size(row))


def size(row: StepRow) -> str:
    """The largest difference in a row, in words where it was not measured: there is no room to explain a sign."""
    return "not measured" if row.max_abs is None else number(row.max_abs)


def _found(findings: Sequence[Finding]) -> str:
    """The causes so far: kinds, how many, and one of them."""
    causes = [f for f in findings if f.role == "cause"]
    if not causes:
        return ""
    kinds = ", ".join(sorted({f.kind for f in causes}))
    more = f" and {len(causes) - 1} more" if len(causes) > 1 else ""
    return f"found {kinds}: {printable(causes[0].parameter)}{more}"
