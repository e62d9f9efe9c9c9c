"""Where several rules meet: what is open or idle, what was declared, what came first, what a finding says."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.unit._builders import (
    GRADIENT,
    VALUE,
    ZERO,
    Picture,
    Run,
    Vector,
    akin,
    apart,
    averaged,
    copies,
    gathered,
    in_camps,
    kept,
    observed,
    outside,
    partials,
    plan_of,
    silent,
    spec,
    summed,
    times,
    watched,
)
from tpwatch.config import Config, Thresholds
from tpwatch.diagnose import Diagnosis, layout_finding, presence_finding, skipped_finding
from tpwatch.diagnose.rules import BY_KIND

MOVED = apart(by=0.5, vector=VALUE)
"""Values of two ranks that are far apart."""

NAN: Vector = (math.nan, 1.0, 1.0, 1.0)
FINITE: Vector = (1.0, 1.0, 1.0, 1.0)

UNEVEN = kept([GRADIENT, None])


FAULTY = {
    "near copies, none, not bit-identical": (kept(apart()), "drift"),
    "copies, sum": (summed(copies()), "double-reduce"),
    "near copies, sum": (summed(apart()), "double-reduce"),
    "partials, none": (kept(partials()), "missing-reduce"),
    "partials, avg": (averaged(partials()), "averaged-partial"),
    "uneven presence, none": (UNEVEN, "grad-presence"),
    "uneven presence, sum": (summed([GRADIENT, None]), "grad-presence"),
    "partials of four, post in two camps": (in_camps(partials(4), [[0, 1], [2, 3]]), "wrong-group"),
    "near copies of four, post in two camps": (in_camps(apart(4), [[0, 1, 2]]), "wrong-group"),
    "copies of four, post in two camps": (in_camps(copies(4), [[0, 1, 2]]), "wrong-group"),
    "copies, other values": (kept(copies(), values=MOVED), "init-mismatch"),
    "not finite": (kept([NAN, NAN]), "nonfinite"),
}


@pytest.mark.parametrize(("picture", "kind"), FAULTY.values(), ids=FAULTY)
def test_every_finding_is_complete(picture: Picture, kind: str) -> None:
    """Code, advice, ranks of the plan and a confidence below certainty stand in each kind that a diagnosis makes."""
    run = watched(size=picture.size)
    run.steps(8, picture)
    assert (run.only.kind, run.only.code) == (kind, BY_KIND[kind].code)
    assert run.only.advice == BY_KIND[kind].next_step
    assert run.only.ranks == tuple(range(picture.size))
    assert 0.0 < run.only.confidence <= 0.99


# ------------------------------------------------------------------------------- exercised or not


def test_a_written_value_does_not_exercise_a_gradient() -> None:
    """Values may be found apart while no claim is made about the reduction."""
    run = watched()
    run.step(silent())
    run.steps(3, silent(values=MOVED))
    assert run.only.kind == "external-write"
    assert run.diagnosis.not_exercised == ("p",)


IDLE_STEPS = {"silent": silent(), "outside": outside(), "silent, values apart": silent(values=MOVED)}
PENDING = {
    "missing-reduce": kept(partials()),
    "double-reduce": summed(copies()),
    "averaged-partial": averaged(partials()),
}


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "sketched"])
@pytest.mark.parametrize("idle", IDLE_STEPS.values(), ids=IDLE_STEPS)
@pytest.mark.parametrize(("kind", "picture"), PENDING.items(), ids=PENDING)
@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_step_that_says_nothing_changes_nothing(
    kind: str, picture: Picture, idle: Picture, after: int, *, exact: bool
) -> None:
    """Zero gradients, or a call for another chunk, in the middle of a fault: neither continued, broken nor renamed."""
    if kind != "missing-reduce":
        idle = replace(idle, values=())
    run = watched(exact=exact, leaves_out_settled=True)
    run.steps(after, picture)
    run.steps(3, idle)
    run.steps(6, picture)
    assert (run.only.kind, run.only.first_step) == (kind, 1)


def test_idle_steps_leave_the_evidence_of_a_finding_alone() -> None:
    """Which ranks had a zero gradient is a fact of an exercised step."""
    run = watched()
    run.steps(4, kept(partials()))
    run.steps(2, silent(values=MOVED))
    assert "zero_ranks" not in run.only.evidence
    assert min(run.only.evidence["norms_pre"]) > 0


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "sketched"])
def test_every_other_step_silent_is_verified_all_the_same(*, exact: bool) -> None:
    """A gather that hits a silent step is not one of those that decide."""
    run = watched(exact=exact, leaves_out_settled=True)
    run.steps(24, lambda step: summed(partials()) if step % 2 else silent())
    assert run.diagnosis.unverified == ()
    run = watched(exact=exact, leaves_out_settled=True)
    run.steps(24, lambda step: averaged(partials()) if step % 2 else silent())
    assert (run.only.kind, run.only.first_step) == ("averaged-partial", 1)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "sketched"])
@pytest.mark.parametrize(("kind", "picture"), PENDING.items(), ids=PENDING)
@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_comparison_of_values_hides_no_fault(kind: str, picture: Picture, after: int, *, exact: bool) -> None:
    """A check before a save, in the middle of a fault, changes nothing about it."""
    run = watched(exact=exact, leaves_out_settled=True)
    run.steps(after, picture)
    run.values(picture)
    run.steps(6, picture)
    assert (run.only.kind, run.only.first_step) == (kind, 1)


# ------------------------------------------------------------------------------------------- patience

PATIENT = {
    "double-reduce": (summed(copies()), True, 0),
    "missing-reduce, exact": (kept(partials()), True, 0),
    "missing-reduce, sketched": (kept(partials()), False, 1),
    "averaged-partial, exact": (averaged(partials()), True, 0),
    "averaged-partial, sketched": (averaged(partials()), False, 1),
    "nonfinite": (kept([NAN, NAN]), True, 0),
    "drift": (kept(apart()), True, 0),
}


@pytest.mark.parametrize("patience", [1, 2, 3, 5])
@pytest.mark.parametrize(("picture", "exact", "late"), PATIENT.values(), ids=PATIENT)
def test_patience_is_what_it_takes(picture: Picture, late: int, patience: int, *, exact: bool) -> None:
    """Nothing one check before; then one finding dated back to the first step.

    What is flagged at one check is gathered at the next: sketches must agree `patience` times from
    the second step on, so they are one step late; gathered elements decide at their first gather.
    """
    gathered_first = picture.before[0] != picture.before[1]
    needed = max(patience + late, 2 if gathered_first else 1)
    run = watched(config=Config(patience=patience), exact=exact)
    run.steps(needed - 1, picture)
    assert run.findings == []
    run.step(picture)
    assert (run.only.first_step, run.only.last_step) == (1, needed)


@pytest.mark.parametrize(
    ("kind", "picture"), [("grad-presence", UNEVEN), ("init-mismatch", FAULTY["copies, other values"][0])]
)
def test_urgent_kinds_need_no_patience(kind: str, picture: Picture) -> None:
    """One look is enough for uneven presence and for values that differ at the start."""
    run = watched(config=Config(patience=9))
    (finding,) = run.step(picture).new
    assert (finding.kind, finding.count, finding.confidence) == (kind, 1, 0.99)


def test_a_nonfinite_gradient_needs_its_own_patience_and_date() -> None:
    """Ten healthy steps before it are not steps of the fault."""
    run = watched()
    run.steps(10, kept(copies()))
    run.steps(2, kept([NAN, NAN]))
    assert run.findings == []
    run.step(kept([NAN, NAN]))
    assert (run.only.kind, run.only.first_step, run.only.count) == ("nonfinite", 11, 3)


def test_sketched_evidence_is_less_sure_than_elements() -> None:
    """The ceiling of what was estimated lies below that of what was compared element by element."""
    exact, sketched = watched(), watched(exact=False)
    for run in (exact, sketched):
        run.steps(20, kept(partials()))
    assert exact.only.confidence > 0.9 > sketched.only.confidence - 1e-9


def test_a_finding_is_written_again_when_its_count_has_doubled() -> None:
    """So an event file that ends in a kill is at most half behind."""
    run = watched()
    outcomes = run.steps(24, summed(copies()))
    assert [step for step, o in enumerate(outcomes, 1) if o.grown] == [6, 12, 24]


def test_a_fault_that_stops_keeps_its_last_step() -> None:
    """The finding stays, dated from first to last sight."""
    run = watched()
    run.steps(4, summed(copies()))
    run.steps(4, kept(copies()))
    assert (run.only.first_step, run.only.last_step, run.only.count) == (1, 4, 4)


def test_a_mean_that_was_a_sum_began_where_it_was_first_seen() -> None:
    """Ten checks of the right reduction are no part of the fault that follows."""
    run = watched(config=Config(deep_interval=1))
    run.steps(10, summed(partials()))
    run.steps(2, averaged(partials()))
    assert run.findings == []
    run.steps(2, averaged(partials()))
    assert (run.only.kind, run.only.first_step) == ("averaged-partial", 11)
    assert run.only.count <= 4


def test_camps_need_a_patience_of_their_own() -> None:
    """Ten checks of a right sum before it are no checks of a wrong group."""
    run = watched(size=4, config=Config(deep_interval=1))
    camps = in_camps(partials(4), [[0, 1], [2, 3]])
    run.steps(10, summed(partials(4)))
    run.steps(2, camps)
    assert run.findings == []
    run.step(camps)
    assert (run.only.kind, run.only.first_step, run.only.count) == ("wrong-group", 11, 3)


# --------------------------------------------------------------------------- one fault, one finding


def test_identical_gradients_while_values_are_apart_go_on() -> None:
    """A step whose partials happen to be equal does not turn a missing sum into drift."""
    run = watched(exact=False)
    run.steps(3, lambda step: kept(partials(), values=apart(by=0.01 * (step - 1), vector=VALUE)))
    run.step(kept(copies(), values=MOVED))
    run.steps(3, kept(partials(), values=MOVED))
    assert (run.only.kind, run.only.first_step) == ("missing-reduce", 1)


def test_another_explanation_starts_from_nothing() -> None:
    """What was gathered for the one before is no evidence for it: deviations, and the gathers that must agree."""
    run = watched()
    run.steps(10, kept(akin(0.06)))
    run.step(kept(copies()))
    run.steps(3, kept(partials()))
    assert (run.only.kind, run.only.first_step) == ("missing-reduce", 12)
    run = watched(exact=False)
    run.steps(3, kept(partials()))
    run.step(kept(copies()))
    run.steps(3, kept(partials()))
    assert run.findings == []
    run.step(kept(partials()))
    assert run.only.first_step == 5


def test_a_finding_states_no_facts_of_another_explanation() -> None:
    """Two partial gradients, then copies that are summed: the ranks whose part was zero are none of its evidence."""
    run = watched()
    run.steps(2, kept([ZERO, GRADIENT]))
    run.step(kept(copies()))
    run.steps(3, summed(copies()))
    assert run.only.kind == "double-reduce"
    assert set(run.only.evidence) == {"gradient", "norms_pre", "norms_post"}
    assert len(set(run.only.evidence["norms_pre"])) == 1


def test_copies_reduced_in_camps_began_with_the_camps() -> None:
    """Values move apart a step later; that is an effect, not the beginning."""
    camps = in_camps(copies(4), [[0, 1, 2]])
    run = watched(size=4)
    run.step(camps)
    run.steps(5, lambda step: replace(camps, values=apart(4, by=0.01 * (step - 1), vector=VALUE)))
    assert (run.only.kind, run.only.first_step) == ("wrong-group", 1)


def test_copies_that_the_reduction_sets_apart_are_found() -> None:
    """A factor that differs by rank breaks equal copies apart: no replica may do so unnamed."""
    odd = Picture(copies(), [GRADIENT, tuple(3 * x for x in GRADIENT)])
    run = watched()
    run.step(odd)
    run.steps(6, lambda step: replace(odd, values=apart(by=0.01 * (step - 1), vector=VALUE)))
    assert (run.only.kind, run.only.role, run.only.first_step) == ("drift", "cause", 1)


# ------------------------------------------------------------------------- causes and consequences


def drifting(step: int) -> Picture:
    """Near copies left alone, of which the values move apart from step 2 on."""
    return kept(apart(), values=apart(by=1e-6 * (step - 1), vector=VALUE))


def role_of(run: Run, name: str) -> tuple[str, str | None]:
    """Role and supposed cause of the finding of this parameter."""
    (finding,) = (f for f in run.findings if f.parameter == name)
    return finding.role, finding.caused_by


@pytest.mark.parametrize("names", [("source", "behind"), ("behind", "source")])
def test_what_first_differs_with_an_external_write_is_its_consequence(names: tuple[str, str]) -> None:
    """(b) In whatever order the two stand in the model."""
    run = watched(*names)
    run.steps(4, kept(copies()), kept(copies()))
    then = {"source": kept(apart(), values=MOVED), "behind": kept(apart(by=1e-5))}
    run.steps(5, *(then[name] for name in names))
    assert run.named["source"] == "external-write"
    assert role_of(run, "source") == ("cause", None)
    assert role_of(run, "behind") == ("consequence", "source")


@pytest.mark.parametrize(
    "harmless", [summed(copies()), averaged(partials())], ids=["double-reduce", "averaged-partial"]
)
def test_a_fault_that_keeps_copies_equal_explains_no_other(harmless: Picture) -> None:
    """A sum of copies or a mean of partials moves no values apart, so what does later is a cause."""
    run = watched("wrong-factor", "late")
    run.steps(4, harmless, kept(copies()))
    run.steps(6, harmless, kept(partials()))
    assert role_of(run, "late") == ("cause", None)
    late = next(f for f in run.findings if f.parameter == "late")
    assert "values_elsewhere" not in late.evidence


def test_copies_first_seen_in_camps_were_no_healthy_copies() -> None:
    """Equal before the reduction and not after it: a cause of its own, though another one is older."""
    camps = in_camps(copies(4), [[0, 1, 2]])
    run = watched("cause", "late", size=4)
    run.step(kept(partials(4)), silent(4))
    run.step(kept(partials(4)), camps)
    run.steps(6, kept(partials(4)), lambda step: replace(camps, values=apart(4, by=0.01 * step, vector=VALUE)))
    assert run.named["late"] == "wrong-group"
    assert role_of(run, "late") == ("cause", None)


# ---------------------------------------------------------------------------------- severity of drift


def of_spread(spreads: list[float]) -> Callable[[int], Picture]:
    """Near copies left alone whose values are apart by the given amounts, from step 2 on."""
    return lambda step: kept(apart(), values=apart(by=spreads[step - 2] if step > 1 else 0.0, vector=VALUE))


def severity_after(spreads: list[float]) -> str:
    """Severity of the drift after these spreads of values."""
    run = watched()
    run.steps(len(spreads) + 1, of_spread(spreads))
    assert run.only.kind == "drift"
    return run.only.severity


@pytest.mark.parametrize(
    ("spreads", "severity"),
    [
        ([1e-6] * 20, "info"),
        ([1e-6, 1.2e-6, 0.9e-6, 1.1e-6, 1e-6, 1.2e-6], "info"),
        ([1e-6, 1.1e-6, 1.15e-6, 1.2e-6], "info"),
        ([1e-6, 1.1e-6, 1.2e-6, 1.3e-6], "warning"),
        ([1e-6 * 1.1**k for k in range(16)], "warning"),
        ([1e-6] * 6 + [0.9e-5], "info"),
        ([1e-6] * 6 + [1.1e-5], "error"),
    ],
    ids=[
        "constant",
        "noisy",
        "grown by 20 %",
        "grown by 30 %",
        "ten per cent a step",
        "ninefold once",
        "elevenfold once",
    ],
)
def test_drift_is_as_severe_as_its_growth(spreads: list[float], severity: str) -> None:
    """A constant spread of rounding is information, growth a warning, a jump an error."""
    assert severity_after(spreads) == severity


def test_three_spreads_are_no_trend() -> None:
    """Growth is read from four of them."""
    assert severity_after([1e-6, 2e-6, 3e-6]) == "info"
    assert severity_after([1e-6, 2e-6, 3e-6, 4e-6]) == "warning"


def test_severity_never_falls() -> None:
    """Also when all spreads of before the jump have left the window."""
    run = watched()
    outcomes = run.steps(40, of_spread([1e-6] * 6 + [1e-4] * 40))
    assert run.only.severity == "error"
    assert [f.severity for o in outcomes for f in o.new] == ["info", "error"]


@pytest.mark.parametrize(("last", "written_at"), [(1.9e-6, []), (2.1e-6, [5])])
def test_a_finding_is_written_again_when_its_spread_has_doubled(last: float, written_at: list[int]) -> None:
    """Also between two doublings of its count, of which the next would be at step 6."""
    run = watched()
    outcomes = run.steps(5, of_spread([1e-6, 1e-6, 1e-6, last]))
    assert [step for step, o in enumerate(outcomes, 1) if o.grown] == written_at


@pytest.mark.parametrize(("growth", "severity"), [(0.0, "info"), (0.3, "warning"), (30.0, "error")])
def test_values_too_large_to_gather_have_a_trend(growth: float, severity: str) -> None:
    """Read from their relative deviation: constant, a tenth more at each of four steps, or a jump at the last."""
    run = watched(fits=False)
    run.steps(5, of_spread([1e-3 * (1 + growth * k / 3) for k in range(4)] if growth < 1 else [1e-3] * 3 + [growth]))
    assert (run.only.kind, run.only.severity) == ("drift", severity)


# ----------------------------------------------------------------------------------------- thresholds


def limited(**limits: float) -> Config:
    """A configuration with these thresholds."""
    return Config(thresholds=Thresholds(**limits))


def test_a_known_drift_that_crosses_a_threshold_is_news() -> None:
    """It was information; it is said again, once, at the step that exceeds the limit."""
    run = watched(config=limited(max_abs=4.5e-6))
    outcomes = run.steps(9, of_spread([k * 1e-6 for k in range(1, 9)]))
    crossed = [(step, f) for step, o in enumerate(outcomes, 1) for f in o.new if "threshold" in f.evidence]
    assert [step for step, _ in crossed] == [6]
    assert crossed[0][1].severity == "error"


@pytest.mark.parametrize(("limit", "found"), [(1.99, True), (2.01, False)])
def test_past_ratio_a_double_sum_needs_no_patience(limit: float, *, found: bool) -> None:
    """The factor of a sum is a factor too."""
    run = watched(config=limited(ratio=limit))
    run.step(summed(copies()))
    assert [f.kind for f in run.findings] == ["double-reduce"] * found
    run.steps(2, summed(copies()))
    assert ("threshold" in run.only.evidence) == found


def test_a_threshold_does_not_apply_to_partials() -> None:
    """The norm of a sum of partials may be anything."""
    run = watched(config=limited(ratio=0.01))
    run.steps(5, summed(partials()))
    assert run.findings == []


def test_thresholds_do_not_rename_an_external_write() -> None:
    """Past `max_abs` it is said at once, as what it is."""
    run = watched(config=limited(max_abs=0.1))
    run.steps(3, kept(copies()))
    run.steps(2, kept(copies(), values=MOVED))
    assert (run.only.kind, run.only.severity) == ("external-write", "error")


# ------------------------------------------------------------------------------------------------ fp16

OVERFLOW = kept([NAN, NAN])


def test_nonfinite_before_and_everywhere_after_is_an_overflow() -> None:
    """One rank's overflow that the reduction has spread to all is skipped by all."""
    run = watched(loss_scaler=True)
    run.steps(5, Picture([FINITE, NAN], [NAN, NAN]))
    assert run.findings == []


