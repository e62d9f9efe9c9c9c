"""Runs of Weights & Biases on this machine alone, and what was recorded in them."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.export._servers import wait_until

BLOCK = 32768
FULL, LAST = 1, 4
HEAD = 7
"""Bytes in front of the whole file, and of each part of a record."""


@dataclass
class Recorded:
    """What a run left behind."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    """History, in order; `_step` is the row's own step."""
    alerts: list[tuple[str, str, str]] = field(default_factory=list)
    """Title, text and level of each."""
    step_metrics: dict[str, str] = field(default_factory=dict)
    """Pattern of a metric -> the metric that its charts have as horizontal axis."""
    folder: Path = Path()

    def column(self, name: str) -> list[Any]:
        """The values of one column in the rows that have it."""
        return [row[name] for row in self.rows if name in row]

    def table(self, name: str) -> list[dict[str, Any]]:
        """The last table that was logged under a name, as rows by column."""
        path = self.folder / "files" / self.column(name)[-1]["path"]
        table = json.loads(path.read_text())
        return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]


def recorded(directory: Path) -> Recorded:
    """Read the one run below a directory back from its file of records.

    W&B writes that file in a process of its own, which may be a moment behind the end of the run.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = directory.glob("wandb/offline-run-*/run-*.wandb")

    def whole() -> list[Any]:
        records = [Record.FromString(data) for data in _records(path.read_bytes())]
        return records if any(record.HasField("exit") for record in records) else []

    found = Recorded(folder=path.parent)
    for record in wait_until(whole, "the end of the run", time.monotonic() + 10):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            found.rows.append({**_row(record.history.item), "_step": record.history.step.num})
        elif kind == "alert":
            found.alerts.append((record.alert.title, record.alert.text, record.alert.level))
        elif kind == "metric":
            found.step_metrics[record.metric.glob_name or record.metric.name] = record.metric.step_metric
    return found


def _row(items: Iterable[Any]) -> dict[str, Any]:
    """Values by column; of a table, a mapping of what is known about it."""
    row: dict[str, Any] = {}
    for item in items:
        name, *part = item.nested_key or [item.key]
        into, key = (row.setdefault(name, {}), part[0]) if part else (row, name)
        into[key] = json.loads(item.value_json)
    return row


def _records(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, behind its head: blocks of 32 KiB, long records in several parts."""
    at, parts = HEAD, b""
    while at + HEAD <= len(data):
        if BLOCK - at % BLOCK < HEAD:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        at += HEAD + length
        parts += data[at - length : at]
        if kind in (FULL, LAST) and at <= len(data):
            yield parts
            parts = b""
