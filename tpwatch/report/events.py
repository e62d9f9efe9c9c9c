"""Reading the event files of a run directory, whatever state a crash left them in.

Knows the form of the files (`tpwatch.export.jsonl` writes them), not what their numbers come to.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpwatch.errors import RunDirectoryError
from tpwatch.records import SCHEMA, SEVERITIES, Finding

Event = Mapping[str, Any]
"""One line of an event file, as JSON values."""


@dataclass(frozen=True, slots=True)
class RunEvents:
    """All that could be read from a run directory."""

    directory: str
    groups: Mapping[str, tuple[Event, ...]]
    """Events per replica group, in the order they were written."""
    missing: tuple[str, ...]
    """Replica groups that `meta.json` names and that left no file."""
    notes: tuple[str, ...]
    """What was wrong with the files, one line each."""

    def of(self, kind: str) -> Iterator[tuple[str, Event]]:
        """(group, event) of every event of one kind."""
        for group, events in self.groups.items():
            yield from ((group, event) for event in events if event["event"] == kind)


def read_events(directory: str | os.PathLike[str]) -> RunEvents:
    """Read every event file; lines that are no events are counted in a note, not fatal.

    Raises:
        RunDirectoryError: there is no such directory, or a newer tpwatch wrote it.
    """
    root = Path(directory)
    if not root.is_dir():
        reason = "no such run directory"
        raise RunDirectoryError(os.fspath(root), reason)
    groups: dict[str, tuple[Event, ...]] = {}
    notes: list[str] = []
    for path in sorted(root.glob("events.*.jsonl"), key=_natural):
        group = path.name.removeprefix("events.").removesuffix(".jsonl")
        groups[group], bad = _read_file(path)
        notes += bad
    missing = tuple(name for name in _announced(root) if name not in groups)
    notes += [f"replica group {name} left no event file" for name in missing]
    return RunEvents(os.fspath(root), groups, missing, tuple(notes))


def parse_finding(event: Event) -> Finding | None:
    """The finding in a `finding` event, or None if it is not one this version understands."""
    data = event.get("finding")
    if not isinstance(data, Mapping):
        return None
    # A number that is not finite is written as null; of a spread that means: beyond all bounds.
    measures = {k: float("inf") for k in ("max_abs", "max_rel") if data.get(k, 0.0) is None}
    try:
        finding = Finding.from_json({**data, **measures})
    except TypeError:
        return None
    known = finding.severity in SEVERITIES and finding.role in ("cause", "consequence")
    return finding if known else None


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sort key that puts group tp-2 before tp-10."""
    parts = re.split(r"(\d+)", path.name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _read_file(path: Path) -> tuple[tuple[Event, ...], list[str]]:
    events: list[Event] = []
    garbage = 0
    lines = path.read_bytes().split(b"\n")
    last = lines.pop()  # empty, unless the writer was killed within a line
    for line in filter(None, lines):
        event = _parse(line, path)
        if event is None:
            garbage += 1
        else:
            events.append(event)
    notes = [f"{path.name}: {garbage} unreadable lines were left out"] if garbage else []
    if last:
        whole = _parse(last, path)
        events += [whole] if whole else []
        notes += [] if whole else [f"{path.name}: the last line is cut off"]
    return tuple(events), notes


def _parse(line: bytes, path: Path) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:  # not JSON, or not UTF-8
        return None
    if not isinstance(event, dict) or not isinstance(event.get("schema"), int):
        return None
    if event["schema"] > SCHEMA:
        reason = f"has schema {event['schema']}, this tpwatch reads up to {SCHEMA}: upgrade tpwatch"
        raise RunDirectoryError(os.fspath(path), reason)
    named = isinstance(event.get("event"), str) and isinstance(event.get("step"), int)
    if not named or (event["event"] == "finding" and parse_finding(event) is None):
        return None
    return event


def _announced(root: Path) -> tuple[str, ...]:
    """Names of all replica groups of the job, where `meta.json` tells."""
    try:
        meta = json.loads((root / "meta.json").read_bytes())
    except (OSError, ValueError):
        return ()
    groups = meta.get("groups", ()) if isinstance(meta, dict) else ()
    return tuple(str(name) for name in groups) if isinstance(groups, list) else ()
