"""The parts of an event file that has grown too long: their names, their order, and what is left of old ones.

    DIR/events.<group>.jsonl      the live file, always
    DIR/events.<group>.1.jsonl    what was written first, then .2, .3, ...: read in this order, the live file last

The newest `PARTS_KEPT` parts are whole. Out of older ones the `check` lines are taken, and one `thinned` line says
which steps they told of; starts, findings and notes stay for ever. So an event file takes up its findings and
`(PARTS_KEPT + 1) * ROTATE_BYTES`, however long the run.

Knows names, lines and kinds of events, not what they mean.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

ROTATE_BYTES = 16 * 2**20
"""Size from which on a live file is put by: some 30,000 checks."""

PARTS_KEPT = 3
"""Parts that keep their `check` lines."""

THINNED = "thinned"
"""Event in place of the `check` lines of a part: their number (`lines`), how many `steps` they told of, up to which
`step`, and which (`runs` of [first, last, stride]): a neighbouring part, or a restart, may tell of the same step."""

MOST_STEPS = ROTATE_BYTES // 128
"""Steps that the checks of one part may tell of: more than there is room for."""

LAST_COUNTS = frozenset({"status", "job"})
"""Kinds of events of which a reader needs the last one only."""

_NAME = re.compile(r"events\.(?P<group>.+?)(?:\.(?P<number>[0-9]{1,9}))?\.jsonl", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a replica group's events: the live one, or one that was put by."""

    path: Path
    group: str
    number: int | None
    """Of a part, from 1; None for the live file."""
    size: int
    changed: int
    """When it was written last, in nanoseconds."""


def event_file(directory: str | os.PathLike[str], group: str) -> Path:
    """Path of the live event file of a replica group, e.g. `events.tp-0.jsonl`."""
    return Path(directory) / f"events.{group}.jsonl"


def part_file(live: Path, number: int) -> Path:
    """Path of a part, beside its live file."""
    return live.with_name(f"{live.name.removesuffix('.jsonl')}.{number}.jsonl")


def event_files(directory: Path) -> list[Part]:
    """Every event file of a directory: group by group in natural order, each in the order of writing.

    Regular files only: a device or a pipe under such a name may have no end.
    """
    with os.scandir(directory) as entries:
        named = [(Path(entry.path), match) for entry in entries if (match := _NAME.fullmatch(entry.name))]
    found = [_found(path, match["group"], match["number"]) for path, match in named]
    return sorted((file for file in found if file), key=_order)


def next_number(live: Path, group: str) -> int:
    """Number of the part that the live file becomes when it is put by."""
    return 1 + max((file.number or 0 for file in event_files(live.parent) if file.group == group), default=0)


def thinned(lines: Iterable[bytes]) -> list[bytes]:
    """The lines of a part that are kept for ever, below one that says how many steps the others told of."""
    kept: list[bytes] = []
    last: dict[str, int] = {}
    checks: list[dict[str, Any]] = []
    for line in lines:
        event = _event(line)
        kind = event.get("event", "")
        if kind == "check":
            checks.append(event)
            continue
        if kind in LAST_COUNTS:
            if kind in last:
                kept[last[kind]] = b""
            last[kind] = len(kept)
        kept.append(line)
    return [*_mark(checks), *filter(None, kept)]


def _mark(checks: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    """The line in place of `checks`, dated as the last of them; none if there were none."""
    if checks:
        steps = sorted({check["step"] for check in checks if not check.get("skipped")})
        head = {key: checks[-1][key] for key in ("schema", "time", "incarnation", "step") if key in checks[-1]}
        said = {"steps": len(steps), "lines": len(checks), "runs": _runs(steps)}
        yield json.dumps({**head, "event": THINNED, **said}).encode()


def _runs(steps: Iterable[int]) -> list[list[int]]:
    """Ascending steps as [first, last, stride]: one, while the interval between checks is the same."""
    runs: list[list[int]] = []
    for step in steps:
        first, last, stride = runs[-1] if runs else (step, step, 0)
        if runs and (first == last or step - last == stride):
            runs[-1] = [first, step, step - last]
        else:
            runs.append([step, step, 1])
    return runs


def steps_thinned(mark: Mapping[str, Any]) -> set[int]:
    """The steps of a `thinned` event; none where an earlier version wrote it, which said how many only."""
    return {step for first, last, stride in mark.get("runs", ()) for step in range(first, last + 1, stride)}


def _event(line: bytes) -> dict[str, Any]:
    """The event in a line; nothing if that is none."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    is_one = isinstance(event, dict) and isinstance(event.get("event"), str) and isinstance(event.get("step"), int)
    return event if is_one else {}


def _found(path: Path, group: str, number: str | None) -> Part | None:
    try:
        state = path.stat()
    except OSError:  # put by since the directory was read
        return None
    file = Part(path, group, int(number) if number else None, state.st_size, state.st_mtime_ns)
    return file if S_ISREG(state.st_mode) else None


def _order(file: Part) -> tuple[list[tuple[int, str]], bool, int]:
    """Group tp-2 before tp-10; the live file behind its parts."""
    pieces = re.split(r"([0-9]+)", file.group)
    natural = [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in pieces]
    return natural, file.number is None, file.number or 0
