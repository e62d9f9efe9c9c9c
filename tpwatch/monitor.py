"""The story of one checked step: pack, exchange, explain, diagnose, act, record.

    before_reduction   fingerprint values and gradients -> one all-reduce(MAX) -> gather what was flagged earlier
      (the framework reduces the replicated gradients)
    after_reduction    fingerprint gradients again      -> one all-reduce(MAX) -> gather the same
      diagnose what came back -> act on it -> write it down

Knows no framework: tensors come from a `Source`, the process group from whoever built the `Exchange`. Every branch
that leads to a collective depends on the step number or on reduced data; a local failure sends a void buffer instead
of staying away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ParamSpec

import torch

from tpwatch import act
from tpwatch._guard import Guard
from tpwatch.config import Config
from tpwatch.diagnose import BUFFER_HEADER, Outcome, When, layout_finding
from tpwatch.exchange import (
    ENTRY,
    EXIT,
    VALUES,
    Buffers,
    Layout,
    Pending,
    ReadBack,
    header_of,
    reduction_flags,
)  # fmt: skip
from tpwatch.explain import Explainer
from tpwatch.fingerprint.layout import ROW
from tpwatch.handshake import AT_ONCE
from tpwatch.ledger import Ledger
from tpwatch.lookout import Lookout
from tpwatch.pace import Pace
from tpwatch.parts import Check, Parts, Scope
from tpwatch.presence import Presence
from tpwatch.records import Evidence, Finding, StepReport
from tpwatch.reduced import Reduced
from tpwatch.resync import Resync
from tpwatch.tally import tally

Tensors = Sequence[torch.Tensor | None]
P = ParamSpec("P")


class Monitor:
    """Watches the replicas of one group. Driven by `watch.Watch`, which knows when a step begins and ends."""

    def __init__(self, parts: Parts, config: Config, guard: Guard) -> None:
        """Allocate every buffer; from here on the clean path allocates nothing that grows."""
        n = len(parts.plan.replicas)
        self.parts = parts
        self.config = config
        self.guard = guard
        self.watching = n > 0
        self.together = True
        """False if a peer did not come to what all ranks of the group should have come to in this step."""
        self.last_report: StepReport | None = None
        self.stopping: tuple[Finding, ...] = ()
        """Findings that ask for the run to be stopped: the same on every rank of the group."""
        self.listeners: list[Callable[[Sequence[Finding]], None]] = []
        """Called with findings that are new or worse than before and not ignored, on the training thread."""
        self.ledger = Ledger(parts.recorder, guard)
        self.pace = Pace(config)
        self._digest = parts.plan.digest
        self._layout = Layout(n)
        self._buffers = Buffers(self._layout, parts.device)
        self._readback = ReadBack(self._layout, parts.device)
        self._explainer = Explainer(parts.plan, parts.exchange, config, guard, parts.device)
        self._entry_rows = torch.zeros(2 * n, ROW, dtype=torch.float64, device=parts.device)
        self._exit_rows = torch.zeros(n, ROW, dtype=torch.float64, device=parts.device)
        self._prompt = parts.device.type == "cpu" if config.guard == "auto" else config.guard == "before_update"
        self._resync = Resync(parts, config, self.ledger) if config.resync != "off" else None
        self._presence = Presence(parts)
        self._signatures: dict[int, torch.Tensor] = {}
        self._open: Check | None = None
        self._pending: Check | None = None
        self._mispaired: Finding | None = None
        self._steps = 0
        self._step_seconds = 0.0
        self._step_ended = 0.0
        self._lookout = Lookout()

    # ------------------------------------------------------------------------------------- the story

    def before_reduction(self, step: int, call: int, scope: Scope) -> None:
        """Entry side, in front of the framework's TP reduction. A collective on checked steps."""
        self.catch_up()
        self.together = True
        if not self.watching or not self.pace.due(step):
            return
        started = self.parts.clock()
        check = self._begin(When(step, call, update=step - 1, pristine=self._steps == 0), scope)
        check.entry = self._send(check, ENTRY, self._buffers.entry, self._pack_entry)
        self._gather(check, self._buffers.entry, partial(self._explainer.gather_before, self._entry_rows))
        self._open = check
        self._alone("the entry side", self._look_early, check, check.entry)
        check.seconds = self.parts.clock() - started

    def after_reduction(self) -> None:
        """Exit side, behind the framework's TP reduction. A collective if and only if the entry side was one."""
        check, self._open = self._open, None
        if check is None:
            return
        started = self.parts.clock()
        check.exit = self._send(check, EXIT, self._buffers.exit, self._pack_exit)
        self._gather(check, self._buffers.exit, partial(self._explainer.gather_after, self._exit_rows))
        check.seconds += self.parts.clock() - started
        if self._prompt:
            self._alone("the verdict", self._conclude, check)
        else:
            self._pending = check

    def forget(self) -> None:
        """The framework's reduction is left out, on every rank of the group: there is nothing behind it to compare."""
        self._open = None

    def check_values(self, step: int) -> None:
        """Compare values alone, outside a step (end of training, before a save). A collective."""
        self.catch_up()
        if not self.watching:
            return
        started = self.parts.clock()
        check = self._begin(When(step, call=0, update=step, pristine=self._steps == 0), frozenset())
        check.entry = self._send(check, VALUES, self._buffers.entry, self._pack_entry)
        check.seconds = self.parts.clock() - started
        self._alone("the verdict", self._conclude, check)

    def end_of_step(self) -> None:
        """The optimizer has stepped: take the time, for the overhead that a report states."""
        now = self.parts.clock()
        self._steps += 1
        self._step_seconds = now - self._step_ended if self._step_ended else 0.0
        self._step_ended = now

    def catch_up(self, *, last: bool = False) -> None:
        """Read the check that is still on its way (deferred mode), at a fixed place; the `last` time, without peers."""
        check, self._pending = self._pending, None
        if check is not None:
            self._alone("the verdict", self._conclude, check, last=last)

    def _alone(self, what: str, act: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Do what may fail on this rank alone. It then knows less than its peers, and has to take all of them off."""
        if not self.guard.attempt(what, act, *args, **kwargs).ok:
            self.guard.trip()

    # --------------------------------------------------------------------------------- sending a side

    def _begin(self, at: When, scope: Scope) -> Check:
        wanted = self.guard.attempt("choosing what to explain", self.parts.diagnosis.wanted, at.step, at.call)
        exchange = self.parts.exchange
        check = Check(at, scope, wanted.value or () if at.call else ())
        check.collectives_before, check.bytes_before = exchange.collectives, exchange.bytes
        return check

    def _send(self, check: Check, phase: int, buffer: torch.Tensor, pack: Callable[[Check], None]) -> Pending:
        """Fill, seal and reduce one buffer. Whatever fails locally, the collective is joined with a void one.

        A rank that cannot read the result knows less than its peers: it has to take all of them off with the next one.
        """
        started = self.parts.clock()
        packed = self.guard.attempt("fingerprint", pack, check)
        check.fingerprinting += self.parts.clock() - started
        if not packed.ok:
            buffer.zero_()
        tripped = self.guard.tripped
        header = self._header(check, phase, failed=not packed.ok, tripped=tripped)
        if not self.guard.attempt("sealing", self._buffers.seal, buffer, header).ok:
            buffer, check.targets, tripped = self._buffers.disabled, (), True
        self.parts.exchange.reduce_max(buffer)
        reading = self.guard.attempt("reading back", self._readback.start, buffer).value
        if reading is None:
            self.guard.trip()
            return self._readback.unread(disabled=tripped)
        return reading

    def _header(self, check: Check, phase: int, *, failed: bool, tripped: bool) -> tuple[float, ...]:
        plan = (self._digest & 0xFFFFFFFF, self._digest >> 32)
        flags = (float(failed), float(tripped), float(self.pace.slow))
        return (phase, check.at.call, check.at.step, *plan, check.digest, *flags)

    def _pack_entry(self, check: Check) -> None:
        self._readback.let_go(self._buffers.entry)
        self._explainer.prepare(check.targets)
        n, half = self._layout.n, self._buffers.entry[0]
        look = self.parts.source.look(check.scope)
        tensors = [*self.parts.source.values(), *look.gradients]
        self.parts.fingerprinter.rows(tensors, self._entry_rows, self._layout.heads(half, 2 * n))
        self._presence.pack(self._layout.flags(half, 2 * n), look.present)
        check.tensors = tensors

    def _pack_exit(self, check: Check) -> None:
        self._readback.let_go(self._buffers.exit)
        n, half = self._layout.n, self._buffers.exit[0]
        look = self.parts.source.look(check.scope)
        self.parts.fingerprinter.rows(look.gradients, self._exit_rows, self._layout.heads(half, n))
        reduction_flags(self._layout.flags(half, n), self._entry_rows[n:], self._exit_rows)
        check.tensors = look.gradients

    # ----------------------------------------------------------------------------------------- tier 2

    def _gather(
        self, check: Check, buffer: torch.Tensor, gather: Callable[[Sequence[torch.Tensor | None]], None]
    ) -> None:
        tensors, check.tensors = check.tensors, ()
        if self._may_gather(check, buffer):
            before = self.parts.exchange.collectives
            gather(tensors)
            check.deep += self.parts.exchange.collectives - before

    @staticmethod
    def _may_gather(check: Check, buffer: torch.Tensor) -> bool:
        """True if every rank packed this side and wants the same targets; the reduced header says so on all alike."""
        if not check.targets:
            return False
        header = header_of(buffer)
        if header.mismatch or not header.agrees("targets") or header.flag("failed"):
            check.targets = ()
        return bool(check.targets)

    # --------------------------------------------------------------------------- reading, deciding, acting

    def _look_early(self, check: Check, entry: Pending) -> None:
        """See who has no gradient before the framework's reduction starts: at once, or from another thread."""
        if self._prompt:
            self._say_presence(check, entry.wait())
        else:
            self._lookout.watch(entry, lambda e: self.guard.attempt("foretelling", self._foretell, check, e))

    def _say_presence(self, check: Check, entry: torch.Tensor) -> None:
        """Uneven presence is said, and acted on, before the framework's reduction can hang on it."""
        reduced = Reduced(self._layout, self.parts.plan.ranks, entry, None)
        if self._void(check, reduced) or not (uneven := reduced.uneven()):
            return
        rows, before = reduced.rows(uneven), self.parts.exchange.collectives
        self.together = self._presence.find_absent(rows)
        check.deep += self.parts.exchange.collectives - before
        rows = self._presence.complete(rows)
        self._act(check.at.step, self.parts.diagnosis.presence(check.at, rows))

    def _foretell(self, check: Check, entry: torch.Tensor) -> None:
        """Deferred mode, on the lookout's thread: write uneven presence down while training may already hang on it.

        Writes only, and once a parameter. The verdict, and what is done about it, follow in step order on the training
        thread; if that has moved on, there is nothing left to foretell and the buffer may hold a later check.
        """
        if check is self._open or check is self._pending:
            reduced = Reduced(self._layout, self.parts.plan.ranks, entry, None)
            self._presence.foretell(check.at.step, reduced, self.ledger)

    def close(self) -> None:
        """Stop the lookout. Idempotent."""
        self._lookout.close()

    def _conclude(self, check: Check, *, last: bool = False) -> None:
        """Turn what came back into a verdict, the same on every rank of the group."""
        started = self.parts.clock()
        entry = check.entry.wait() if check.entry else None
        if entry is None:
            return
        reduced = Reduced(self._layout, self.parts.plan.ranks, entry, check.exit.wait() if check.exit else None)
        if self._void(check, reduced):
            return
        evidence = self._explainer.conclude()
        judging = self.parts.clock()
        outcome = self._observe(check, reduced, evidence)
        ended = self.parts.clock()
        check.seconds, check.diagnosing = check.seconds + ended - started, ended - judging
        check.step_seconds = self._step_seconds
        self.last_report = tally(check, self.parts, reduced, evidence, outcome)
        self._act(check.at.step, outcome)
        self.ledger.check(self.last_report)
        if outcome.judged:
            self.ledger.status(check.at.step, self.parts.diagnosis)
        if check.at.call and not last:
            if self._resync is not None:
                self._resync.mend(check.at.step, reduced.apart(), self.parts.diagnosis.findings)
            self._keep_pace(check, reduced)

    def _observe(self, check: Check, reduced: Reduced, evidence: Mapping[int, Evidence]) -> Outcome:
        """Hand over only rows whose picture changed, that are unsettled, or about which there is new evidence."""
        signature = reduced.signature()
        last = self._signatures.get(check.at.call)
        changed = range(self._layout.n) if last is None else torch.nonzero(signature != last).flatten().tolist()
        self._signatures[check.at.call] = signature
        diagnosis = self.parts.diagnosis
        indices = sorted({*changed, *diagnosis.unsettled(check.at.call), *evidence})
        rows = self._presence.complete(reduced.rows(indices))
        return diagnosis.observe(check.at, rows, evidence)

    def _void(self, check: Check, reduced: Reduced) -> bool:
        """True if the buffers of this check mean nothing: a rank failed, gave up, or sent another step or plan."""
        if any(header.flag("disabled") for header in reduced.headers):
            self._stop(check.at.step, "an internal error on one rank: tpwatch is off on all ranks of this group")
            return True
        for header in reduced.headers:
            if header.mismatch:
                self._act(check.at.step, self._mismatch(check, header.mismatch))
            if header.mismatch or header.flag("failed"):
                self.parts.diagnosis.missed(check.at.call)
                return True
        return False

    def _mismatch(self, check: Check, text: str) -> Outcome:
        """Said once, with the first step; from then on counted."""
        step, known = check.at.step, self._mispaired
        if known is None:
            self._mispaired = layout_finding(self.parts.plan, BUFFER_HEADER, text, step)
        else:
            self._mispaired = replace(known, last_step=step, count=known.count + (step > known.last_step))
        self.parts.diagnosis.add(self._mispaired)
        return Outcome((self._mispaired,) if known is None else ())

    def _stop(self, step: int, why: str) -> None:
        if self.watching:
            self.watching = False
            self.ledger.note(step, why)

    def report(self, step: int, findings: Sequence[Finding]) -> None:
        """Record and act on findings made elsewhere (layout, finalizer protocol)."""
        for finding in findings:
            self.parts.diagnosis.add(finding)
        self._act(step, Outcome(tuple(findings)))

    def _act(self, step: int, outcome: Outcome) -> None:
        for finding in (*outcome.new, *outcome.grown):
            self.ledger.finding(step, finding)
        for finding in outcome.new if self.parts.group_rank == 0 else ():
            self.guard.attempt("announcing", act.announce, finding, self.config)
        told = act.told(outcome.new, self.config)
        for tell in self.listeners if told else ():
            self.guard.attempt("a listener", tell, told)
        self.stopping += act.must_stop(outcome.new, self.config)

    def _keep_pace(self, check: Check, reduced: Reduced) -> None:
        """Stretch the interval if a rank says that checks are too slow, and if all ranks know: see `agree_to`."""
        if any(header.flag("slow") for header in reduced.headers):
            if not self.parts.assembly.agree_to("stretch", AT_ONCE):
                self.ledger.note(check.at.step, self.pace.stretch())
        elif check.at.call == 1:
            self.pace.spend(check.seconds, self._step_seconds)