def test_an_overflow_that_persists_is_a_fault() -> None:
    """Thirty-two steps halve any scale down to one; the next one is no matter of scale."""
    run = watched(loss_scaler=True)
    run.steps(4, kept(copies()))
    run.steps(32, OVERFLOW)
    assert run.findings == []
    run.step(OVERFLOW)
    assert (run.only.kind, run.only.first_step) == ("nonfinite", 5)


def test_nonfinite_is_placed_where_it_began() -> None:
    """The update of step 3 spoils the values of step 4: the gradient of step 3 came first."""
    run = watched()
    run.steps(2, kept(copies()))
    run.step(kept([NAN, NAN]))
    run.steps(2, kept([NAN, NAN], values=[NAN, NAN]))
    assert (run.only.point, run.only.first_step) == ("grad_pre", 3)


def test_nonfinite_values_are_dated_to_their_update() -> None:
    """A value that is not finite at step 3 was made by update 2."""
    run = watched()
    run.steps(2, kept(copies()))
    run.steps(3, kept([NAN, NAN], values=[NAN, NAN]))
    assert (run.only.point, run.only.first_step) == ("param", 2)


def test_a_comparison_of_values_breaks_no_row_of_nonfinite_gradients() -> None:
    """It has no gradients, finite or not."""
    run = watched()
    run.steps(2, kept([NAN, NAN]))
    run.values(kept([NAN, NAN]))
    run.step(kept([NAN, NAN]))
    assert (run.only.kind, run.only.count) == ("nonfinite", 3)


