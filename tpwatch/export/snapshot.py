"""From events to the numbers of the catalogue: what an exporter renders when it is asked.

Knows the form of events and the catalogue, not any exposition format. Events come in on one thread, snapshots go out
on another; the training thread takes no part in either.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tpwatch.errors import printable
from tpwatch.export import catalog
from tpwatch.export.catalog import MOST_LABEL_SETS, OTHER, Metric
from tpwatch.export.sinks import Health
from tpwatch.records import KINDS, Finding

EXEMPLAR_CHARACTERS = 128
"""OpenMetrics: label names and values of one exemplar together, at most."""


@dataclass(frozen=True, slots=True)
class Exemplar:
    """One event behind a count: what labels must not carry."""

    labels: Mapping[str, str]
    value: float
    time: float
    """Unix time in seconds."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket of a histogram, cumulative."""

    bound: float
    count: int
    exemplar: Exemplar | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """The value of one metric for one set of labels."""

    labels: tuple[str, ...]
    """Values in the order of `Metric.labels`."""
    value: float
    """Of a histogram the sum of what was observed."""
    exemplar: Exemplar | None = None
    buckets: tuple[Bucket, ...] = ()
    """Of a histogram; the last bound is infinite."""


@dataclass(frozen=True, slots=True)
class Family:
    """One metric with all its samples."""

    metric: Metric
    samples: tuple[Sample, ...]


@dataclass(slots=True)
class _Cell:
    value: float = 0.0
    exemplar: Exemplar | None = None
    counts: list[int] = field(default_factory=list)
    exemplars: list[Exemplar | None] = field(default_factory=list)


class Series:
    """The samples of one metric; beyond `cap` label sets everything is booked under `OTHER`, and counted."""

    def __init__(self, metric: Metric, cap: int = MOST_LABEL_SETS) -> None:
        """Start empty."""
        self.metric = metric
        self.dropped = 0
        self._cap = cap
        self._cells: dict[tuple[str, ...], _Cell] = {}

    def set(self, value: float, *labels: str) -> None:
        """Set a gauge."""
        self._cell(labels).value = value

    def raise_to(self, value: float, *labels: str) -> None:
        """Set a gauge unless it is higher already."""
        cell = self._cell(labels)
        cell.value = max(cell.value, value)

    def add(self, amount: float, *labels: str, exemplar: Exemplar | None = None) -> None:
        """Add to a counter."""
        cell = self._cell(labels)
        cell.value += amount
        cell.exemplar = exemplar or cell.exemplar

    def observe(self, exemplar: Exemplar, *labels: str) -> None:
        """Take the exemplar's value into a histogram."""
        cell, bounds = self._cell(labels), self.metric.buckets
        if not cell.counts:
            cell.counts, cell.exemplars = [0] * (len(bounds) + 1), [None] * (len(bounds) + 1)
        at = next((i for i, bound in enumerate(bounds) if exemplar.value <= bound), len(bounds))
        cell.counts[at] += 1
        cell.exemplars[at] = exemplar
        cell.value += exemplar.value

    def samples(self) -> tuple[Sample, ...]:
        """A copy of all samples as they stand."""
        return tuple(Sample(labels, c.value, c.exemplar, self._buckets(c)) for labels, c in self._cells.items())

    def _buckets(self, cell: _Cell) -> tuple[Bucket, ...]:
        bounds, total, found = (*self.metric.buckets, math.inf), 0, []
        for bound, count, exemplar in zip(bounds, cell.counts, cell.exemplars, strict=False):
            total += count
            found.append(Bucket(bound, total, exemplar))
        return tuple(found)

    def _cell(self, labels: tuple[str, ...]) -> _Cell:
        cell = self._cells.get(labels)
        if cell is None and len(self._cells) >= self._cap:
            self.dropped += 1
            named = zip(self.metric.labels, labels, strict=True)
            labels = tuple(value if name == "group" else OTHER for name, value in named)
        return self._cells.setdefault(labels, _Cell()) if cell is None else cell


