"""Deciding: observations and evidence of one replica group in, findings out.

Pure and torch-free, so that a recorded run replays on a laptop. Every rank of a group feeds its
`Diagnosis` the same reduced and gathered data and so reaches the same findings, the same wishes for
more evidence, and the same end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tpwatch.config import Config
from tpwatch.diagnose import compare, findings, judges
from tpwatch.diagnose.findings import BUFFER_HEADER, layout_finding, presence_finding, skipped_finding, state_finding
from tpwatch.diagnose.history import History
from tpwatch.diagnose.judges import Case, Verdict
from tpwatch.diagnose.outcome import Outcome, When
from tpwatch.records import Evidence, Finding, RowObservation, Target, WatchPlan

__all__ = [
    "BUFFER_HEADER",
    "Diagnosis",
    "Outcome",
    "When",
    "layout_finding",
    "presence_finding",
    "skipped_finding",
    "state_finding",
]


class Diagnosis:
    """The memory and judgement of one replica group."""

    def __init__(self, plan: WatchPlan, config: Config, *, loss_scaler: bool = False) -> None:
        """Start with no history.

        `loss_scaler`: the optimizer skips steps whose gradients are not finite.
        """
        self.plan = plan
        self.config = config
        self.loss_scaler = loss_scaler
        self._histories: dict[int, list[History]] = {}
        self.checks = 0
        self._first_step: int | None = None
        self._roots: dict[int, Finding] = {}
        self._onset: dict[int, int] = {}
        self._written: dict[int, tuple[int, float]] = {}
        self._others: list[Finding] = []
        self._status: dict[tuple[int, int], str] = {}
        self._seen: set[int] = set()
        self._unsettled: dict[int, set[int]] = {}
        self._partial: set[int] = set()
        self._missed: set[int] = set()
        """Calls whose last check was lost."""
        self._previous = 0
        """Step of the check before the last one."""
        self._checked: dict[int, int] = {}
        """Step of the last check, by call."""

    # ------------------------------------------------------------------------------------- observing

    def observe(self, at: When, rows: Sequence[RowObservation], evidence: Mapping[int, Evidence]) -> Outcome:
        """Take in one check.

        `rows` may leave out rows whose picture did not change and that are not `unsettled`.
        """
        self.checks += 1
        last = max(self._checked.values(), default=0)
        self._previous = last if at.step > last else self._previous
        self._checked[at.call] = at.step
        if self._first_step is None and at.call:
            self._first_step = at.step
        histories = self._of_call(at.call)
        if self._scaler_will_skip(at, rows, histories):
            for seen in rows:
                self._compare_values(at, seen, histories[seen.index])
            self._missed.discard(max(at.call, 1))
            return Outcome(skipped=True)
        cases = [self._remember(at, seen, histories[seen.index], evidence.get(seen.index)) for seen in rows]
        worse: list[Finding] = []
        for case in _in_order(cases):
            worse += self._decide(case, at)
        self._missed.discard(max(at.call, 1))
        return Outcome(tuple(worse), self._grown(worse), judged=len(cases))

    def missed(self, call: int) -> None:
        """A check was lost: whatever its gradients were, nobody has seen them."""
        self._missed.add(max(call, 1))

    def presence(self, at: When, rows: Sequence[RowObservation]) -> Outcome:
        """Take in the entry side alone.

        Uneven presence must be said before the framework's reduction starts.
        """
        worse: list[Finding] = []
        for seen in rows:
            history = self._of_call(at.call)[seen.index]
            history.advance("uneven", at.step, self.checks + 1, seen)
            worse += self._decide(self._case(seen, history), at)
        return Outcome(tuple(worse))

    def _of_call(self, call: int) -> list[History]:
        """Each finalizer call of a step has a history of its own: the second one sees what the first has done.

        A comparison of values alone (call 0) belongs to the first.
        """
        number = max(call, 1)
        if number not in self._histories:
            self._histories[number] = [History() for _ in self.plan.replicas]
        return self._histories[number]

    def _remember(self, at: When, seen: RowObservation, history: History, evidence: Evidence | None) -> Case:
        self._compare_values(at, seen, history)
        pattern = compare.pattern(seen, len(self.plan.ranks))
        idle = pattern in compare.IDLE
        if any(p.nonfinite_hi for p in (seen.param, seen.pre, seen.post)):
            history.note_nonfinite(seen, at.step, at.update)
        elif not idle:
            history.nonfinite_streak = 0
        suspicion = judges.suspicion(pattern, seen, history)
        if not idle or suspicion == "written":
            history.advance(suspicion, at.step, self.checks, seen)
        else:
            history.last = seen
        if evidence is not None:
            history.learn(evidence, (at.step, self.checks), idle=idle)
        if not idle:
            self._mark(seen, history, at.step)
        return self._case(seen, history)

    def _compare_values(self, at: When, seen: RowObservation, history: History) -> None:
        """When values were first seen apart, and whether they already were before anything that was watched.

        Attached in mid-training, unreduced gradients may have set them apart before; a call for another chunk cannot
        tell. So may those of a check that was lost.
        """
        if seen.param.same:
            history.values_were_equal = True
        if seen.param.same or history.values_differ_at is not None:
            return
        history.values_differ_at = at.update
        pattern = compare.pattern(seen, len(self.plan.ranks))
        first = at.step == self._first_step and pattern != "outside" and not history.values_were_equal
        if at.pristine or (first and pattern != "different/kept"):
            history.born_different = True
        elif first or max(at.call, 1) in self._missed:
            history.diverged_at = at.step

    def _mark(self, seen: RowObservation, history: History, step: int) -> None:
        history.exercised = True
        history.note_parted(step, same=seen.post.same)
        copies = seen.param.same and seen.pre.same and seen.post.same and not seen.pre.nonfinite_hi
        if copies and history.copies_at is None:
            history.copies_at = self.checks
        if seen.post.same or not seen.present_lo:
            return
        for of_call in self._histories.values():
            if of_call[seen.index].diverged_at is None:
                of_call[seen.index].diverged_at = step

    def _case(self, seen: RowObservation, history: History) -> Case:
        size = len(self.plan.ranks)
        pattern = compare.pattern(seen, size)
        return Case(self.plan.replicas[seen.index], seen, history, pattern, size, self.loss_scaler, self.config)

    def _scaler_will_skip(self, at: When, rows: Sequence[RowObservation], histories: Sequence[History]) -> bool:
        """A found-inf step: no verdict, patience unbroken, until more follow each other than a scaler explains."""
        if not self.loss_scaler:
            return False
        hurt = [r for r in rows if r.in_scope and r.post.nonfinite_hi > 0]
        streaks = [histories[r.index].nonfinite_streak for r in hurt]
        if not hurt or max(streaks) >= judges.SCALER_PATIENCE:
            return False
        if any(judges.lopsided(self.plan.replicas[r.index], r) for r in hurt):
            return False
        for row in hurt:
            histories[row.index].note_nonfinite(row, at.step, at.update)
        return True

    # -------------------------------------------------------------------------------------- deciding

    def _decide(self, case: Case, at: When) -> list[Finding]:
        """Judge one parameter; return its finding if it is new or worse than before."""
        index = case.seen.index
        verdict = judges.judge(case)
        self._settle(case, verdict, at.call)
        root = self._roots.get(index)
        if root is not None:
            self._roots[index] = findings.goes_on(root, case, verdict, at.step)
            worse = self._roots[index].severity != root.severity or _crossed(root, self._roots[index])
            return [self._roots[index]] if worse else []
        if verdict is None or not findings.confirmed(case, verdict):
            return []
        onset = 1 if verdict.kind == "init-mismatch" else case.history.since_check
        others = [(f, self._onset[i]) for i, f in self._roots.items() if f.role == "cause"]
        finding = findings.with_role(findings.found(case, verdict, self.plan, at.step), case, onset, others)
        self._roots[index], self._onset[index] = finding, onset
        return [finding]

    def _settle(self, case: Case, verdict: Verdict | None, call: int) -> None:
        """Remember what may be claimed about a parameter, and whether unchanged rows of it can be left out."""
        index, history, unsettled = case.seen.index, case.history, self._unsettled_of(call)
        if case.seen.in_scope:
            self._seen.add(index)
        if case.pattern in compare.IDLE and verdict is None:
            if not case.seen.param.same:
                unsettled.add(index)
            elif not history.suspicion:  # else what is open stays open: such a step tells nothing
                unsettled.discard(index)
            return
        status = self._status[max(call, 1), index] = "fault" if verdict else judges.status(case)
        if history.suspicion in ("changed", "unreduced", "apart"):
            self._partial.add(index)
        looks = min(history.streak, history.decisive) if history.suspicion == "changed" else history.streak
        settled = status == "healthy" and looks >= self.config.patience
        (unsettled.discard if settled else unsettled.add)(index)

    def _grown(self, fresh: Sequence[Finding]) -> tuple[Finding, ...]:
        """Findings whose count or spread has doubled: an event file stays short, and useful after a kill."""
        names = {f.parameter for f in fresh}
        due = []
        for index, finding in self._roots.items():
            count, spread = self._written.get(index, (0, 0.0))
            fresh_one = finding.parameter in names
            if fresh_one or finding.count >= 2 * count or finding.max_abs > 2 * spread:
                self._written[index] = (finding.count, finding.max_abs)
                if not fresh_one:
                    due.append(finding)
        return tuple(due)

    # ---------------------------------------------------------------------------------------- asking

    def unsettled(self, call: int) -> frozenset[int]:
        """Rows that must be in every `observe` of this call, changed or not."""
        return frozenset(self._unsettled_of(call))

    def _unsettled_of(self, call: int) -> set[int]:
        number = max(call, 1)
        if number not in self._unsettled:
            self._unsettled[number] = set(range(len(self.plan.replicas)))
        return self._unsettled[number]

    def wanted(self, step: int, call: int) -> tuple[Target, ...]:
        """What tier 2 should gather at `step`.

        A function of reduced data and step numbers only: the first check at or behind each multiple of `deep_interval`
        is deep, whatever the interval of checks.
        """
        before = self._checked.get(call, step - 1)
        deep = step // self.config.deep_interval != before // self.config.deep_interval
        unsettled = self._unsettled_of(call)
        indices = sorted(unsettled | self._partial if deep else unsettled)
        histories = self._of_call(call)
        return tuple(target for i in indices if (target := self._want(i, histories[i], deep=deep)))

    def _want(self, index: int, history: History, *, deep: bool) -> Target | None:
        seen = history.last
        if seen is None or (history.suspicion not in _GATHERED and not _differs(seen)):
            return None
        if self._enough(history, seen) and not deep and not self._limited(seen):
            return None
        loose = not seen.post.same and seen.kept_lo
        return Target(index, values=loose or not seen.param.same, gradients=not seen.post.same)

    def _enough(self, history: History, seen: RowObservation) -> bool:
        """`patience` gathers settle an ordinary case; a borderline deviation gets more before it stays undecided.

        Those in between that saw no gradient do not count, up to a point. A spread is followed for longer.
        """
        if not seen.param.same or (history.diverged_at is not None and not seen.post.same):
            return history.gathers >= self.config.explain.gather_checks
        unclear = history.gradients == "undecided" or history.reduction == "ambiguous"
        patience = self.config.patience
        budget = patience * (_BORDERLINE if unclear else 1)
        return history.decisive >= budget or history.gathers >= _BORDERLINE**2 * patience

    def _limited(self, seen: RowObservation) -> bool:
        limits = self.config.thresholds
        return not seen.param.same and (limits.max_abs is not None or limits.max_rel is not None)

    # -------------------------------------------------------------------------------------- reporting

    def add(self, finding: Finding) -> None:
        """Add a finding that is not about one row of the plan (layout, finalizer)."""
        self._others = [f for f in self._others if f.key != finding.key] + [finding]

    @property
    def findings(self) -> list[Finding]:
        """All findings, causes first, in order of first step."""
        everything = [*self._others, *self._roots.values()]
        return sorted(everything, key=lambda f: (f.role != "cause", f.first_step, f.parameter))

    @property
    def holding(self) -> list[Finding]:
        """Findings that hold: not those of parameters that have settled as healthy since, with equal values.

        What is looked for at every step holds while it was seen since the check before the last one; of anything else
        nobody has seen the end. A call of the finalizer that is not made any more settles nothing, and opens nothing.
        """
        last = max(self._checked.values(), default=0)
        seen = [f for f in self._others if f.last_step >= self._previous or not _seen_at_every_step(f)]
        calls = {max(call, 1) for call, step in self._checked.items() if step >= last}
        open_ones = frozenset[int]().union(*(rows for call, rows in self._unsettled.items() if call in calls))
        return [*seen, *(finding for index, finding in self._roots.items() if index in open_ones)]

    @property
    def not_exercised(self) -> tuple[str, ...]:
        """Parameters whose gradient was never seen non-zero.

        No claim is made about their reduction.
        """
        exercised = {i for histories in self._histories.values() for i, h in enumerate(histories) if h.exercised}
        return tuple(r.name for i, r in enumerate(self.plan.replicas) if i in self._seen and i not in exercised)

    @property
    def unverified(self) -> tuple[str, ...]:
        """Parameters seen with a gradient whose reduction could not be decided so far."""
        open_ones = {i for (_, i), status in self._status.items() if status in ("unverified", "undecided")}
        return tuple(r.name for i, r in enumerate(self.plan.replicas) if i in open_ones)


_BORDERLINE = 3
_GATHERED = frozenset({"unreduced", "changed", "apart", "written"})


def _in_order(cases: list[Case]) -> list[Case]:
    """Order within a step.

    Value faults first, then gradients in reverse model order (the order of backward).
    """
    return sorted(cases, key=lambda c: (not _of_values(c), -c.seen.index))


def _of_values(case: Case) -> bool:
    return not case.seen.param.same and (case.history.born_different or case.history.suspicion == "written")


def _seen_at_every_step(finding: Finding) -> bool:
    return finding.kind == "finalize-skipped" or finding.parameter == BUFFER_HEADER


def _differs(seen: RowObservation) -> bool:
    return not seen.param.same or (seen.present_lo and not seen.post.same)


def _crossed(before: Finding, after: Finding) -> bool:
    return "threshold" in after.evidence and "threshold" not in before.evidence
