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
from tpwatch.engine import Engine
from tpwatch.errors import ReplicaFault
from tpwatch.job import Job, JobView, Word

TELLING = 30.0
"""Seconds that a rank which is to stop waits for those that still write down why, on a slow disk for one."""

SILENCE = Word(stop=False, save=False, counts={}, ratio=0.0, max_abs=0.0)
"""What a rank says that could not work out its word: it comes to the meeting all the same."""


class Stop:
    """The policy of one rank towards the whole job."""

    def __init__(self, engine: Engine, job: Job, config: Config, guard: Guard) -> None:
        """Nothing has been said yet."""
        self._engine = engine
        self._job = job
        self._monitor = engine.monitor
        self._config = config
        self._guard = guard
        self.view: JobView | None = None
        """What the job said last."""
        self._told: Mapping[str, object] = {}
        self.saves: list[Callable[[int], None]] = []
        """Called with the step before a stop that asks for a checkpoint."""
        self.saving = False
        """True while they are called: that checkpoint is wanted with whatever was found."""

    def meet(self, step: int, *, left_out: bool) -> None:
        """Meet the other ranks if this step is checked. A collective over all ranks of the job.

        `left_out`: the framework's reduction was, so that these gradients are not fit for an update.

        Raises:
            ReplicaFault: some group wants to stop; raised on every rank.
        """
        if self._config.checked(step, self._monitor.pace.start):
            self._hear(step)
        if left_out:
            raise ReplicaFault(self._monitor.stopping, step)

    def conclude(self) -> None:
        """Hear what the job said last, at the end. Not a collective: every rank has been there."""
        self._take(self._guard.attempt("the last word of the job", self._job.hear).value)

    def _hear(self, step: int) -> None:
        word = self._guard.attempt("the word of this group", self._word).value or SILENCE
        if not self._config.can_stop:
            self.conclude()
            self._guard.attempt("meeting of the job", self._job.say, step, word, self._guard)
            return
        view = self._guard.attempt("meeting of the job", self._job.meet, step, word, self._guard).value
        self._take(view)
        if view is None:
            return
        faults = max(1, sum(view.counts.values()))  # a leader that has failed counts none
        if view.stop and (view.now or faults >= self._config.max_faults):
            self._stop(view)

    def certain(self, step: int) -> bool:
        """True if it is certain that the meeting of this very step stops the run, before the update.

        Not in a step without a meeting, nor while `max_faults` may not have been reached: the update would be taken.
        """
        meets = self._config.checked(step, self._monitor.pace.start)
        enough = bool(self._monitor.stopping) and (self._config.max_faults == 1 or self._deadly)
        return meets and enough and self._monitor.watching and self._monitor.together

    @property
    def _deadly(self) -> bool:
        """True if the framework's own reduction may hang on what was found."""
        return any(finding.kind == "grad-presence" for finding in self._monitor.stopping)

    def _take(self, view: JobView | None) -> None:
        """Keep what the job said, and write it down if it said something else before."""
        if view is None:
            return
        self.view, told = view, view.to_json()
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
            now=self._deadly,
        )

    def _stop(self, view: JobView) -> None:
        """Save first if a group asked for it, write down why, and raise on this rank as on every other."""
        self.saving = view.save
        for save in self.saves if view.save else ():
            self._guard.attempt("checkpoint before the abort", save, view.step)
        self.saving = False
        stopping = self._monitor.stopping
        self._monitor.ledger.abort(view.step, stopping)  # also where another group stops: this one ends as well
        # A launcher kills all ranks once the first has ended, be they in the middle of saying why.
        self._engine.meet("told", self._guard, TELLING, everyone=True)
        raise ReplicaFault(stopping, view.step, view.counts)
