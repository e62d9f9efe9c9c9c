"""From a verdict that has held long enough to a `Finding`, and how a finding changes while it goes on.

Pure and torch-free. One parameter has one finding, its root cause; what follows from it becomes its
evidence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tpwatch.diagnose import compare
from tpwatch.diagnose.judges import EXACT, Case, Verdict, norm_ratio
from tpwatch.diagnose.rules import BY_KIND
from tpwatch.records import Evidence, Finding, RowObservation, WatchPlan, worst

SPREADING = frozenset({"drift", "missing-reduce", "external-write", "wrong-group"})
"""Kinds that can be a mere consequence: replicas that differ upstream make others differ too.

A sum of copies or a mean of partials cannot: whoever does that does it whatever the activations
are.
"""

KEEPING_EQUAL = frozenset({"double-reduce", "averaged-partial", "wrong-scale"})
"""Causes that move no copies apart, and so explain no other fault."""

AT_THE_SOURCE = frozenset({"init-mismatch", "external-write"})
"""Causes that make other parameters differ within the very same step."""

BUFFER_HEADER = "(buffer header)"
"""In place of a parameter, where the buffers themselves do not fit together."""

DOUBT = 0.2
"""Taken off the confidence of a cause that began while values elsewhere had already moved apart."""


def confidence(verdict: Verdict, streak: int, *, doubted: bool) -> float:
    """The ceiling of the evidence, less 2^-(streak + 1) unless one look suffices, less `DOUBT` if doubted."""
    waiting = 0.0 if verdict.patience == 1 else 0.5 ** (streak + 1)
    return round(max(0.0, verdict.ceiling - waiting - (DOUBT if doubted else 0.0)), 4)


def confirmed(case: Case, verdict: Verdict) -> bool:
    """True if the verdict has held for its patience, with enough gathers, or is past the user's threshold."""
    if verdict.threshold:
        return True
    return streak(case, verdict) >= verdict.patience and case.history.decisive >= verdict.needs_gathers


def streak(case: Case, verdict: Verdict) -> int:
    """Checks in a row that showed this fault; values that differ at the start show it with or without a gradient."""
    if verdict.kind == "nonfinite":
        return case.history.nonfinite_streak
    if verdict.kind == "wrong-group":
        return case.history.parted_streak
    return max(1, case.history.streak) if verdict.kind == "init-mismatch" else case.history.streak


def found(case: Case, verdict: Verdict, plan: WatchPlan, step: int) -> Finding:
    """The finding as first confirmed; its role is decided by `with_role`."""
    first = _first_step(case, verdict)
    finding = Finding(
        kind=verdict.kind,
        code=BY_KIND[verdict.kind].code,
        parameter=case.spec.name,
        point=verdict.point,
        group=plan.axis,
        ranks=plan.ranks,
        first_step=first,
        last_step=step,
        count=streak(case, verdict),
        severity=verdict.severity,
        role="cause",
        caused_by=None,
        confidence=confidence(verdict, streak(case, verdict), doubted=False),
        observed=verdict.observed,
        expected=verdict.expected,
        ratio=norm_ratio(case.seen),
        max_abs=0.0,
        max_rel=0.0,
        odd_ranks=(),
        advice=BY_KIND[verdict.kind].next_step,
        evidence=_norms(case.seen, len(plan.ranks)),
    )
    return with_evidence(finding, case, verdict)


def _norms(seen: RowObservation, group_size: int) -> dict[str, Any]:
    """The norms behind `ratio`, per rank like gathered ones: of copies that are equal one norm is that of each.

    Copies that differ nowhere are never gathered; where a gather brought norms, `with_evidence` takes those.
    """
    if norm_ratio(seen) is None:
        return {}
    return {"norms_pre": [seen.pre.l2_hi**0.5] * group_size, "norms_post": [seen.post.l2_hi**0.5] * group_size}


def _first_step(case: Case, verdict: Verdict) -> int:
    """Retroactive: the first exercised step of what turned out to be this fault."""
    if verdict.kind == "nonfinite":
        return case.history.nonfinite_since
    if verdict.point == "param" and case.history.values_differ_at is not None:
        return case.history.values_differ_at
    if verdict.kind == "wrong-group":
        return case.history.parted_since
    if verdict.kind == "drift" and case.history.diverged_at is not None:
        return case.history.diverged_at
    return case.history.since


def goes_on(finding: Finding, case: Case, verdict: Verdict | None, step: int) -> Finding:
    """The same finding one check later: seen again, with what is new in its evidence and severity.

    `severity` only ever rises; a spread that stops growing does not make yesterday's jump harmless.
    """
    count = finding.count + (1 if step > finding.last_step else 0)
    if verdict is None or verdict.kind != finding.kind:
        still = finding.kind in SPREADING and not case.seen.param.same
        seen_again = replace(finding, last_step=step, count=count) if still else finding
        return with_evidence(seen_again, case, None)
    doubted = "values_elsewhere" in finding.evidence
    again = replace(
        finding,
        last_step=step,
        count=count,
        severity=worst((finding.severity, verdict.severity)),
        ratio=finding.ratio if (ratio := norm_ratio(case.seen)) is None else ratio,
        confidence=max(finding.confidence, confidence(verdict, streak(case, verdict), doubted=doubted)),
    )
    return with_evidence(again, case, verdict)


