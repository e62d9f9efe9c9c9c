"""Which comparison is a fault: one pure function per kind, tried in the order of `JUDGES`.

Each takes a `Case` (one parameter at one check, with its history) and returns a `Verdict` or None.
The table of DESIGN section 3 is this file. Everything here is computed from reduced or gathered
data, never from local data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tpwatch.config import Config
from tpwatch.diagnose import compare
from tpwatch.diagnose.history import History
from tpwatch.records import Evidence, ReplicaSpec, RowObservation, Severity

EXACT = 0.99
"""Confidence ceiling of what bit equality, presence or gathered elements show."""

SKETCHED = 0.9
"""Confidence ceiling of what is estimated from sketches."""

SCALER_PATIENCE = 32
"""Non-finite steps in a row that a loss scaler explains: halving an initial scale of 2^32 down to
1."""


@dataclass(frozen=True, slots=True)
class Case:
    """One parameter at one check."""

    spec: ReplicaSpec
    seen: RowObservation
    history: History
    pattern: compare.Pattern
    group_size: int
    loss_scaler: bool
    config: Config

    @property
    def exact(self) -> bool:
        """True if the latest evidence was computed from the elements themselves."""
        return self.history.evidence is not None and self.history.evidence.exact


@dataclass(frozen=True, slots=True)
class Verdict:
    """A fault that the evidence fits; counts once it has held for `patience` exercised checks."""

    kind: str
    point: str
    observed: str
    expected: str
    severity: Severity
    ceiling: float
    patience: int
    needs_gathers: int = 0
    """Gathers that must have agreed: 0 if tier 1 alone or gathered elements decide."""
    threshold: str = ""
    """The user's threshold that was exceeded, as text; such a verdict needs no patience."""


def suspicion(pattern: compare.Pattern, seen: RowObservation, history: History) -> str:
    """The family of explanations that an observation belongs to; streaks are counted per family.

    `unreduced` covers missing-reduce and drift (told apart by tier 2), and goes on through a step
    whose gradients happen to be bit-identical while the values have already moved apart.
    """
    apart = not seen.param.same and not history.born_different
    if pattern in ("uneven", "copies/sum"):
        return pattern
    # Gradients differ from the step of a write on: that is its effect, and no other explanation of it.
    unexplained = history.diverged_at is None and history.values_were_equal
    if apart and (unexplained or history.suspicion == "written"):
        return "written"
    if pattern in ("copies/scaled", "copies/other", "woken"):
        return "apart" if apart and history.diverged_at is not None else pattern
    if pattern == "different/kept" or (apart and pattern == "copies/kept"):
        return "unreduced"
    if pattern == "different/changed":
        return "apart" if apart else "changed"
    return "healthy"


def judge(case: Case) -> Verdict | None:
    """The first verdict that fits, or None.

    Past one of the user's thresholds it is an error and needs no patience.
    """
    verdict = next((found for check in JUDGES if (found := check(case))), None)
    over = threshold(case)
    return replace(verdict, threshold=over, severity="error") if verdict and over else verdict


def status(case: Case) -> str:
    """`healthy`, `unverified` (tier 2 is still to come) or `undecided`, for a case without a verdict."""
    history = case.history
    if history.suspicion in ("healthy", "written", "copies/sum"):  # a sum without a verdict was declared
        return "healthy"
    if history.suspicion == "changed":
        if history.reduction == "unknown":
            return "unverified"
        intended = history.reduction == case.spec.rule and (case.spec.declared or case.spec.rule == "avg")
        known = history.reduction in ("sum", "avg") and history.gradients != "undecided"
        return "healthy" if known or intended else "undecided"
    return "undecided" if history.gathers >= case.config.patience else "unverified"


# --------------------------------------------------------------------------------------- one per kind


def grad_presence(case: Case) -> Verdict | None:
    """A gradient on some ranks only; certain at once, and urgent.

    The framework's reduction may hang next.
    """
    if case.pattern != "uneven":
        return None
    return Verdict("grad-presence", "grad_pre", "some ranks only", "every rank", "error", EXACT, 1)


def init_mismatch(case: Case) -> Verdict | None:
    """Values that differed at the first check, and still do."""
    if not case.history.born_different or case.seen.param.same:
        return None
    return Verdict("init-mismatch", "param", "different values", "bit-identical values", "error", EXACT, 1)


def nonfinite(case: Case) -> Verdict | None:
    """NaN or Inf that no loss scaler will skip, or that only some ranks see, or that persists."""
    points = {"param": case.seen.param, "grad_pre": case.seen.pre, "grad_post": case.seen.post}
    if not any(p.nonfinite_hi for p in points.values()):
        return None
    if case.loss_scaler and not lopsided(case.spec, case.seen) and case.history.nonfinite_streak < SCALER_PATIENCE:
        return None
    point = case.history.nonfinite_point
    some = any(p.nonfinite_lo == 0 < p.nonfinite_hi for p in points.values())
    observed = "non-finite on some ranks" if some else "non-finite on all ranks"
    return Verdict("nonfinite", point, observed, "finite", "error", EXACT, case.config.patience)


def lopsided(spec: ReplicaSpec, seen: RowObservation) -> bool:
    """True if a gradient that is reduced over the group is non-finite on some of its ranks only.

    One that nothing reduces may well be: each rank has its own part of it, and the scaler skips the step on all.
    """
    return spec.rule != "none" and seen.post.nonfinite_lo == 0 < seen.post.nonfinite_hi


