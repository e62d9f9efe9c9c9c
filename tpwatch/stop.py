"""Stopping: all ranks of the job learn whether one of them wants to, and stop together, before the update.

Whether there is a meeting depends on configuration and step number alone: a rank whose own monitor is off still comes,
for its peers do. Knows policy and findings; the vector itself is `job`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from tpwatch._guard import Guard
from tpwatch.act import wants_checkpoint
from tpwatch.config import Config
from tpwatch.errors import ReplicaFault
from tpwatch.job import Job, JobView, Word
from tpwatch.monitor import Monitor
from tpwatch.records import Finding

SILENCE = Word(stop=False, save=False, counts={}, ratio=0.0, max_abs=0.0)
"""What a rank says that could not work out its word: it comes to the meeting all the same."""


class Stop:
    """The policy of one rank towards the whole job."""

    def __init__(self, job: Job, monitor: Monitor, config: Config, guard: Guard) -> None:
        """Nothing has been said yet."""
        self._job = job
        self._monitor = monitor
        self._config = config
        self._guard = guard
        self.view: JobView | None = None
        """What the job said last."""
        self._told: Mapping[str, object] = {}
        self.saves: list[Callable[[int], None]] = []
        """Called with the step before a stop that asks for a checkpoint."""
        self.saving = False
        """True while they are called: that checkpoint is wanted with whatever was found."""

    def meet(self, step: int) -> None:
        """Meet the other ranks if this step is checked. A collective over all ranks of the job.

        Raises:
            ReplicaFault: some group wants to stop; raised on every rank.
        """
        if not self._config.checked(step, self._monitor.pace.start):
            return
        word = self._guard.attempt("the word of this group", self._word).value or SILENCE
        view = self._guard.attempt("meeting of the job", self._job.meet, step, word).value
        if view is None:
            return
        self.view = view
        self._tell(view)
        if view.stop and sum(view.counts.values()) >= self._config.max_faults:
            self._stop(view)

    def certain(self, step: int) -> bool:
        """True if it is certain that the meeting of this very step stops the run, before the update.

        Not in a step without a meeting, nor while `max_faults` may not have been reached: the update would be taken.
        """
        meets = self._config.checked(step, self._monitor.pace.start)
        certain = bool(self._monitor.stopping) and meets and self._config.max_faults == 1
        return certain and self._monitor.watching

    @property
    def wanted(self) -> tuple[Finding, ...]:
        """Findings of this rank's group that ask for a stop."""
        return self._monitor.stopping

    def _tell(self, view: JobView) -> None:
        """Write down what the job said if it said something else before."""
        told = view.to_json()
        if told != self._told:
            self._told = told
            self._monitor.ledger.job(view.step, told)

    def _word(self) -> Word:
        causes = [f for f in self._monitor.parts.diagnosis.findings if f.counts]
        stopping = self._monitor.stopping
        return Word(
            stop=bool(stopping),
            save=wants_checkpoint(stopping, self._config),
            counts=Counter(f.kind for f in causes),
            ratio=max((f.ratio for f in causes if f.ratio is not None), default=0.0),
            max_abs=max((f.max_abs for f in causes), default=0.0),
        )

    def _stop(self, view: JobView) -> None:
        """Save first if a group asked for it, write down why, and raise on this rank as on every other."""
        self.saving = view.save
        for save in self.saves if view.save else ():
            self._guard.attempt("checkpoint before the abort", save, view.step)
        self.saving = False
        stopping = self._monitor.stopping
        if stopping:
            self._monitor.ledger.abort(view.step, stopping)
        raise ReplicaFault(stopping, view.step, view.counts)