def test_values_that_differ_at_a_skipped_first_step_are_an_init_mismatch() -> None:
    """The first steps of fp16 training overflow; the initial values were compared all the same."""
    run = watched(loss_scaler=True)
    run.steps(3, replace(OVERFLOW, values=MOVED))
    run.step(kept(copies(), values=MOVED))
    assert (run.only.kind, run.only.first_step) == ("init-mismatch", 0)


# ------------------------------------------------------------------------------------------- presence


def test_presence_foretold_is_what_is_found() -> None:
    """The line written while training may already hang agrees with the verdict in all that it states."""
    run = watched(size=3)
    uneven = kept([GRADIENT, None, GRADIENT])
    foretold = presence_finding(run.plan, observed(uneven), 1)
    run.step(uneven)
    same = ("kind", "code", "parameter", "point", "ranks", "first_step", "severity", "role", "observed", "expected")
    assert [getattr(foretold, f) for f in same] == [getattr(run.only, f) for f in same]
    assert foretold.evidence["absent_ranks"] == run.only.evidence["absent_ranks"]


# ----------------------------------------------------------------------------------- what is not known


def test_partials_are_unverified_until_gathered() -> None:
    """One step of changed partials could be a sum or a mean; the next, gathered, tells."""
    run = watched()
    run.step(summed(partials()))
    assert run.diagnosis.unverified == ("p",)
    run.step(summed(partials()))
    assert run.diagnosis.unverified == ()