def double_reduce(case: Case) -> Verdict | None:
    """Copies that were summed."""
    if case.spec.declared and case.spec.rule == "sum":
        return None
    if case.pattern == "copies/sum":
        patience, over = case.config.patience, over_ratio(case)
        return Verdict("double-reduce", "grad_post", "sum", "avg|none", "error", EXACT, patience, threshold=over)
    near = case.history.suspicion == "changed" and case.history.gradients == "near-copies"
    if near and case.history.reduction == "sum":
        return _gathered(case, "double-reduce", "sum", "avg|none")
    return None


def wrong_scale(case: Case) -> Verdict | None:
    """Copies multiplied past the threshold on the ratio of norms."""
    over = over_ratio(case)
    if not over or case.pattern != "copies/scaled":
        return None
    observed = f"x{norm_ratio(case.seen):.4g}"
    return Verdict("wrong-scale", "grad_post", observed, "avg|none", "error", EXACT, 1, threshold=over)


def missing_reduce(case: Case) -> Verdict | None:
    """Partials that were left alone, unless that is what was declared."""
    declared = case.spec.rule if case.spec.declared else ""
    if case.history.suspicion != "unreduced" or declared == "none":
        return None
    if case.history.gradients != "partials" and declared != "sum":
        return None
    return _gathered(case, "missing-reduce", "none", declared or "sum")


def averaged_partial(case: Case) -> Verdict | None:
    """Partials that were averaged though no marker and no declaration asks for the mean."""
    partial = case.history.suspicion in ("changed", "apart") and case.history.gradients == "partials"
    if not partial or case.history.reduction != "avg" or case.spec.rule == "avg":
        return None
    return _gathered(case, "averaged-partial", "avg", "sum")


def wrong_group(case: Case) -> Verdict | None:
    """A reduction that left camps of ranks, each agreeing inside."""
    evidence = case.history.evidence
    if case.history.suspicion not in _REDUCED or case.seen.post.same or evidence is None:
        return None
    camps = len(evidence.camps_post)
    if not 1 < camps < case.group_size or evidence.deviation_post < compare.NEAR_COPIES:
        return None
    return _gathered(case, "wrong-group", "camps", "one reduction over the whole group")


_REDUCED = frozenset({"changed", "apart", "copies/scaled", "copies/other"})


def drift(case: Case) -> Verdict | None:
    """Copies that nothing keeps equal.

    Rounding-level gradients left alone (any, if that was declared), or values moving apart since.
    """
    declared = case.spec.declared and case.spec.rule == "none"
    alike = declared or case.history.gradients in ("copies", "near-copies")
    unreduced = case.history.suspicion == "unreduced" and alike
    if not unreduced and case.history.suspicion != "apart" and not threshold(case):
        return None
    ceiling = EXACT if case.exact else SKETCHED
    severity = _BY_TREND[case.history.trend]
    return Verdict("drift", "grad_post", "none", "avg", severity, ceiling, case.config.patience)


_BY_TREND: dict[str, Severity] = {"constant": "info", "growing": "warning", "jump": "error"}


def external_write(case: Case) -> Verdict | None:
    """Values that differ though every reduced gradient so far was bit-identical."""
    if case.history.suspicion != "written":
        return None
    ceiling = SKETCHED if case.config.interval == 1 else SKETCHED / 2
    return Verdict(
        "external-write",
        "param",
        "values differ",
        "values equal",
        "warning",
        ceiling,
        case.config.patience,
    )


JUDGES: tuple[Callable[[Case], Verdict | None], ...] = (
    grad_presence, init_mismatch, nonfinite, double_reduce, wrong_scale, missing_reduce, averaged_partial,
    wrong_group, external_write, drift,
)  # fmt: skip


# --------------------------------------------------------------------------------------------- helpers


def _gathered(case: Case, kind: str, observed: str, expected: str) -> Verdict:
    """A verdict that rests on tier 2.

    Sketches must agree `patience` times, gathered elements need not.
    """
    patience = case.config.patience
    if case.exact:
        return Verdict(kind, "grad_post", observed, expected, "error", EXACT, patience, 1)
    return Verdict(kind, "grad_post", observed, expected, "error", SKETCHED, patience, patience)


def threshold(case: Case) -> str:
    """Which of the user's limits on the spread of values the latest gather exceeds, as text."""
    evidence: Evidence | None = case.history.evidence
    if evidence is None or evidence.param is None or case.history.born_different:
        return ""
    limits, spread = case.config.thresholds, evidence.param
    if limits.max_abs is not None and spread.max_abs > limits.max_abs:
        return f"max_abs {spread.max_abs:.6g} > {limits.max_abs:g}"
    if limits.max_rel is not None and spread.max_rel > limits.max_rel:
        return f"max_rel {spread.max_rel:.6g} > {limits.max_rel:g}"
    return ""


def over_ratio(case: Case) -> str:
    """The user's limit on the ratio of norms, if these copies exceed it, as text."""
    limit, ratio = case.config.thresholds.ratio, norm_ratio(case.seen)
    return f"ratio {ratio:.6g} > {limit:g}" if limit is not None and ratio is not None and ratio > limit else ""


def norm_ratio(seen: RowObservation) -> float | None:
    """norm(post) / norm(pre) where both are the same on every rank, else None.

    Norms, not squares.
    """
    if not (seen.pre.same and seen.post.same) or seen.pre.l2_hi <= 0.0:
        return None
    return float((seen.post.l2_hi / seen.pre.l2_hi) ** 0.5)
