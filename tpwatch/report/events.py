"""Reading the event files of a run directory, whatever state a crash left them in.

Knows the form of the files (`tpwatch.export.jsonl` writes them), not what their numbers come to.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tpwatch.errors import RunDirectoryError, printable
from tpwatch.export.rotation import Part, event_files
from tpwatch.records import SCHEMA, Finding
from tpwatch.report.shape import is_event, is_finding

Event = Mapping[str, Any]
"""One line of an event file, as JSON values."""

LOOKS = 5
"""Times that a directory is read anew because a file was put by meanwhile; that happens once in thousands of checks."""


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
    try:
        contents = _contents(root)
    except OSError as error:
        raise RunDirectoryError(os.fspath(root), f"cannot be read: {error.strerror}") from None
    groups: dict[str, list[Event]] = {}
    notes: list[str] = []
    for part, content in contents:
        events, bad = _parse_file(content, part.path)
        groups.setdefault(printable(part.group), []).extend(events)
        notes += bad
    missing = tuple(name for name in _announced(root) if name not in groups)
    notes += [f"replica group {name} left no event file" for name in missing]
    by_group = {group: tuple(events) for group, events in groups.items()}
    return RunEvents(os.fspath(root), by_group, missing, tuple(notes))


def parse_finding(event: Event) -> Finding | None:
    """The finding in a `finding` event, or None if it is not one this version understands."""
    data = event.get("finding")
    if not isinstance(data, Mapping) or not is_finding(data):
        return None
    # A number that is not finite is written as null; of a spread that means: beyond all bounds.
    measures = {k: float("inf") for k in ("max_abs", "max_rel") if data.get(k, 0.0) is None}
    try:
        return Finding.from_json({**data, **measures})
    except TypeError:  # a key is missing
        return None


def _contents(root: Path) -> list[tuple[Part, bytes]]:
    """Every event file and what is in it.

    Read anew where a file was put by in the meantime: its lines would be missing, or be there twice.
    """
    found: list[tuple[Part, bytes]] = []
    for _ in range(LOOKS):
        before = event_files(root)
        found = [(part, _read(part.path)) for part in before]
        if [part.path for part in event_files(root)] == [part.path for part in before]:
            break
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:  # put by
        return b""


def _parse_file(content: bytes, path: Path) -> tuple[list[Event], list[str]]:
    events: list[Event] = []
    garbage = 0
    lines = content.split(b"\n")
    last = lines.pop()  # empty, unless the writer was killed within a line
    for line in filter(None, lines):
        event = _parse(line, path)
        if event is None:
            garbage += 1
        else:
            events.append(event)
    name = printable(path.name)
    notes = [f"{name}: {garbage} unreadable lines were left out"] if garbage else []
    if last:
        whole = _parse(last, path)
        events += [whole] if whole else []
        notes += [] if whole else [f"{name}: the last line is cut off"]
    return events, notes


def _parse(line: bytes, path: Path) -> Event | None:
    event = _json(line)
    if not isinstance(event, dict) or not isinstance(event.get("schema"), int):
        return None
    if event["schema"] > SCHEMA:
        reason = f"has schema {event['schema']}, this tpwatch reads up to {SCHEMA}: upgrade tpwatch"
        raise RunDirectoryError(os.fspath(path), reason)
    if not is_event(event) or (event["event"] == "finding" and parse_finding(event) is None):
        return None
    return event


def _json(text: bytes) -> object:
    """Strict JSON, or None."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or lists in lists without end
        return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def _announced(root: Path) -> tuple[str, ...]:
    """Names of all replica groups of the job, where `meta.json` tells."""
    try:
        meta = _json((root / "meta.json").read_bytes())
    except OSError:
        return ()
    groups = meta.get("groups", ()) if isinstance(meta, dict) else ()
    return tuple(printable(name) for name in groups if isinstance(name, str)) if isinstance(groups, list) else ()