GREY = {
    "below": (0.029, True), "at the lower edge": (0.0301, False), "middle": (0.06, False),
    "at the upper edge": (0.0999, False), "above": (0.101, True),
}  # fmt: skip


@pytest.mark.parametrize(("deviation", "decided"), GREY.values(), ids=GREY)
def test_a_sum_in_the_grey_zone_is_not_called_healthy(deviation: float, *, decided: bool) -> None:
    """Near copies summed are a fault and partials summed are right: between them nothing is claimed."""
    run = watched()
    run.steps(20, summed(akin(deviation)))
    assert run.diagnosis.unverified == (() if decided else ("p",))
    assert [f.kind for f in run.findings] == ["double-reduce"] * (deviation < 0.03)


def test_a_grey_parameter_is_gathered_more_often_and_then_left() -> None:
    """Nine gathers of a borderline case, then only on deep checks."""
    run = watched(config=Config(deep_interval=40))
    run.steps(39, summed(akin(0.06)))
    assert sum(bool(asked) for asked in run.asked) == 9


def test_gathers_that_disagree_are_undecided() -> None:
    """A sum in one step and a mean in the next is neither."""
    run = watched()
    run.steps(10, lambda step: (summed if step % 2 else averaged)(partials()))
    assert run.findings == []
    assert run.diagnosis.unverified == ("p",)


