"""Writing down what happens: every event of a monitor goes through here, whole and in order.

A full disk or a broken recorder costs events, never the run; the lookout's thread may write between two events of the
training thread. Knows events and the guard, not what is in them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from tpwatch._guard import Guard
from tpwatch.diagnose import Diagnosis
from tpwatch.parts import Recorder
from tpwatch.records import Finding, StepReport


class Ledger:
    """The recorder of one monitor, behind the guard and a lock."""

    def __init__(self, recorder: Recorder, guard: Guard) -> None:
        """Nothing is written yet."""
        self._recorder = recorder
        self.guard = guard
        self._lock = threading.Lock()
        self._status: tuple[Sequence[str], Sequence[str]] = ((), ())

    def check(self, report: StepReport) -> None:
        """One checked step."""
        self._write(lambda: self._recorder.check(report))

    def finding(self, step: int, finding: Finding) -> None:
        """A finding that is new or has changed."""
        self._write(lambda: self._recorder.finding(step, finding))

    def note(self, step: int, text: str) -> None:
        """Anything else worth reading later."""
        self._write(lambda: self._recorder.note(step, text))

    def job(self, step: int, view: Mapping[str, object]) -> None:
        """What the job as a whole has found."""
        self._write(lambda: self._recorder.job(step, view))

    def abort(self, step: int, findings: Sequence[Finding]) -> None:
        """The run is about to be stopped."""
        self._write(lambda: self._recorder.abort(step, findings))

    def status(self, step: int, diagnosis: Diagnosis) -> None:
        """Parameters about which no claim is made, where that has changed."""
        status = (diagnosis.not_exercised, diagnosis.unverified)
        if status != self._status:
            self._status = status
            self._write(lambda: self._recorder.status(step, *status))

    def _write(self, event: Callable[[], None]) -> None:
        with self._lock:
            self.guard.attempt("recording", event)
