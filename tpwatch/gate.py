"""The gate in front of a checkpoint: it keeps one copy of every replica, so that after it nobody can see they differed.

Before a save, and before and after a load, the copies are compared in value, fp32 master and moments. What follows is
the user's: a warning, a file in the checkpoint, or a save that fails on every rank of the job. Saving and loading are
collective over the job in every framework, and so is this. Knows policy and findings, not files of checkpoints.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tpwatch._guard import Guard, say
from tpwatch.act import listed
from tpwatch.alike import VALUE, Alike, Differing
from tpwatch.config import Config
from tpwatch.diagnose import state_finding
from tpwatch.errors import ReplicaFault
from tpwatch.export.jsonl import write_annotation
from tpwatch.job import Job, Word
from tpwatch.monitor import Monitor

_NAMED = 5
"""Parameters that a line of the log names; the rest is a number."""


class Gate:
    """Looks at the replicas of one group whenever a checkpoint is saved or loaded."""

    def __init__(self, monitor: Monitor, job: Job | None, config: Config, guard: Guard) -> None:
        """`job` is the meeting of all ranks; without one nothing can be refused."""
        self._monitor = monitor
        self._job = job
        self._config = config
        self._guard = guard
        self._alike = Alike(monitor.parts, guard)
        self._last: Differing | None = None
        """What differed at the last save; None if that is not known."""

    def before_save(self, step: int, *, asked_for: bool = False) -> None:
        """Compare, and say what differs. A collective over the group, and over the job where a save can be refused.

        Raises:
            ReplicaFault: the copies differ in some group, and `checkpoint: refuse` is set; raised on every rank. Not
                if it was `asked_for`: the run is being stopped, and wants it with whatever was found.
        """
        self._last = self._look(step, "as a checkpoint is saved")
        if self._config.checkpoint == "refuse" and self._job is not None:
            self._meet(step, self._job, asked_for=asked_for)

    def _meet(self, step: int, job: Job, *, asked_for: bool) -> None:
        """Every rank of the job comes, whatever became of its own comparison: the others wait for it."""
        apart = self._last or {}
        values = sum(VALUE in labels for labels in apart.values())
        counts = {"drift": values, "optimizer-mismatch": len(apart) - values}
        word = Word(stop=bool(apart), save=asked_for, counts=counts, ratio=0.0, max_abs=0.0)
        view = self._guard.attempt("meeting before a save", job.meet, step, word, self._guard).value
        if view is not None and view.stop and not view.save:
            known = [f for f in self._monitor.parts.diagnosis.findings if f.parameter in apart]
            if apart:
                self._monitor.ledger.abort(step, known)
            raise ReplicaFault(known, step, view.counts, what="refused to save a checkpoint")

    def after_save(self, step: int, directory: str | os.PathLike[str]) -> None:
        """Leave word in the checkpoint: what differs in this group, or, from rank 0, that nothing does in its own."""
        parts = self._monitor.parts
        if self._config.checkpoint != "annotate" or self._last is None or parts.group_rank != 0:
            return
        if self._last or parts.assembly.rank == 0:
            self._guard.attempt("annotating", self._annotate, step, os.fspath(directory), self._last)

    def _annotate(self, step: int, directory: str, apart: Differing) -> None:
        if "://" in directory:
            self._say(step, f"the checkpoint was not annotated: {directory} is no folder of a file system")
            return
        findings = [f for f in self._monitor.parts.diagnosis.findings if f.counts]
        write_annotation(Path(directory), self._monitor.parts.plan.group, step, apart, findings)

    @contextmanager
    def loading(self, step: int) -> Iterator[None]:
        """Compare before and after what is done inside. Collectives over the group.

        Each only once every rank has said through the store that it is there: one whose load has raised, here or on the
        way here, does not come.
        """
        before, loaded = self._look_together(step, "before a checkpoint is loaded"), False
        try:
            yield
            loaded = True
        finally:
            if not loaded:
                self._guard.attempt("declining", self._monitor.parts.assembly.decline, "load")
        after = self._look_together(step, "after a checkpoint was loaded")
        if before is None or after is None:
            return
        for what, names in (("came with", after.keys() - before.keys()), ("went with", before.keys() - after.keys())):
            if names:
                self._say(step, f"a difference between copies {what} the checkpoint: {self._listed(sorted(names))}")

    def _look_together(self, step: int, when: str) -> Differing | None:
        came = self._guard.attempt(f"meeting {when}", self._monitor.parts.assembly.agree_to, "load")
        return self._look(step, when) if came.value == "" else None

    def _look(self, step: int, when: str) -> Differing | None:
        """What differs now; None if that could not be found out, or if this group is not watched any more."""
        if not self._monitor.watching:
            return None
        return self._guard.attempt(f"comparing {when}", self._compare, step, when).value

    def _compare(self, step: int, when: str) -> Differing | None:
        """What differs now; said, and of optimizer state reported as a finding."""
        apart = self._alike.differing()
        if apart is None:
            self._say(step, f"copies could not be compared {when}: an internal error on one rank")
        elif apart:
            described = [f"{name} ({', '.join(labels)})" for name, labels in apart.items()]
            self._say(step, f"copies differ {when}: {self._listed(described)}")
            self._report(step, apart)
        return apart

    def _report(self, step: int, apart: Differing) -> None:
        """Optimizer state that differs under equal values: nothing else would find that before the next update."""
        plan, diagnosis = self._monitor.parts.plan, self._monitor.parts.diagnosis
        known = {finding.parameter for finding in diagnosis.findings}
        hidden = {name: labels for name, labels in apart.items() if VALUE not in labels and name not in known}
        if hidden:
            self._monitor.report(step, [state_finding(plan, name, labels, step) for name, labels in hidden.items()])

    @staticmethod
    def _listed(names: list[str]) -> str:
        """With semicolons: what is listed may have commas of its own."""
        return listed(names, _NAMED, between="; ", last="; and ")

    def _say(self, step: int, text: str) -> None:
        self._monitor.ledger.note(step, text)
        if self._monitor.parts.group_rank == 0:
            say(logging.WARNING, "tpwatch: step %d, %s: %s", step, self._monitor.parts.plan.group, text)