# ----------------------------------------------------------------------------------- declared rules

DECLARED = {
    "sum of copies, declared sum": ("sum", summed(copies()), None),
    "sum of near copies, declared sum": ("sum", summed(apart()), None),
    "sum of copies, declared avg": ("avg", summed(copies()), "double-reduce"),
    "sum of copies, declared none": ("none", summed(copies()), "double-reduce"),
    "mean of partials, declared avg": ("avg", averaged(partials()), None),
    "mean of partials, declared sum": ("sum", averaged(partials()), "averaged-partial"),
    "partials left alone, declared sum": ("sum", kept(partials()), "missing-reduce"),
    "near copies left alone, declared sum": ("sum", kept(apart()), "missing-reduce"),
    "grey left alone, declared sum": ("sum", kept(akin(0.06)), "missing-reduce"),
    "near copies left alone, declared avg": ("avg", kept(apart()), "drift"),
    "grey sum, declared sum": ("sum", summed(akin(0.06)), None),
    "partials left alone, declared avg": ("avg", kept(partials()), "missing-reduce"),
    "partials left alone, declared none": ("none", kept(partials()), "drift"),
}


@pytest.mark.parametrize(("rule", "picture", "kind"), DECLARED.values(), ids=DECLARED)
def test_a_declared_rule_beats_inference(rule: str, picture: Picture, kind: str | None) -> None:
    """What the user says the gradient needs is what it is measured by."""
    run = watched(spec("p", rule=rule, declared=True))
    run.steps(8, picture)
    assert [f.kind for f in run.findings] == ([kind] if kind else [])
    assert run.diagnosis.unverified == ()