def with_evidence(finding: Finding, case: Case, verdict: Verdict | None) -> Finding:
    """Attach what this check showed: measures keep their maximum, facts their latest value."""
    seen, evidence = case.seen, case.history.evidence
    facts: dict[str, Any] = dict(finding.evidence)
    if seen.absent:
        facts["absent_ranks"] = list(seen.absent)
    if case.pattern not in compare.IDLE | {"uneven"}:
        facts["gradient"] = {"before": case.history.gradients, "reduction": _reduction(case)}
    if verdict and verdict.threshold:
        facts.setdefault("threshold", verdict.threshold)
    max_abs, max_rel, odd = finding.max_abs, finding.max_rel, finding.odd_ranks
    if finding.kind == "grad-presence" and seen.absent:
        odd = compare.outvoted(_by_presence(finding.ranks, seen.absent))
    if evidence is not None:
        facts.update(_facts(evidence))
        spread = evidence.param if evidence.param is not None else evidence.post
        if spread is not None:
            max_abs, max_rel = max(max_abs, spread.max_abs), max(max_rel, spread.max_rel)
        odd = odd or compare.outvoted(evidence.camps_post) or compare.outvoted(evidence.camps_param)
    return replace(finding, evidence=facts, max_abs=max_abs, max_rel=max_rel, odd_ranks=odd)


def _by_presence(ranks: tuple[int, ...], absent: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Ranks with and without a gradient, larger camp first."""
    camps = (tuple(r for r in ranks if r not in absent), absent)
    return tuple(sorted(camps, key=len, reverse=True))


def _reduction(case: Case) -> str:
    """What was seen to be done to the gradient, as far as it is known."""
    if case.seen.kept_lo:
        return "none"
    return "sum" if case.pattern == "copies/sum" else case.history.reduction


def _facts(evidence: Evidence) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "exact": evidence.exact,
        "deviation_pre": evidence.deviation_pre,
        "norms_pre": list(evidence.norms_pre),
        "norms_post": list(evidence.norms_post),
    }
    if evidence.zero_ranks:
        facts["zero_ranks"] = list(evidence.zero_ranks)
    for point, camps in (("param", evidence.camps_param), ("grad_post", evidence.camps_post)):
        if len(camps) > 1:
            facts[f"camps_{point}"] = [list(camp) for camp in camps]
    for point, spread in (("param", evidence.param), ("grad_post", evidence.post)):
        if spread is not None:
            facts[f"spread_{point}"] = {
                "max_abs": spread.max_abs, "max_rel": spread.max_rel, "l2": spread.l2,
                "differing": spread.differing, "elements": spread.elements,
            }  # fmt: skip
    return facts


def with_role(finding: Finding, case: Case, onset: int, causes: Iterable[tuple[Finding, int]]) -> Finding:
    """Decide cause or consequence.

    `causes` are the other causes of the group with the check at which they began.

    A consequence if and only if it is of a spreading kind and (a) was seen as bit-identical copies
    before, with a cause older than itself, or (b) began with equal values at the check at which
    values elsewhere first differed.
    """
    older = [c for c, began in causes if began < onset and c.kind not in KEEPING_EQUAL]
    source = [c for c, began in causes if began == onset and c.kind in AT_THE_SOURCE]
    if finding.kind in SPREADING:
        was_copy = case.history.copies_at is not None and case.history.copies_at < onset
        if was_copy and older:
            return replace(finding, role="consequence", caused_by=older[0].parameter)
        if source and case.history.values_equal_at_onset:
            return replace(finding, role="consequence", caused_by=source[0].parameter)
    if not any(c.kind in SPREADING | AT_THE_SOURCE for c in older):
        return finding
    facts = {**finding.evidence, "values_elsewhere": "had already moved apart"}
    return replace(finding, evidence=facts, confidence=round(max(0.0, finding.confidence - DOUBT), 4))


# ------------------------------------------------------------- findings that no row of the plan led to


def layout_finding(plan: WatchPlan, parameter: str, observed: str, step: int) -> Finding:
    """A `replica-layout` finding.

    Ranks disagree on what is replicated, or on the header of a buffer.
    """
    return _plain("replica-layout", plan, parameter, (observed, "the same on every rank"), step)


def skipped_finding(plan: WatchPlan, step: int, count: int) -> Finding:
    """A `finalize-skipped` finding for the `count` steps up to `step` in which the finalizer did not run."""
    finding = _plain(
        "finalize-skipped",
        plan,
        "(every replicated parameter)",
        ("not called", "once per step"),
        step,
    )
    return replace(finding, first_step=step - count + 1, count=count)


def presence_finding(plan: WatchPlan, seen: RowObservation, step: int) -> Finding:
    """A `grad-presence` finding from the entry side alone, before any history of it exists."""
    name = plan.replicas[seen.index].name
    finding = _plain("grad-presence", plan, name, ("some ranks only", "every rank"), step)
    return replace(finding, evidence={"absent_ranks": list(seen.absent)})


def state_finding(plan: WatchPlan, parameter: str, labels: tuple[str, ...], step: int) -> Finding:
    """An `optimizer-mismatch` finding: equal values, and masters or moments that differ between copies."""
    finding = _plain("optimizer-mismatch", plan, parameter, (f"{', '.join(labels)} differ", "the same"), step)
    return replace(finding, point="param", evidence={"states": list(labels)})


def _plain(kind: str, plan: WatchPlan, parameter: str, observed: tuple[str, str], step: int) -> Finding:
    rule = BY_KIND[kind]
    return Finding(
        kind=kind, code=rule.code, parameter=parameter, point="grad_pre", group=plan.axis, ranks=plan.ranks,
        first_step=step, last_step=step, count=1, severity="error", role="cause", caused_by=None, confidence=EXACT,
        observed=observed[0], expected=observed[1], ratio=None, max_abs=0.0, max_rel=0.0, odd_ranks=(),
        advice=rule.next_step,
    )  # fmt: skip
