"""From the monitor's events to the run directory and, beside it, to every sink that was asked for.

The leader of a replica group writes; another rank only speaks to sinks that have to live there, or stays silent.

Knows the event file, `abort.json` and when the sinks are to be waited for; decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tpwatch.export.fanout import Fanout
from tpwatch.export.jsonl import Events, RunLog, write_abort
from tpwatch.records import Finding, StepReport


class Silent:
    """Recorder of a rank that has nobody to tell."""

    def check(self, report: StepReport) -> None:
        """Write nothing."""

    def finding(self, step: int, finding: Finding) -> None:
        """Write nothing."""

    def status(self, step: int, not_exercised: Sequence[str], unverified: Sequence[str]) -> None:
        """Write nothing."""

    def note(self, step: int, text: str) -> None:
        """Write nothing."""

    def job(self, step: int, view: Mapping[str, object]) -> None:
        """Write nothing."""

    def abort(self, step: int, findings: Sequence[Finding]) -> None:
        """Write nothing."""


class Teller:
    """Recorder of a rank that has sinks and no event file."""

    def __init__(self, events: Events, fanout: Fanout) -> None:
        """`fanout` has the sinks that `events` hands its lines to."""
        self._events = events
        self._fanout = fanout

    def check(self, report: StepReport) -> None:
        """One checked step."""
        self._events.check(report)

    def finding(self, step: int, finding: Finding) -> None:
        """A finding that is new or has changed."""
        self._events.finding(step, finding)

    def status(self, step: int, not_exercised: Sequence[str], unverified: Sequence[str]) -> None:
        """Parameters about which no claim is made."""
        self._events.status(step, not_exercised, unverified)

    def note(self, step: int, text: str) -> None:
        """Anything else worth reading later."""
        self._events.note(step, text)

    def job(self, step: int, view: Mapping[str, object]) -> None:
        """What the job as a whole has found."""
        self._events.job(step, view)

    def abort(self, step: int, findings: Sequence[Finding]) -> None:
        """Say why the run stops, then that it stops: the order a reader after a kill relies on.

        This may be the last chance: a script that the error ends closes nothing. So the sinks are waited for a little.
        """
        try:
            for finding in findings:
                self._events.finding(step, finding)
            self._events.abort(step)
            self._leave_word(step)
        finally:
            self._fanout.flush()

    def _leave_word(self, step: int) -> None:
        """Write what is to be found beside the events."""

    def close(self, findings: Sequence[Finding], step: int) -> None:
        """Say every finding as it stands at the end, and wait a little for the sinks."""
        try:
            for finding in findings:
                self._events.finding(step, finding)
            self._events.end(step)
        finally:
            self.leave()

    def leave(self) -> None:
        """Close the file and the sinks without a last word: the watch never began."""
        try:
            self._events.close()
        finally:
            self._fanout.close()


class Leader(Teller):
    """Recorder of a group leader: event file, `abort.json` and sinks."""

    def __init__(self, log: RunLog, fanout: Fanout, launch_id: str, summarize: Callable[[], None]) -> None:
        """`launch_id` ties an `abort.json` to its launch; `summarize` leaves a `summary.json`, if this rank has to."""
        super().__init__(log, fanout)
        self._directory = log.path.parent
        self._launch_id = launch_id
        self._summarize = summarize

    def abort(self, step: int, findings: Sequence[Finding]) -> None:
        """As a `Teller`, and a summary of what has been written up to now."""
        super().abort(step, findings)
        self._summarize()

    def _leave_word(self, step: int) -> None:
        """For whoever started the run."""
        write_abort(self._directory, step, self._launch_id)
        self._events.flush()