@pytest.mark.parametrize(("rule", "expected"), [("sum", "sum"), ("avg", "avg")])
def test_a_missing_reduction_names_the_declared_one(rule: str, expected: str) -> None:
    """What was expected is what the user said."""
    run = watched(spec("p", rule=rule, declared=True))
    run.steps(4, kept(partials()))
    assert run.only.expected == expected


def test_declared_none_is_information_while_nothing_moves() -> None:
    """The user knows that nobody reduces it; only values that move apart ever faster would be news."""
    run = watched(spec("p", rule="none", declared=True))
    run.steps(8, kept(partials()))
    assert not run.only.counts


# ----------------------------------------------------------------------------- several calls in a step


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "sketched"])
@pytest.mark.parametrize("own", [1, 2])
@pytest.mark.parametrize("pristine", [True, False])
def test_a_parameter_of_one_chunk_is_judged_by_its_call(own: int, *, exact: bool, pristine: bool) -> None:
    """In the other call it is out of scope: values that move apart there are no external write."""
    run = watched(exact=exact, pristine=pristine)
    for step in range(1, 9):
        values = apart(by=0.01 * (step - 1 + (not pristine)), vector=VALUE)
        for call in (1, 2):
            run.step((kept if call == own else _out)(partials(), values=values), call=call)
    assert (run.only.kind, run.only.first_step) == ("missing-reduce", 1)


