"""From the monitor's events to the run directory and, beside it, to every sink that was asked for.

Only the leader of a replica group writes; its peers stay silent.

Knows the event file, `abort.json` and when the sinks are to finish; decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from tpwatch.export.fanout import Fanout
from tpwatch.export.jsonl import RunLog, write_abort
from tpwatch.records import Finding, StepReport


class Silent:
    """Recorder of a rank that is not the leader of its group."""

    def check(self, report: StepReport) -> None:
        """Write nothing."""

    def finding(self, step: int, finding: Finding) -> None:
        """Write nothing."""

    def status(self, step: int, not_exercised: Sequence[str], unverified: Sequence[str]) -> None:
        """Write nothing."""

    def note(self, step: int, text: str) -> None:
        """Write nothing."""

    def abort(self, step: int, findings: Sequence[Finding]) -> None:
        """Write nothing."""


class Leader:
    """Recorder of a group leader."""

    def __init__(self, log: RunLog, fanout: Fanout, launch_id: str) -> None:
        """`fanout` has the sinks that `log` hands its lines to; `launch_id` ties an `abort.json` to its launch."""
        self._log = log
        self._fanout = fanout
        self._launch_id = launch_id

    def check(self, report: StepReport) -> None:
        """One checked step."""
        self._log.check(report)

    def finding(self, step: int, finding: Finding) -> None:
        """A finding that is new or has changed."""
        self._log.finding(step, finding)

    def status(self, step: int, not_exercised: Sequence[str], unverified: Sequence[str]) -> None:
        """Parameters about which no claim is made."""
        self._log.status(step, not_exercised, unverified)

    def note(self, step: int, text: str) -> None:
        """Anything else worth reading later."""
        self._log.note(step, text)

    def abort(self, step: int, findings: Sequence[Finding]) -> None:
        """Write down why the run stops, then that it stops.

        The order a reader after a kill relies on.
        """
        for finding in findings:
            self._log.finding(step, finding)
        self._log.abort(step)
        write_abort(self._log.path.parent, step, self._launch_id)

    def close(self, findings: Sequence[Finding], step: int) -> None:
        """Write every finding as it stands at the end, close the file, and wait a little for the sinks."""
        try:
            for finding in findings:
                self._log.finding(step, finding)
            self._log.end(step)
        finally:
            self.leave()

    def leave(self) -> None:
        """Close the file and the sinks without a last word: the watch never began."""
        self._log.close()
        self._fanout.close()
