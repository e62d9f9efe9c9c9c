"""A run of others as it goes on: what was found so far, again and again until the run has ended.

Knows `rich` only if it is installed and there is a terminal; elsewhere each new step is a line. The
run is another process, on another machine perhaps, and files are all there is between the two.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tpwatch.errors import printable
from tpwatch.export.rotation import event_files
from tpwatch.records import Finding, Summary
from tpwatch.report.events import RunEvents, read_events
from tpwatch.report.live import ROWS_SHOWN, Lines, size
from tpwatch.report.summary import StepRow, summarize_events, timeline
from tpwatch.report.table import number

HEADERS = ("severity", "kind", "parameter", "since", "size")
FINDINGS_SHOWN = 24

SHARE_OF_TIME = 0.1
"""Reading a long run takes time: no more than this share of it is spent on reading."""

STYLES = {"error": "bold red", "warning": "yellow", "info": ""}


@dataclass(frozen=True, slots=True)
class State:
    """What a run came to so far."""

    steps: Sequence[StepRow]
    summary: Summary
    last_event: float | None
    """Seconds since the epoch."""
    ended: bool


class Screen(Protocol):
    """Shows the state of one run."""

    def show(self, state: State) -> None:
        """Everything known so far, again with each call."""


def follow(directory: Path, screen: Screen, interval: float) -> State:
    """Show a run every `interval` seconds until it has ended in order; its last state.

    Raises:
        RunDirectoryError: there is no such directory, or a newer tpwatch wrote it.
    """
    seen, state, cost = None, None, 0.0
    while state is None or not state.ended:
        if (files := _fingerprint(directory)) != seen or state is None:
            began = time.monotonic()
            seen, state = files, read_state(directory)
            cost = time.monotonic() - began
        screen.show(state)
        if not state.ended:
            time.sleep(max(interval, cost / SHARE_OF_TIME))
    return state


def read_state(directory: Path) -> State:
    """The state of a run, read once."""
    run = read_events(directory)
    times = [event["time"] for events in run.groups.values() for event in events[-1:] if "time" in event]
    return State(timeline(run), summarize_events(run), max(times, default=None), _ended(run))


def open_watch(title: str, say: Callable[[str], None], *, live: bool) -> AbstractContextManager[Screen]:
    """A screen for one run: a table that is redrawn if `live` and rich is there, else lines."""
    if live and importlib.util.find_spec("rich") is not None:
        return _rich_screen(title)
    say(title)
    return nullcontext(Plain(say))


def step_line(state: State, now: float) -> str:
    """The last checked step and how long ago anything was written, on one line."""
    if not state.steps:
        return "no step was checked yet" + _ago(state, now)
    row = state.steps[-1]
    values, gradients = row.differing.get("param", 0), row.differing.get("grad_post", 0)
    return (
        f"step {row.step}: {values} values and {gradients} reduced gradients differ,"
        f" max abs {size(row)}{_ago(state, now)}"
    )


class Plain:
    """One line per new step, and one whenever more has been found."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._lines = Lines(say)
        self._looked = False

    def show(self, state: State) -> None:
        """Write what was not there before; of the steps before the first look only the last ones."""
        steps = state.steps if self._looked else state.steps[-ROWS_SHOWN - 1 :]
        self._looked = True
        self._lines.show(steps, state.summary.findings)


class Redrawn:
    """The step line and a table of findings, redrawn in place."""

    def __init__(self, title: str, update: Callable[[Any], None]) -> None:
        self._title = title
        self._update = update

    def show(self, state: State) -> None:
        """Redraw."""
        from rich.console import Group
        from rich.text import Text

        causes = [f for f in state.summary.findings if f.role == "cause"]
        parts = [Text(self._title, style="bold"), Text(step_line(state, time.time()))]
        self._update(Group(*parts, _table(causes) if causes else Text("nothing was found so far")))


@contextmanager
def _rich_screen(title: str) -> Iterator[Screen]:
    from rich.live import Live

    with Live(title, refresh_per_second=4) as live:
        yield Redrawn(title, live.update)


def _table(findings: Sequence[Finding]) -> Any:  # noqa: ANN401 - rich is optional, and so are its types
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, caption_justify="left")
    for header in HEADERS:
        table.add_column(header, justify="right" if header in HEADERS[3:] else "left", overflow="fold")
    for finding in findings[:FINDINGS_SHOWN]:
        table.add_row(*(Text(cell, style=STYLES[finding.severity]) for cell in _cells(finding)))
    if len(findings) > FINDINGS_SHOWN:
        table.caption = Text(f"and {len(findings) - FINDINGS_SHOWN} more")
    return table


def _cells(finding: Finding) -> tuple[str, ...]:
    return (
        finding.severity,
        finding.kind,
        printable(finding.parameter),
        str(finding.first_step),
        _size(finding),
    )


def _size(finding: Finding) -> str:
    """Its difference between copies, else its factor."""
    if finding.max_abs > 0.0:
        return number(finding.max_abs)
    return "" if finding.ratio is None else f"x {number(finding.ratio)}"


def _ago(state: State, now: float) -> str:
    if state.ended or state.last_event is None:
        return ""
    return f"; last event {max(0.0, now - state.last_event):.0f} s ago"


def _ended(run: RunEvents) -> bool:
    """True once every replica group has ended in order; one that was killed never does."""
    last = [events[-1]["event"] for events in run.groups.values() if events]
    return bool(last) and not run.missing and all(event in {"end", "abort"} for event in last)


def _fingerprint(directory: Path) -> tuple[tuple[str, int, int], ...]:
    """What tells that an event file has grown, or was put by; nothing of a directory that cannot be read."""
    with suppress(OSError):
        return tuple((part.path.name, part.size, part.changed) for part in event_files(directory))
    return ()
