"""A Watch: what `tpwatch.attach` returns.

Knows when a step begins and ends; the monitor knows what a check is.

Translates the calls an adapter's seams make (finalizer entered, left, optimizer about to step,
optimizer stepped) into checks, counts them, and notices a finalizer that did not run, ran twice or
was replaced. Every call comes through the guard; only `ReplicaFault` gets out.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from tpwatch._guard import Guard, say
from tpwatch.act import doubled
from tpwatch.config import Config
from tpwatch.diagnose import skipped_finding
from tpwatch.engine import Engine, Seams
from tpwatch.gate import Gate
from tpwatch.handshake import AMID_TRAINING, AT_ONCE
from tpwatch.job import JobView
from tpwatch.monitor import Monitor
from tpwatch.parts import Scope
from tpwatch.records import Finding, StepReport
from tpwatch.stop import Stop

COLLECTIVE = frozenset({"entry", "exit", "values check"})
"""Calls that hold a collective: where one fails, this rank cannot know what its peers are waiting for."""


class Watch:
    """Handle on a watched model.

    Use `findings`, `last_report`, `check()`, `detach()`, or a `with` block.

    Without a monitor it is inert: nothing is watched, `reason` says why, and every method is a
    no-op.
    """

    def __init__(self, config: Config, guard: Guard, engine: Engine | None = None, *, reason: str = "") -> None:
        """Built by `attach`, which gives an inert one no engine but a reason."""
        self.config = config
        self.reason = reason
        self.directory = engine.directory if engine else ""
        self._guard = guard
        self._engine = engine
        self.monitor = engine.monitor if engine else None
        """The monitor of this rank's replica group; None in an inert Watch."""
        self._stop = Stop(engine, engine.job, config, guard) if engine and engine.job and config.meets else None
        self._gate = (
            Gate(engine.monitor, engine.job, config, guard) if engine and config.checkpoint != "ignore" else None
        )
        self._seams: Seams | None = None
        self._step = config.start_step + 1
        self._calls = 0
        self._ever_called = self._finalized = False
        self._start_known = False
        self._ready_seen = False
        self._skipped = 0
        self._first_skipped = 0
        self._bypassed = False
        self._twice_noted = False
        self._left_out = self._captured = False
        self._awake = False
        self._closed = False

    # ------------------------------------------------------------------------------------- for users

    @property
    def enabled(self) -> bool:
        """True while replicas are being watched."""
        return self.monitor is not None and self.monitor.watching and self._awake and not self._closed

    @property
    def findings(self) -> list[Finding]:
        """Confirmed findings of this rank's replica group, causes first."""
        return [] if self.monitor is None else self.monitor.parts.diagnosis.findings

    @property
    def last_report(self) -> StepReport | None:
        """The last checked step, or None before the first."""
        return None if self.monitor is None else self.monitor.last_report

    @property
    def last_step(self) -> int:
        """The last optimizer step that was taken, as the trainer numbers them."""
        return self._step - 1

    @property
    def job_view(self) -> JobView | None:
        """What the job said where all ranks met last (`Config.meets`), or before that if nothing can stop the run."""
        return self._stop.view if self._stop else None

    def on_finding(self, listener: Callable[[Sequence[Finding]], None]) -> None:
        """Call `listener` with findings that are new or worse and not ignored, on the training thread of every rank.

        It must not communicate: what it raises is counted and logged, not passed on.
        """
        if self.monitor is not None:
            self.monitor.listeners.append(listener)

    def save_before_abort(self, save: Callable[[int], None]) -> None:
        """Call `save` with the step before a stop that asks for a checkpoint, on every rank of the job.

        It may be a collective, such as the trainer's own save function: all ranks are at the same place.
        """
        if self._stop is not None:
            self._stop.saves.append(save)

    def set_step(self, step: int) -> None:
        """Say which optimizer step comes next, from 1 (all ranks alike), where the framework does not say."""
        self._step = step

    def check(self) -> None:
        """Compare the values now.

        A collective over the replica group: call it on every rank, outside a step.
        """
        self._run("values check", lambda monitor: monitor.check_values(self._step - 1))

    def before_save(self) -> None:
        """A checkpoint is about to be saved: compare the copies (knob `checkpoint`).

        A collective over the job, as saving is. Adapters call it where a framework saves; call it yourself around a
        save function of your own.

        Raises:
            ReplicaFault: copies differ somewhere in the job, and `checkpoint: refuse` is set; on every rank.
        """
        if self._gate is not None and self._awake and not self._closed:
            self._gate.before_save(self._step - 1, asked_for=self._stop is not None and self._stop.saving)

    def after_save(self, directory: str | os.PathLike[str]) -> None:
        """A checkpoint was saved to `directory`: leave word in it where `checkpoint: annotate` asks for that."""
        if self._gate is not None and self.enabled:
            self._gate.after_save(self._step - 1, directory)

    def loading(self) -> AbstractContextManager[None]:
        """Around loading a checkpoint: compare the copies before and after. A collective over the replica group."""
        return self._gate.loading(self._step - 1) if self._gate is not None and self.enabled else nullcontext()

    def finish(self) -> None:
        """A normal end.

        One last comparison of values if every rank of the group agrees to it in time, then `detach`.
        """
        try:
            if self.enabled and self._meet("finish"):
                self.check()
        finally:
            self._close(last_word=True, wait=True)

    def abandon(self) -> None:
        """An end by exception: keep what was recorded; no collective, no waiting for anyone."""
        self._close(last_word=False)

    def detach(self) -> None:
        """Stop watching and put the host's own objects back: on every rank, between the same two steps. Idempotent."""
        self._close(last_word=True)

    def __enter__(self) -> Watch:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        """Watch until the block ends."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        """`finish` on a normal exit, `abandon` on an exception."""
        if kind is None:
            self.finish()
        else:
            self.abandon()

    # ----------------------------------------------------------------------------------- for adapters

    def install(self, seams: Seams) -> None:
        """Take over the seams an adapter has wrapped. They do nothing until `begin`."""
        self._seams = seams

    def begin(self) -> None:
        """Every rank of the job is ready: from here on the seams drive the monitor."""
        self._awake = True

    def call_off(self) -> None:
        """Another rank was not ready: put the host's own objects back, as if nothing had been."""
        self._closed = True
        if self._seams is not None:
            self._guard.attempt("calling off", self._seams.remove)

    def finalizer_entered(self, scope: Scope) -> bool:
        """The framework is about to reduce the gradients of the chunks in `scope` over the replica group.

        Returns False if the reduction is to be left out: the run is about to be stopped, on every rank, before the
        update, and the reduction might hang on what was found.
        """
        self._left_out = self._left_out and self._calls > 0
        if not self.enabled:
            return True
        if self._calls == 0:
            self._read_iteration()
        self._calls += 1
        self._ever_called = self._finalized = True
        if self._calls > 1 and not self._twice_noted:
            self._twice_noted = True
            self._note(f"the gradient finalizer was called {self._calls} times in step {self._step}")
        self._run("entry", lambda monitor: monitor.before_reduction(self._step, self._calls, scope))
        # Which ranks want that is known to each rank alone: all of the group leave it out, or none does.
        self._left_out = self._stop is not None and self._stop.certain(self._step) and self._meet("leave out", AT_ONCE)
        if self._left_out:
            self._run("leaving out", lambda monitor: monitor.forget())
        return not self._left_out

    def captured(self) -> None:
        """The host records its reduction into a CUDA graph, as on every rank: its replays call nothing here."""
        if self.enabled and self.monitor is not None:
            self._note("not watched: CUDA graph: the gradient finalizer is captured; nothing is compared from here on")
            say(logging.WARNING, "tpwatch: not watched: the gradient finalizer runs in a CUDA graph")
            self.monitor.watching = False
            self._captured = True

    def notice(self, look: Callable[[], str]) -> None:
        """Let an adapter look for what the host has changed and nothing here follows; a note says what it tells."""
        told = self._guard.attempt("looking for changes", look).value
        if told:
            self._note(told)

    def finalizer_left(self) -> None:
        """The framework has reduced them."""
        self._run("exit", lambda monitor: monitor.after_reduction())

    def gradients_ready(self) -> None:
        """The optimizer is about to use the gradients. May come twice in a step; only the first counts."""
        if self._closed or not self._awake or self._ready_seen:
            return
        if not self._finalized:
            self._read_iteration()
            if self.enabled:
                self._finalizer_skipped()
        self._calls = 0
        if self._stop is not None:
            self._stop.meet(self._step, left_out=self._left_out)
        self._ready_seen = True  # not behind a fault: a trainer that catches it and goes on is told again

    def stepped(self) -> None:
        """The optimizer has stepped, or skipped the step: the next one begins."""
        if self._closed or not self._awake:
            return
        self._run("end of step", lambda monitor: monitor.end_of_step())
        self._step += 1
        self._calls, self._ready_seen, self._finalized = 0, False, False

    # ------------------------------------------------------------------------------------- internals

    def _read_iteration(self) -> None:
        known = self._guard.attempt("reading the iteration", self._seams.iteration).value if self._seams else None
        if known is not None:
            self._step = known
            if not self._start_known and self.monitor is not None:
                self.monitor.pace.start = known - 1  # a resumed run has its warm-up too
            self._start_known = True

    def _finalizer_skipped(self) -> None:
        """Our wrapper was not called: the host has replaced it, or the finalizer did not run.

        Neither joins a collective in this step. A replaced wrapper is put back, and a finalizer
        that never ran is looked at once in its place, where all ranks agree to that through the
        store.
        """
        monitor, seams = self.monitor, self._seams
        if monitor is None:
            return
        if seams is not None and seams.lost():
            self._reinstall(seams)
            return
        self._skipped += 1
        self._first_skipped = self._first_skipped or self._step
        self._run("finalizer protocol", self._tell_skipped)
        never = not self._ever_called and not self._bypassed and self._skipped >= self.config.patience
        if never and monitor.pace.due(self._step):
            self._bypass()

    def _bypass(self) -> None:
        """Once, at a step that is due: compare the replicas although no finalizer runs, if all ranks come to that."""
        self._bypassed = True
        if self._meet("bypass"):
            self._note(f"finalizer never called: replicas compared once, before the update of step {self._step}")
            self._run("entry", lambda m: m.before_reduction(self._step, 1, self._scope()))
            self._run("exit", lambda m: m.after_reduction())

    def _tell_skipped(self, monitor: Monitor) -> None:
        """Counted every time, said and written down again whenever the count has doubled."""
        finding = skipped_finding(monitor.parts.plan, self._step, self._skipped)
        finding = replace(finding, first_step=self._first_skipped)  # not all of the steps between need be skipped ones
        if doubled(self._skipped):
            monitor.report(self._step, [finding])
        else:
            monitor.parts.diagnosis.add(finding)

    def _reinstall(self, seams: Seams) -> None:
        if self._meet("reinstall"):
            self._guard.attempt("reinstalling", seams.reinstall)
            self._note(f"the host replaced the gradient finalizer; it is watched again from step {self._step + 1}")

    def _scope(self) -> Scope:
        return self._seams.whole() if self._seams is not None else frozenset()

    def _meet(self, what: str, seconds: float = AMID_TRAINING, *, everyone: bool = False) -> bool:
        """Agree with the replica group (or the whole job) to do `what` now."""
        return self._engine is not None and self._engine.meet(what, self._guard, seconds, everyone=everyone)

    def _note(self, text: str) -> None:
        self._run("note", lambda monitor: monitor.ledger.note(self._step, text))

    def _run(self, what: str, act: Callable[[Monitor], None]) -> None:
        """Every call into the monitor: through the guard, and never again after a collective has failed."""
        if not self.enabled or self.monitor is None:
            return
        monitor = self.monitor
        if not self._guard.attempt(what, act, monitor).ok and what in COLLECTIVE:
            monitor.watching = False
            say(logging.WARNING, "tpwatch: off on this rank after a failed collective: %s", self._guard.last_error)

    def _close(self, *, last_word: bool, wait: bool = False) -> None:
        """Let go of the host, close the log, and on rank 0 write the summary once the others have closed theirs."""
        if self._closed:
            return
        try:
            if last_word and self.monitor is not None and (self.enabled or self._captured):
                self._guard.attempt("last check", self.monitor.catch_up, last=True)
            if last_word and self._stop is not None:
                self._stop.conclude()
        finally:
            self._let_go(wait=wait)

    def _let_go(self, *, wait: bool) -> None:
        self._closed = True
        if self.monitor is not None:
            self._guard.attempt("closing the lookout", self.monitor.close)
        for note in (self._guard.attempt("detach", self._seams.remove).value or ()) if self._seams else ():
            say(logging.WARNING, "tpwatch: %s", note)
        if self._engine is None:
            return
        self._guard.attempt("closing", self._engine.close, self.last_step)
        if wait:
            self._meet("closed", everyone=True)
        self._guard.attempt("writing the summary", self._engine.summarize)