def _out(_before: list[Vector], values: list[Vector]) -> Picture:
    return outside(values=values)


# ------------------------------------------------------------------------------------- asking for more


def test_settled_rows_need_not_be_handed_over() -> None:
    """Healthy rows are settled after `patience` checks; a fault, or what is open, never is."""
    run = watched("copies", "summed", "fault", "open", "silent")
    run.steps(5, kept(copies()), summed(partials()), summed(copies()), times(0.7, copies()), silent())
    assert run.diagnosis.unsettled(1) == {2, 3}


def test_values_that_stay_apart_keep_their_finding_alive() -> None:
    """Also in calls that do not handle the parameter, after it had been settled as healthy."""
    run = watched(config=Config(patience=1), leaves_out_settled=True)
    run.steps(2, kept(apart()))
    run.step(kept(copies()))
    run.steps(3, outside(values=MOVED))
    assert (run.only.kind, run.only.last_step) == ("drift", 6)


# ------------------------------------------------------------------ values: initial, written, unknown


def test_initial_values_that_differ_by_a_nan_are_an_init_mismatch() -> None:
    """At once: that copies differ is the root, and not every rank has the NaN."""
    run = watched()
    run.step(kept(copies(), values=[VALUE, (math.nan, *VALUE[1:])]))
    assert run.only.kind == "init-mismatch"


@pytest.mark.parametrize("reduction", [kept(copies()), summed(partials()), kept(partials()), silent()])
def test_different_initial_values_are_named_whatever_the_gradients(reduction: Picture) -> None:
    """Before the first update nothing but initialisation can have set copies apart."""
    run = watched()
    run.step(replace(reduction, values=MOVED))
    assert (run.only.kind, run.only.first_step, run.only.point) == ("init-mismatch", 0, "param")


def test_gradients_that_differ_because_of_a_write_do_not_rename_it() -> None:
    """Other values give other gradients from the very step on."""
    run = watched()
    run.steps(4, kept(copies()))
    run.steps(6, lambda step: kept(apart(by=1e-4), values=apart(by=0.5 + step * 1e-4, vector=VALUE)))
    assert (run.only.kind, run.only.first_step) == ("external-write", 4)