class Numbers:
    """The metrics of one replica group, folded from its events."""

    def __init__(self, group: str, health: Health) -> None:
        """Before the first event there is only what the sinks have lost."""
        self._group = group
        self._health = health
        self._lock = threading.Lock()
        self._series = {metric.name: Series(metric) for metric in catalog.METRICS}
        self._counted: dict[tuple[str, str], bool] = {}
        """Findings met so far, and whether they made the run faulty."""
        self._faulty: dict[str, int] = {}
        """Parameters with a confirmed fault that holds, by `kind@point`."""
        self._first: dict[str, int] = {}
        self._fold: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
            "start": self._start,
            "check": self._check,
            "finding": self._finding,
            "status": self._status,
            "abort": self._abort,
            "end": self._end,
        }

    def fold(self, event: Mapping[str, Any]) -> None:
        """Take in one event; of a kind that moves no number, nothing happens."""
        fold = self._fold.get(event["event"])
        if fold is not None:
            with self._lock:
                fold(event)

    def snapshot(self) -> tuple[Family, ...]:
        """Every metric that has a sample, in the order of the catalogue."""
        with self._lock:
            self._losses()
            families = (Family(series.metric, series.samples()) for series in self._series.values())
            return tuple(family for family in families if family.samples)

    def samples(self, metric: Metric) -> tuple[Sample, ...]:
        """A copy of the samples of one metric as they stand."""
        with self._lock:
            self._losses()
            return self._of(metric).samples()

    def _of(self, metric: Metric) -> Series:
        return self._series[metric.name]

    def _set(self, metric: Metric, value: float, *labels: str) -> None:
        self._of(metric).set(value, self._group, *labels)

    # ------------------------------------------------------------------------------------- events

    def _start(self, event: Mapping[str, Any]) -> None:
        versions = dict(event.get("versions", {}))
        framework = [f"{k} {v}" for k, v in versions.items() if k not in ("tpwatch", "torch", "python")]
        facts = (
            str(event.get("stage", "")), versions.get("tpwatch", ""), versions.get("torch", ""), ", ".join(framework),
            event.get("fingerprint", {}).get("name", ""), str(len(event["ranks"])), event["config_digest"],
        )  # fmt: skip
        self._set(catalog.BUILD_INFO, 1.0, *facts)
        self._set(catalog.START_TIME, event["time"])
        self._set(catalog.REPLICAS, event["replicas"])
        self._set(catalog.WATCHING, float(event["replicas"] > 0 and len(event["ranks"]) > 1))
        # Zeros from the beginning: a series that appears only with the fault has no `before` to compare with.
        self._of(catalog.ABORTS).add(0.0, self._group)
        for kind in KINDS:
            self._set(catalog.DRIFT_ACTIVE, 0.0, kind)

    def _check(self, event: Mapping[str, Any]) -> None:
        group, step = self._group, {"step": str(event["step"])}
        result = "skipped" if event["skipped"] else "findings" if event["active"] else "clean"
        self._of(catalog.CHECKS).add(1.0, group, result)
        self._set(catalog.LAST_STEP, event["step"])
        self._set(catalog.LAST_TIME, event["time"])
        for phase, seconds in event["phases"].items():
            self._of(catalog.CHECK_DURATION).observe(Exemplar(step, seconds, event["time"]), group, phase)
        self._of(catalog.COLLECTIVES).add(event["collectives"], group, "watch")
        self._of(catalog.COLLECTIVES).add(event["deep_collectives"], group, "explain")
        self._of(catalog.BYTES).add(event["bytes_exchanged"], group)
        for point, count in event["differing"].items():
            self._set(catalog.DIFFERING, count, point)
        self._spread(event)
        self._hold(event["faults"])

    def _hold(self, faulty: Mapping[str, int]) -> None:
        """What holds now, by kind and point; what has held goes back to zero, so that alerts resolve."""
        self._faulty = dict.fromkeys(self._faulty, 0) | dict(faulty)
        kinds: Counter[str] = Counter()
        for label, count in self._faulty.items():
            kind, point = label.split("@", 1)
            self._set(catalog.FAULTY, count, kind, point)
            kinds[kind] += count
        for kind, count in kinds.items():
            self._set(catalog.DRIFT_ACTIVE, float(count > 0), kind)

    def _spread(self, event: Mapping[str, Any]) -> None:
        """What was not measured at this check keeps its value: most checks gather nothing."""
        if event["max_abs"] != 0.0 or not event["differing"].get("param"):
            self._set(catalog.SPREAD_ABS, number(event["max_abs"]))
            self._set(catalog.SPREAD_REL, number(event["max_rel"]))
        if event["ratio_lo"] is not None:
            self._set(catalog.RATIO_MIN, event["ratio_lo"])
            self._set(catalog.RATIO_MAX, number(event["ratio_hi"]))

    def _finding(self, event: Mapping[str, Any]) -> None:
        finding = Finding.from_json(event["finding"])
        counted = self._counted.get(finding.key)
        self._counted[finding.key] = bool(counted) or finding.counts
        if counted is None:
            labels = (self._group, finding.kind, finding.point, finding.role)
            exemplar = Exemplar(_exemplar_labels(finding), 1.0, event["time"])
            self._of(catalog.FINDINGS).add(1.0, *labels, exemplar=exemplar)
        if finding.counts and not counted:
            label = f"{finding.kind}@{finding.point}"
            self._hold({**self._faulty, label: self._faulty.get(label, 0) + 1})
            first = min(finding.first_step, self._first.get(finding.kind, finding.first_step))
            self._first[finding.kind] = first
            self._set(catalog.FIRST_STEP, first, finding.kind)
        self._of(catalog.MAX_ABS).raise_to(number(finding.max_abs), self._group, finding.kind)
        self._of(catalog.MAX_REL).raise_to(number(finding.max_rel), self._group, finding.kind)

    def _status(self, event: Mapping[str, Any]) -> None:
        self._set(catalog.NOT_EXERCISED, len(event["not_exercised"]))
        self._set(catalog.UNVERIFIED, len(event["unverified"]))

    def _abort(self, _event: Mapping[str, Any]) -> None:
        self._of(catalog.ABORTS).add(1.0, self._group)
        self._set(catalog.WATCHING, 0.0)

    def _end(self, _event: Mapping[str, Any]) -> None:
        self._set(catalog.WATCHING, 0.0)

    def _losses(self) -> None:
        for name, loss in self._health.losses.items():
            self._set(catalog.EXPORTER_ERRORS, loss.errors, name)
            self._set(catalog.EXPORTER_DROPPED, loss.dropped, name)
        self._set(catalog.DROPPED_LABELS, sum(series.dropped for series in self._series.values()))


def number(value: object) -> float:
    """A measure as written; null stands for a number that was not finite."""
    return float(value) if isinstance(value, (int, float)) else math.inf


def _exemplar_labels(finding: Finding) -> Mapping[str, str]:
    """Step and parameter; of a long name the end, which tells parameters apart."""
    step = str(finding.first_step)
    room = EXEMPLAR_CHARACTERS - len("step") - len(step) - len("parameter")
    # Escaped, for half a character has no encoding, and would cost the whole page of metrics.
    return {"step": step, "parameter": _tail(printable(finding.parameter), room)}


def _tail(text: str, most: int) -> str:
    return text if len(text) <= most else "..." + text[len(text) - most + 3 :]
