"""The run directory: one file of JSON lines per replica group, and small files replaced whole.

Knows records and files, not torch and not what the numbers mean. Every line stands alone: it has
the schema version, the event, the time and the incarnation (which start of the job wrote it).

    DIR/meta.json                 about the job, written once by rank 0
    DIR/events.<group>.jsonl      written by the leader of one replica group; a restart appends
    DIR/events.<group>.N.jsonl    earlier parts of it (`rotation`)
    DIR/abort.json                present if tpwatch stopped the run
    DIR/summary.json              derived from the event files, which are the truth
"""

from __future__ import annotations

import datetime as dt
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tpwatch.config import Config
from tpwatch.export.eventfile import EventFile, make_directory, replace_file
from tpwatch.export.rotation import ROTATE_BYTES, event_file
from tpwatch.export.scribe import LEISURE, Scribe, in_time
from tpwatch.records import SCHEMA, Finding, StepReport, Summary, WatchPlan

__all__ = [
    "Events",
    "RunLog",
    "encode",
    "event_file",
    "make_directory",
    "run_directory",
    "write_abort",
    "write_annotation",
    "write_meta",
    "write_summary",
]


def run_directory(out: str | None) -> str:
    """The run directory that `out` means to this process, or one of its own where that is empty; absolute.

    Rank 0's holds for the job: others may be in other directories, and any may change to another later.
    """
    stamp = dt.datetime.now(tz=dt.timezone.utc).strftime("%Y%m%d-%H%M%S")
    return os.path.abspath(out or f"tpwatch-runs/{stamp}-{os.getpid()}")  # noqa: PTH100 - links stay as they are


class Events:
    """The events of one replica group as lines of JSON; `put` gets each, and its kind."""

    def __init__(self, incarnation: str, put: Callable[[str, str], None]) -> None:
        """`incarnation` says which start of the job speaks."""
        self.incarnation = incarnation
        self._put = put

    def start(self, plan: WatchPlan, step: int, config: Config, **facts: object) -> None:
        """What is watched, and how; `facts` are `fingerprint` ({name, reason}), `versions`, ..."""
        self._say(
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
        self._say("check", **report.to_json())

    def finding(self, step: int, finding: Finding) -> None:
        """A finding as it stands at `step`; of one kind and parameter the last line counts."""
        self._say("finding", step=step, finding=finding.to_json())

    def status(self, step: int, not_exercised: Sequence[str], unverified: Sequence[str]) -> None:
        """Parameters about which no claim is made, as it stands at `step`; the last line counts."""
        self._say("status", step=step, not_exercised=not_exercised, unverified=unverified)

    def note(self, step: int, text: str) -> None:
        """Something a reader of the report should know."""
        self._say("note", step=step, text=text)

    def job(self, step: int, view: Mapping[str, object]) -> None:
        """What all replica groups of the job together have found up to `step`, where it has changed."""
        self._say("job", step=step, **view)

    def abort(self, step: int) -> None:
        """The run is being stopped at `step` because of what was found."""
        self._say("abort", step=step)

    def end(self, step: int) -> None:
        """The watch ended in order after `step`."""
        self._say("end", step=step)

    def flush(self) -> None:
        """Wait a little for what has been said to be where it belongs."""

    def close(self) -> None:
        """Nothing more will be said; idempotent."""

    def _say(self, event: str, **data: object) -> None:
        head = {"schema": SCHEMA, "event": event, "time": time.time(), "incarnation": self.incarnation}
        self._put(event, encode({**head, **data}))


class RunLog(Events):
    """Appends the events of one replica group to its file; held by the group's leader only.

    A line that cannot be written is no error of the run's: a note tells how many there were, once there is room again.
    A file system that does not answer holds up nothing for long (`scribe`).
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        group: str,
        incarnation: str,
        tee: Callable[[str], None] | None = None,
        rotate_bytes: int = ROTATE_BYTES,
    ) -> None:
        """Open `events.<group>.jsonl` for appending; the directory is created if need be.

        `tee` gets every line as well, whether or not it can be written; it must neither wait nor raise. A file that
        would grow beyond `rotate_bytes` is put by as a part, and a new one begun.

        Raises:
            OSError: it cannot be opened, or not in time.
        """
        super().__init__(incarnation, self._append)
        self.group = group
        self._file = in_time(partial(EventFile, directory, group, rotate_bytes, self._confess), LEISURE)
        self._scribe = Scribe(self._file)
        self._tee = tee

    @property
    def path(self) -> Path:
        """The live event file."""
        return self._file.path

    @property
    def lost(self) -> int:
        """Events that could not be written and never will be."""
        return self._scribe.lost

    def flush(self) -> None:
        """Wait a little for the last line to be in the file."""
        self._scribe.flush()

    def close(self) -> None:
        """Close the file, or leave that behind if it takes too long; idempotent."""
        self._scribe.close()

    def _append(self, event: str, encoded: str) -> None:
        if self._tee is not None:
            self._tee(encoded)
        self._scribe.put(event, encoded)

    def _confess(self, lost: int, beside: str) -> str:
        """A note of how many events were lost, dated as the one beside it."""
        head = {key: value for key, value in json.loads(beside).items() if key in {"schema", "time", "step"}}
        text = f"{self.path.name}: {lost} events could not be written"
        return encode({**head, "event": "note", "incarnation": self.incarnation, "text": text})


def write_meta(directory: str | os.PathLike[str], meta: Mapping[str, Any]) -> Path:
    """Replace `meta.json`. A key `groups` (names of all replica groups) lets a reader miss one."""
    return _replace(Path(directory) / "meta.json", {"schema": SCHEMA, **meta})


def write_abort(directory: str | os.PathLike[str], step: int, launch_id: str) -> Path:
    """Write `abort.json`: at `step` tpwatch stopped the launch with this TPWATCH_LAUNCH_ID."""
    record = {"schema": SCHEMA, "step": step, "launch_id": launch_id, "time": time.time()}
    return _replace(Path(directory) / "abort.json", record)


def write_annotation(
    directory: Path, group: str, step: int, differing: Mapping[str, Sequence[str]], findings: Sequence[Finding]
) -> Path:
    """Write `tpwatch.<group>.json` into a checkpoint: which copies differed as it was saved, and what was known."""
    record = {
        "schema": SCHEMA,
        "group": group,
        "step": step,
        "verdict": "copies differ" if differing else "copies agree",
        "differing": dict(differing),
        "findings": [finding.to_json() for finding in findings],
    }
    return _replace(directory / f"tpwatch.{group}.json", record)


def write_summary(directory: str | os.PathLike[str], summary: Summary) -> Path:
    """Replace `summary.json`."""
    return _replace(Path(directory) / "summary.json", summary.to_json())


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


def _replace(path: Path, record: Mapping[str, Any]) -> Path:
    """Raises OSError if it fails, or takes too long."""
    text = (encode(record, indent=2) + "\n").encode()
    return in_time(partial(replace_file, path, text), LEISURE)