def test_values_never_seen_equal_are_no_external_write() -> None:
    """The second finalizer call of the first step sees what the first did: copies born different."""
    run = watched()
    for _ in range(5):
        run.step(outside(values=MOVED))
        run.step(kept(copies(), values=MOVED), call=2)
    assert run.only.kind == "init-mismatch"


# ---------------------------------------------------------------- findings that no row of the plan led to


def test_layout_findings_name_the_parameter_and_what_differs() -> None:
    """With the code and advice of the rule."""
    finding = layout_finding(plan_of("p"), "p", "shape: (4,) on rank 1, (5,) on the leader", 0)
    assert (finding.kind, finding.code, finding.severity, finding.counts) == ("replica-layout", "TPW301", "error", True)
    assert "(5,)" in finding.observed


def test_skipped_finalizers_are_dated_back() -> None:
    """Three steps up to step 7 began at step 5."""
    finding = skipped_finding(plan_of("p"), 7, 3)
    assert (finding.kind, finding.first_step, finding.last_step, finding.count) == ("finalize-skipped", 5, 7, 3)


def test_added_findings_replace_their_like() -> None:
    """The finalizer's protocol reports the same fault again with a higher count."""
    diagnosis = Diagnosis(plan_of("p"), Config())
    for count in (1, 2, 3):
        diagnosis.add(skipped_finding(diagnosis.plan, count, count))
    diagnosis.add(layout_finding(diagnosis.plan, "p", "missing on rank 1", 0))
    assert [(f.kind, f.count) for f in diagnosis.findings] == [("replica-layout", 1), ("finalize-skipped", 3)]


# -------------------------------------------------------------------------------- figures of a finding


def test_the_ratio_is_of_norms() -> None:
    """Four copies summed: four times the norm, sixteen times its square."""
    run = watched(size=4)
    run.steps(3, summed(copies(4)))
    assert run.only.ratio == pytest.approx(4.0)
    assert run.only.max_abs == 0.0


def test_partials_have_no_ratio() -> None:
    """Norms that differ by rank have no one ratio."""
    run = watched()
    run.steps(4, kept(partials()))
    assert run.only.ratio is None


def test_measures_keep_their_maximum() -> None:
    """A spread that shrinks again does not erase how far it went."""
    run = watched()
    run.steps(8, of_spread([1e-6, 5e-6, 2e-6, 1e-6, 1e-6, 1e-6, 1e-6]))
    assert run.only.max_abs == pytest.approx(5e-6)


def test_evidence_travels_in_the_finding() -> None:
    """Norms by rank, camps and deviation are those of the gathered pictures."""
    picture = kept(partials(3))
    run = watched(size=3)
    run.steps(3, picture)
    seen = gathered(picture)
    assert run.only.evidence["norms_pre"] == list(seen.norms_pre)
    assert run.only.evidence["deviation_pre"] == seen.deviation_pre
    assert run.only.evidence["camps_grad_post"] == [[0], [1], [2]]


def test_equal_copies_have_the_norm_of_one_on_every_rank() -> None:
    """They are never gathered: before and after the reduction, in the unit of the gradient, as the ratio has it."""
    run = watched(size=3)
    run.steps(3, summed(copies(3)))
    assert run.asked[-1] == {}
    norm = math.hypot(*GRADIENT)
    assert run.only.evidence["norms_pre"] == pytest.approx([norm] * 3)
    assert run.only.evidence["norms_post"] == pytest.approx([3 * norm] * 3)
    assert run.only.ratio == pytest.approx(3.0)


def test_copies_that_differ_have_the_norms_of_their_gather() -> None:
    """Smallest and largest do not tell whose they are; nor do earlier ones of copies that were still equal."""
    run = watched()
    run.step(kept(copies(), values=MOVED))
    parted = kept(partials(), values=MOVED)
    assert run.only.evidence["norms_pre"] == run.only.evidence["norms_post"]
    run.step(parted)
    assert run.only.evidence["norms_pre"] == list(gathered(parted).norms_pre)
    assert len(set(run.only.evidence["norms_pre"])) == 2


def test_there_is_no_norm_per_rank_without_a_gradient_or_a_gather() -> None:
    """A zero that nobody measured would be a claim, too."""
    run = watched()
    run.step(silent(values=MOVED))
    assert {"norms_pre", "norms_post"}.isdisjoint(run.only.evidence)
