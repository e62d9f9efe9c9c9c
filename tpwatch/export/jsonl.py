"""The run directory: one file of JSON lines per replica group, and small files replaced whole.

Knows records and files, not torch and not what the numbers mean. Every line stands alone: it has
the schema version, the event, the time and the incarnation (which start of the job wrote it).

    DIR/meta.json                 about the job, written once by rank 0
    DIR/events.<group>.jsonl      written by the leader of one replica group; a restart appends
    DIR/abort.json                present if tpwatch stopped the run
    DIR/summary.json              derived from the event files, which are the truth
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpwatch.config import Config
from tpwatch.records import SCHEMA, Finding, StepReport, Summary, WatchPlan

DURABLE = frozenset({"finding", "abort", "end"})
"""Events that are forced to disk at once: what a crash in the next moment must not take along."""

DIRECTORY_MODE = 0o750
FILE_MODE = 0o640


class RunLog:
    """Appends the events of one replica group; written by the group's leader only.

    A failed write raises `OSError`, and the next line begins on a fresh line, so that at most one
    line is lost.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        group: str,
        incarnation: str,
        tee: Callable[[str], None] | None = None,
    ) -> None:
        """Open `events.<group>.jsonl` for appending; the directory is created if need be.

        `tee` gets every line as well, whether or not it can be written; it must neither wait nor raise.
        """
        self.path = event_file(directory, group)
        self.group = group
        self.incarnation = incarnation
        make_directory(self.path.parent)
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, FILE_MODE)
        self._torn = _ends_torn(self._fd)
        self._tee = tee

    def start(self, plan: WatchPlan, step: int, config: Config, **facts: object) -> None:
        """What is watched, and how; `facts` are `fingerprint` ({name, reason}), `versions`, ..."""
        self._write(
            "start",
            group=plan.group,
            axis=plan.axis,
            ranks=plan.ranks,
            step=step,
            replicas=len(plan.replicas),
            names=[replica.name for replica in plan.replicas],
            not_watched=plan.not_watched,
            config_digest=config.digest(),
            config=config.to_mapping(),
            **facts,
        )

    def check(self, report: StepReport) -> None:
        """One checked step."""
        self._write("check", **report.to_json())

    def finding(self, step: int, finding: Finding) -> None:
        """A finding as it stands at `step`; of one kind and parameter the last line counts."""
        self._write("finding", step=step, finding=finding.to_json())

    def status(self, step: int, not_exercised: Sequence[str], unverified: Sequence[str]) -> None:
        """Parameters about which no claim is made, as it stands at `step`; the last line counts."""
        self._write("status", step=step, not_exercised=not_exercised, unverified=unverified)

    def note(self, step: int, text: str) -> None:
        """Something a reader of the report should know."""
        self._write("note", step=step, text=text)

    def abort(self, step: int) -> None:
        """The run is being stopped at `step` because of what was found."""
        self._write("abort", step=step)

    def end(self, step: int) -> None:
        """The watch ended in order after `step`."""
        self._write("end", step=step)

    def close(self) -> None:
        """Close the file; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _write(self, event: str, **data: object) -> None:
        record = {
            "schema": SCHEMA,
            "event": event,
            "time": time.time(),
            "incarnation": self.incarnation,
            **data,
        }
        encoded = encode(record)
        if self._tee is not None:
            self._tee(encoded)
        line = encoded.encode() + b"\n"
        text = b"\n" + line if self._torn else line
        self._torn = True  # until the whole line is out
        _write_all(self._fd, text)
        self._torn = False
        if event in DURABLE:
            os.fsync(self._fd)


def event_file(directory: str | os.PathLike[str], group: str) -> Path:
    """Path of the event file of a replica group, e.g. `events.tp-0.jsonl`."""
    return Path(directory) / f"events.{group}.jsonl"


def write_meta(directory: str | os.PathLike[str], meta: Mapping[str, Any]) -> Path:
    """Replace `meta.json`. A key `groups` (names of all replica groups) lets a reader miss one."""
    return _replace(Path(directory) / "meta.json", {"schema": SCHEMA, **meta})


def write_abort(directory: str | os.PathLike[str], step: int, launch_id: str) -> Path:
    """Write `abort.json`: at `step` tpwatch stopped the launch with this TPWATCH_LAUNCH_ID."""
    record = {"schema": SCHEMA, "step": step, "launch_id": launch_id, "time": time.time()}
    return _replace(Path(directory) / "abort.json", record)


def write_summary(directory: str | os.PathLike[str], summary: Summary) -> Path:
    """Replace `summary.json`."""
    return _replace(Path(directory) / "summary.json", summary.to_json())


def make_directory(path: Path) -> None:
    """Create a directory, and what is above it, that the user's own group may read."""
    path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)


def encode(value: object, indent: int | None = None) -> str:
    """Strict JSON: a number that is not finite becomes null, which JSON has no word for."""
    return json.dumps(_finite(value), allow_nan=False, indent=indent)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _ends_torn(fd: int) -> bool:
    """True if the last line has no end: its writer was killed within it."""
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"


def _write_all(fd: int, text: bytes) -> None:
    """Write every byte; the kernel may take fewer than asked, on a nearly full disk for one."""
    while text:
        text = text[os.write(fd, text) :]


def _replace(path: Path, record: Mapping[str, Any]) -> Path:
    """Write a JSON file so that a reader sees the old one or the new one, never half of it."""
    make_directory(path.parent)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("w", encoding="utf-8") as file:
        file.write(encode(record, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    return draft.replace(path)
