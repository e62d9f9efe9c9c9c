"""The Weights & Biases sink: scalars, a table of findings and alerts in the run that the trainer has open.

The trainer's rows stay its own. Every log is `commit=False`, against a step metric of its own: it rides on the row that
the trainer has open or begins next, and what then is left W&B writes by itself when the run is finished. A row with a
step, or one committed here, could make the trainer's next row come too late, and W&B drops those.

Knows the form of events and W&B's run object. Starts and finishes no run, and imports nothing: where there is a run,
the trainer has imported W&B.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from tpwatch._guard import say
from tpwatch.export.sinks import LEVELS, Place, missing
from tpwatch.export.snapshot import number
from tpwatch.records import SEVERITIES, Finding

STEP = "tpwatch/step"
SCALARS = "tpwatch/scalar"
"""Scalars have a prefix of their own: `tpwatch/*` would catch the parts of the table too."""
TABLE = "tpwatch/findings"

COLUMNS = (
    "kind", "code", "parameter", "group", "ranks", "first_step", "last_step", "severity", "role", "ratio", "max_abs",
    "advice",
)  # fmt: skip
MOST_ROWS = 200
MOST_ALERTS = 20

SPACING = 0.1
"""Seconds between two logs of nothing but checks: they come in bursts, and of a burst only the last would be kept."""


@dataclass(frozen=True, slots=True)
class _Alert:
    title: str
    text: str
    level: str


class WandbSink:
    """What one replica group and the job as a whole found, in the trainer's run.

    Until there is a run the latest numbers and all findings are kept for it.

    Raises:
        ConfigError: wandb is not installed.
    """

    def __init__(self, place: Place) -> None:
        """Nothing is known yet."""
        _require_wandb()
        self._place = place
        self._run: Any = None
        self._over = False
        self._step = 0
        self._scalars: dict[str, float] = {}
        self._findings: dict[tuple[str, str], Finding] = {}
        self._alerted: set[object] = set()
        self._alerts: list[_Alert] = []
        self._scalars_due = self._table_due = False
        self._logged = -math.inf
        self._fold: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
            "check": self._check,
            "finding": self._finding,
            "job": self._job,
        }

    def write(self, event: Mapping[str, Any]) -> None:
        """Fold in one event and, if there is a run, log what it changed."""
        self._step = event["step"]
        fold = self._fold.get(event["event"])
        if fold is not None:
            fold(event)
        # Findings come in rows, and a table of them goes into one log; their alerts wait for nothing.
        wait = event["event"] == "finding" or (
            event["event"] == "check" and not self._table_due and time.monotonic() - self._logged < SPACING
        )
        self._tell(log=not wait)

    def close(self) -> None:
        """Log what is left, to be written when the run is finished; without a run, say so."""
        self._tell(log=True)
        if self._run is None:
            text = "tpwatch: nothing went to Weights & Biases: no run was open in the process of rank %d (wandb.rank)"
            say(logging.WARNING, text, self._place.rank)
        elif self._scalars_due or self._table_due or self._alerts:
            say(logging.INFO, "tpwatch: the run of Weights & Biases was finished first; the event file has the rest")

    # --------------------------------------------------------------------------------------- events

    def _check(self, event: Mapping[str, Any]) -> None:
        self._scalars["check_seconds"] = event["seconds"]
        for point, count in event["differing"].items():
            self._scalars[f"differing_{point}"] = count
        if event["ratio_lo"] is not None:
            self._scalars["ratio_lo"] = event["ratio_lo"]
            self._scalars["ratio_hi"] = number(event["ratio_hi"])
        self._scalars_due = True

    def _finding(self, event: Mapping[str, Any]) -> None:
        finding = Finding.from_json(event["finding"])
        if self._findings.get(finding.key) != finding:
            self._findings[finding.key] = finding
            self._table_due = True
        if finding.counts:
            title = f"tpwatch: {finding.kind} of {finding.parameter}"
            seen = f"{finding.code} since step {finding.first_step} on ranks {_words(finding.ranks)}"
            self._raise(finding.key, title, f"{seen}. {finding.advice}", LEVELS[finding.severity])

    def _job(self, event: Mapping[str, Any]) -> None:
        counts: Mapping[str, int] = event["counts"]
        self._scalars["faults"] = sum(counts.values())
        for kind, count in counts.items():
            self._scalars[f"faults_{kind.replace('-', '_')}"] = count
        self._scalars["worst_ratio"] = number(event["ratio"])
        self._scalars["worst_max_abs"] = number(event["max_abs"])
        self._scalars_due = True
        own = {finding.kind for finding in self._findings.values() if finding.counts}
        for kind in counts.keys() - own:
            where = f"Not in {self._place.group}, whose findings are here: tpwatch report {self._place.directory}"
            # How severe only the other group knows: a fault that counts, in any case.
            self._raise(kind, f"tpwatch: {kind} in another replica group", where, LEVELS["error"])

    def _raise(self, key: object, title: str, text: str, level: str) -> None:
        """Ask for an alert about what none was asked for yet."""
        if key in self._alerted or not self._place.config.wandb.alerts:
            return
        self._alerted.add(key)
        if len(self._alerted) <= MOST_ALERTS:
            self._alerts.append(_Alert(title, text, level))
        elif len(self._alerted) == MOST_ALERTS + 1:
            where = f"This run has had {MOST_ALERTS}; further faults: tpwatch report {self._place.directory}"
            self._alerts.append(_Alert("tpwatch: no more alerts", where, level))

    # ---------------------------------------------------------------------------------------- the run

    def _tell(self, *, log: bool) -> None:
        """Send alerts that wait and, if asked to, log what is due; nothing happens without a run."""
        module = sys.modules.get("wandb")
        run = getattr(module, "run", None)
        if module is None or run is None or (run is self._run and self._over):
            return
        try:
            if run is not self._run:
                self._adopt(run)
            self._send(run)
            if log and (self._scalars_due or self._table_due):
                self._log(module, run)
        except module.errors.UsageError:
            # How W&B refuses a run that is finished: the trainer was faster, which is its right.
            self._over = True

    def _adopt(self, run: Any) -> None:  # noqa: ANN401 - of a package that is not imported here
        run.define_metric(STEP, hidden=True)
        run.define_metric(f"{SCALARS}/*", step_metric=STEP)
        self._run, self._over = run, False
        self._scalars_due, self._table_due = bool(self._scalars), bool(self._findings)

    def _send(self, run: Any) -> None:  # noqa: ANN401 - as above
        while self._alerts:
            alert = self._alerts.pop(0)
            run.alert(title=alert.title, text=alert.text, level=alert.level, wait_duration=0)

    def _log(self, module: Any, run: Any) -> None:  # noqa: ANN401 - as above
        faulty = len({finding.parameter for finding in self._findings.values() if finding.counts})
        scalars = {**self._scalars, "faulty_parameters": faulty}
        row: dict[str, Any] = {f"{SCALARS}/{name}": value for name, value in scalars.items()}
        if self._table_due:
            row[TABLE] = module.Table(columns=list(COLUMNS), data=self._rows())
        run.log({**row, STEP: self._step}, commit=False)
        self._scalars_due = self._table_due = False
        self._logged = time.monotonic()

    def _rows(self) -> list[list[Any]]:
        """The first `MOST_ROWS` findings: causes, then the severe, then the early."""

        def order(finding: Finding) -> tuple[object, ...]:
            return (finding.role != "cause", -SEVERITIES.index(finding.severity), finding.first_step, finding.parameter)

        return [self._row(finding) for finding in sorted(self._findings.values(), key=order)[:MOST_ROWS]]

    def _row(self, finding: Finding) -> list[Any]:
        own = {"group": self._place.group, "ranks": _words(finding.ranks)}
        return [own[column] if column in own else getattr(finding, column) for column in COLUMNS]


def _require_wandb() -> None:
    # Not by importing it, which takes half a second, nor by a search of the path, on which W&B's own output may be.
    try:
        metadata.version("wandb")
    except metadata.PackageNotFoundError:
        raise missing(package="wandb", extra="wandb") from None


def _words(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))
