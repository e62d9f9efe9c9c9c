"""The TensorBoard sink: curves of the catalogue's numbers over training steps, and a text for each finding.

Writes event files with TensorBoard's own record writer and protocol buffers. Knows the tensorboard package, which it
imports when it is built, and its own knobs. Never imports TensorFlow: TensorBoard's `EventFileWriter` would where it is
installed, and a monitor must not load a second framework into the trainer's process.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tpwatch.export import catalog
from tpwatch.export.catalog import Metric
from tpwatch.export.jsonl import make_directory
from tpwatch.export.sinks import Place, Told, missing
from tpwatch.export.snapshot import Numbers, Sample

MOST_TEXTS = 256
"""Findings that get a text; the event file of the run directory has them all."""

AXES = frozenset({catalog.START_TIME.name, catalog.LAST_TIME.name, catalog.LAST_STEP.name})
"""No curves: every point has its step and its time. TensorBoard keeps values in 32 bits, where Unix time is good to
two minutes only."""


class TensorBoardSink:
    """Event files of one replica group, in a folder of its own.

    A curve gets a point at a check only where its value has changed, behind one for the last check before the change,
    so that it stays flat in between; and one at the end.

    Raises:
        ConfigError: tensorboard is not installed.
        OSError: the folder cannot be written.
    """

    def __init__(self, place: Place) -> None:
        """Begin an event file; a restart of the run begins another in the same folder."""
        directory = place.config.tensorboard.directory
        folder = Path(directory, place.name) if directory else place.directory / "tensorboard" / place.group
        self._file = _EventFile(folder)
        self._numbers = Numbers(place.group, place.health)
        self._curves: dict[str, _Point] = {}
        """The last point of each curve."""
        self._last = _Moment(0, 0.0)
        self._told = Told()

    def write(self, event: Mapping[str, Any]) -> None:
        """Write the points of a check, or the text of a start or a finding."""
        self._numbers.fold(event)
        now = _Moment(event["step"], event["time"])
        kind = event["event"]
        if kind == "start":
            self._file.restart(now)
            self._file.text(now, "tpwatch/run", _facts(event))
            self._last = now
        elif kind == "check":
            self._points(now, event["phases"])
        elif kind == "finding":
            self._finding(event["finding"], event["time"])

    def close(self) -> None:
        """Draw every curve up to the last check, say how many findings have no text, and close the file."""
        ends = {tag: point.value for tag, point in self._curves.items()} | dict(self._scalars())
        reached = {tag for tag, value in ends.items() if self._curves.get(tag) == _Point(value, self._last.step)}
        self._file.scalars(self._last, {tag: value for tag, value in ends.items() if tag not in reached})
        if len(self._told) > MOST_TEXTS:
            more = f"{len(self._told) - MOST_TEXTS} more are in the event file of the run directory."
            self._file.text(self._last, "tpwatch/finding/more", more)
        self._file.close()

    def _points(self, now: _Moment, phases: Mapping[str, float]) -> None:
        held: dict[str, float] = {}
        changed: dict[str, float] = {}
        durations = ((_tag(catalog.CHECK_DURATION, phase), seconds) for phase, seconds in phases.items())
        for tag, value in (*self._scalars(), *durations):
            last = self._curves.get(tag)
            if last is not None and last.value == value:
                continue
            if last is not None and last.step != self._last.step:
                held[tag] = last.value
            changed[tag] = value
            self._curves[tag] = _Point(value, now.step)
        self._file.scalars(self._last, held)
        self._file.scalars(now, changed)
        self._last = now

    def _scalars(self) -> Iterator[tuple[str, float]]:
        """Every number that one curve can show, by tag; durations come from the event, one for each check."""
        for family in self._numbers.snapshot():
            metric = family.metric
            if metric.type in ("counter", "gauge") and metric.name not in AXES:
                yield from ((_tag(metric, *_labels(metric, sample)), sample.value) for sample in family.samples)

    def _finding(self, found: Mapping[str, Any], at: float) -> None:
        """Tell a finding when it is new or has become more severe."""
        if self._told.is_news(found) and len(self._told) <= MOST_TEXTS:
            tag = f"tpwatch/finding/{found['kind']}/{found['parameter']}"
            self._file.text(_Moment(found["first_step"], at), tag, _words(found))


class _Moment(NamedTuple):
    step: int
    time: float
    """Unix time in seconds."""


class _Point(NamedTuple):
    value: float
    step: int


class _EventFile:
    """One event file; readers see whole records only."""

    def __init__(self, folder: Path) -> None:
        self._protocol = _protocol()
        make_directory(folder)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        # Without a buffer: a killed process loses nothing, and a forked one has nothing to write a second time.
        self._records = self._protocol.RecordWriter((folder / name).open("xb", buffering=0))
        self._add(_Moment(0, time.time()), file_version="brain.Event:2")

    def restart(self, now: _Moment) -> None:
        """Readers forget what an earlier start of the run wrote about later steps, which are trained again."""
        log = self._protocol.SessionLog(status=self._protocol.SessionLog.START)
        self._add(_Moment(now.step + 1, now.time), session_log=log)

    def scalars(self, now: _Moment, values: Mapping[str, float]) -> None:
        if values:
            value = self._protocol.Summary.Value
            points = [value(tag=tag, simple_value=number) for tag, number in values.items()]
            self._add(now, summary=self._protocol.Summary(value=points))

    def text(self, now: _Moment, tag: str, markdown: str) -> None:
        plugin = self._protocol.SummaryMetadata.PluginData(plugin_name="text")
        tensor = self._protocol.TensorProto(dtype=self._protocol.DT_STRING, string_val=[markdown.encode()])
        metadata = self._protocol.SummaryMetadata(plugin_data=plugin)
        value = self._protocol.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
        self._add(now, summary=self._protocol.Summary(value=[value]))

    def close(self) -> None:
        self._records.close()

    def _add(self, now: _Moment, **what: object) -> None:
        event = self._protocol.Event(step=now.step, wall_time=now.time, **what)
        self._records.write(event.SerializeToString())


class _Protocol(NamedTuple):
    """What is used of the tensorboard package."""

    RecordWriter: Any
    Event: Any
    SessionLog: Any
    Summary: Any
    SummaryMetadata: Any
    TensorProto: Any
    DT_STRING: Any


def _protocol() -> _Protocol:
    try:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError:
        raise missing(package="tensorboard", extra="tensorboard") from None
    return _Protocol(RecordWriter, Event, SessionLog, Summary, SummaryMetadata, TensorProto, DT_STRING)


def _tag(metric: Metric, *labels: str) -> str:
    """E.g. `tpwatch/differing_replicas/grad_post`; the group is the folder."""
    return "/".join(("tpwatch", metric.name.removeprefix("tpwatch_"), *labels))


def _labels(metric: Metric, sample: Sample) -> tuple[str, ...]:
    return tuple(label for name, label in zip(metric.labels, sample.labels, strict=True) if name != "group")


def _facts(event: Mapping[str, Any]) -> str:
    """Who watches what, as a table in Markdown."""
    facts = {
        "replica group": f"{event['group']}, ranks {event['ranks']}",
        "replicas watched": event["replicas"],
        **event.get("versions", {}),
        "fingerprint": event.get("fingerprint", {}).get("name", ""),
        "configuration": event["config_digest"],
    }
    return "\n".join(("| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())))


def _words(found: Mapping[str, Any]) -> str:
    """A finding in Markdown."""
    cause = f", follows from `{found['caused_by']}`" if found["caused_by"] else ""
    difference = "not finite" if found["max_abs"] is None else f"{found['max_abs']:.3g}"
    lines = (
        f"**{found['kind']}** of `{found['parameter']}` since step {found['first_step']}",
        f"({found['code']}, {found['severity']}{cause})",
        "",
        f"- observed: {found['observed']}",
        f"- expected: {found['expected']}",
        f"- largest difference between copies: {difference}",
        f"- advice: {found['advice']}",
    )
    return "\n".join(lines)
