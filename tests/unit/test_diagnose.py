"""From pictures to findings: the table of what can be concluded, patience, roles, severity, and what is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.unit._builders import (
    GRADIENT,
    VALUE,
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
from tpwatch.config import Config, Explain, Thresholds
from tpwatch.diagnose import Diagnosis, When, layout_finding, presence_finding, skipped_finding
from tpwatch.records import Finding

MOVED = apart(by=0.5, vector=VALUE)
"""Values of two ranks that are far apart."""

NAN: Vector = (math.nan, 1.0, 1.0, 1.0)
FINITE: Vector = (1.0, 1.0, 1.0, 1.0)

UNEVEN = kept([GRADIENT, None])


def loose_sum(size: int = 2) -> Picture:
    """Partials that were summed, each rank with a rounding error of its own."""
    right = summed(partials(size))
    return replace(
        right, after=[tuple(x * (1 + rank * 2.0**-30) for x in right.after[0] or ()) for rank in range(size)]
    )


# ------------------------------------------------------------------------------------------- the table

HEALTHY = {
    "copies, none": kept(copies()),
    "copies, avg": averaged(copies()),
    "near copies, avg": averaged(apart()),
    "partials, sum": summed(partials()),
    "partials, sum equal only to rounding": loose_sum(),
}

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

UNDECIDED = {
    "silent, post not zero": Picture([(0.0,) * 4] * 2, copies()),
    "copies, scaled": times(0.7, copies()),
    "copies, other": Picture(copies(), [(2.0, 1.0, -1.0, 0.5)] * 2),
    "partials, other": Picture(partials(), copies()),
}


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "sketched"])
@pytest.mark.parametrize("picture", HEALTHY.values(), ids=HEALTHY)
def test_healthy_rows_of_the_table(picture: Picture, *, exact: bool) -> None:
    """No finding, nothing unverified, nothing claimed to be unexercised."""
    run = watched(exact=exact)
    run.steps(8, picture)
    assert run.findings == []
    assert run.diagnosis.unverified == ()
    assert run.diagnosis.not_exercised == ()


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "sketched"])
@pytest.mark.parametrize(("picture", "kind"), FAULTY.values(), ids=FAULTY)
def test_faulty_rows_of_the_table(picture: Picture, kind: str, *, exact: bool) -> None:
    """One finding of that kind, a cause, dated to the first step whose gradients or values showed it."""
    run = watched(size=picture.size, exact=exact)
    run.steps(8, picture)
    assert (run.only.kind, run.only.role) == (kind, "cause")
    assert run.only.first_step == (0 if kind == "init-mismatch" else 1)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "sketched"])
@pytest.mark.parametrize("picture", UNDECIDED.values(), ids=UNDECIDED)
def test_undecided_rows_of_the_table(picture: Picture, *, exact: bool) -> None:
    """Neither a fault nor healthy: listed as unverified, however often it is seen."""
    run = watched(exact=exact)
    run.steps(20, picture)
    assert run.findings == []
    assert run.diagnosis.unverified == ("p",)


def test_partials_averaged_as_marked_are_no_fault() -> None:
    """A marker that asks for the mean makes a mean of partials what was intended."""
    run = watched(spec("p", rule="avg"))
    run.steps(8, averaged(partials()))
    assert run.findings == []


def test_silent_rows_make_no_claim() -> None:
    """A gradient that is zero everywhere says nothing about its reduction."""
    run = watched()
    run.steps(8, silent())
    assert run.findings == []
    assert run.diagnosis.not_exercised == ("p",)
    assert run.diagnosis.unverified == ()


def test_zero_on_some_ranks_only_is_a_partial() -> None:
    """The ranks with exactly zero are evidence of a missing sum, not a kind of their own."""
    run = watched(size=4)
    run.steps(4, kept([(0.0,) * 4, GRADIENT, (0.0,) * 4, (1.0, 0.0, 1.0, 0.0)]))
    assert run.only.kind == "missing-reduce"
    assert run.only.evidence["zero_ranks"] == [0, 2]


# ------------------------------------------------------------------------------- exercised or not


def test_unexercised_is_armed_until_the_gradient_is_seen() -> None:
    """A factor that is zero for three steps is judged from the fourth on, as any other from the first."""
    run = watched()
    run.steps(3, silent())
    assert run.diagnosis.not_exercised == ("p",)
    run.steps(2, kept(partials()))
    assert run.diagnosis.not_exercised == ()
    assert run.findings == []
    run.step(kept(partials()))
    assert (run.only.kind, run.only.first_step, run.only.role) == ("missing-reduce", 4, "cause")


def test_a_row_of_another_chunk_is_not_called_unexercised() -> None:
    """A parameter no finalizer call has handled was never looked at."""
    run = watched()
    run.steps(3, outside())
    assert run.diagnosis.not_exercised == ()


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
    needed = max(patience + late, 2 if "gathered" not in str(late) and _needs_a_gather(picture) else 1)
    run = watched(config=Config(patience=patience), exact=exact)
    run.steps(needed - 1, picture)
    assert run.findings == []
    run.step(picture)
    assert (run.only.first_step, run.only.last_step) == (1, needed)


def _needs_a_gather(picture: Picture) -> bool:
    return picture.before[0] != picture.before[1]


@pytest.mark.parametrize(
    ("kind", "picture"), [("grad-presence", UNEVEN), ("init-mismatch", FAULTY["copies, other values"][0])]
)
def test_urgent_kinds_need_no_patience(kind: str, picture: Picture) -> None:
    """One look is enough for uneven presence and for values that differ at the start."""
    run = watched(config=Config(patience=9))
    (finding,) = run.step(picture).new
    assert (finding.kind, finding.count, finding.confidence) == (kind, 1, 0.99)


def test_a_streak_that_breaks_begins_again() -> None:
    """Two bad steps, a good one, two bad ones: nothing yet; the third in a row is dated to its own first."""
    run = watched()
    run.steps(2, summed(copies()))
    run.step(kept(copies()))
    run.steps(2, summed(copies()))
    assert run.findings == []
    run.step(summed(copies()))
    assert run.only.first_step == 4


def test_a_fault_that_begins_late_is_dated_to_where_it_began() -> None:
    """Also in a row that was settled as healthy and not handed over for a while."""
    run = watched(leaves_out_settled=True)
    run.steps(20, kept(copies()))
    run.steps(3, summed(copies()))
    assert (run.only.first_step, run.only.count) == (21, 3)


def test_a_nonfinite_gradient_needs_its_own_patience_and_date() -> None:
    """Ten healthy steps before it are not steps of the fault."""
    run = watched()
    run.steps(10, kept(copies()))
    run.steps(2, kept([NAN, NAN]))
    assert run.findings == []
    run.step(kept([NAN, NAN]))
    assert (run.only.kind, run.only.first_step, run.only.count) == ("nonfinite", 11, 3)


def test_confidence_rises_while_a_fault_goes_on() -> None:
    """1/8, then 1/16, then 1/32 short of the ceiling, never above it."""
    run = watched()
    seen = [o.new[0].confidence if o.new else run.only.confidence for o in run.steps(12, summed(copies()))[2:]]
    run2 = watched()
    confidences = []
    for _ in range(12):
        run2.step(summed(copies()))
        confidences += [f.confidence for f in run2.findings]
    assert confidences[:3] == pytest.approx([0.99 - 2**-4, 0.99 - 2**-5, 0.99 - 2**-6], abs=1e-4)
    assert confidences == sorted(confidences)
    assert max(confidences) <= 0.99
    assert seen


def test_sketched_evidence_is_less_sure_than_elements() -> None:
    """The ceiling of what was estimated lies below that of what was compared element by element."""
    exact, sketched = watched(), watched(exact=False)
    for run in (exact, sketched):
        run.steps(20, kept(partials()))
    assert exact.only.confidence > 0.9 > sketched.only.confidence - 1e-9


def test_a_finding_is_new_once() -> None:
    """Going on is counted, not announced again."""
    run = watched()
    outcomes = run.steps(10, summed(copies()))
    assert [len(o.new) for o in outcomes] == [0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    assert (run.only.last_step, run.only.count) == (10, 10)


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


# --------------------------------------------------------------------------- one fault, one finding


def test_values_that_spread_after_a_missing_sum_are_evidence() -> None:
    """The parameter has one finding; how far its values are apart stands in it."""
    run = watched()
    run.steps(12, lambda step: kept(partials(), values=apart(by=0.01 * (step - 1), vector=VALUE)))
    assert run.only.kind == "missing-reduce"
    assert run.only.max_abs == pytest.approx(0.11)
    assert run.only.evidence["spread_param"]["differing"] == 1


def test_identical_gradients_while_values_are_apart_go_on() -> None:
    """A step whose partials happen to be equal does not turn a missing sum into drift."""
    run = watched(exact=False)
    run.steps(3, lambda step: kept(partials(), values=apart(by=0.01 * (step - 1), vector=VALUE)))
    run.step(kept(copies(), values=MOVED))
    run.steps(3, kept(partials(), values=MOVED))
    assert (run.only.kind, run.only.first_step) == ("missing-reduce", 1)


def test_an_unsynced_module_is_one_finding_with_its_gradient_as_evidence() -> None:
    """Different initial values and gradients that nobody sums: the values came first."""
    run = watched()
    run.steps(6, kept(partials(), values=MOVED))
    assert run.only.kind == "init-mismatch"
    assert run.only.evidence["gradient"] == {"before": "partials", "reduction": "none"}


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


def test_copies_that_differ_after_a_cause_are_its_consequence() -> None:
    """(a) Seen as bit-identical copies at an earlier exercised step, then drawn in."""
    run = watched("cause", "drawn-in")
    run.step(kept(partials()), kept(copies()))
    run.steps(6, kept(partials(), values=MOVED), drifting)
    assert role_of(run, "cause") == ("cause", None)
    assert role_of(run, "drawn-in") == ("consequence", "cause")
    assert not next(f for f in run.findings if f.role == "consequence").counts


def test_never_seen_as_a_copy_is_a_cause_of_its_own() -> None:
    """(a), other side: first exercised after a cause elsewhere, it was wrong from its first step on."""
    run = watched("cause", "late")
    run.steps(2, kept(partials()), silent())
    run.steps(6, kept(partials(), values=MOVED), kept(partials()))
    assert role_of(run, "late") == ("cause", None)


def test_a_late_cause_is_doubted() -> None:
    """Its confidence is lower by 0.2 than that of the same fault in a group without another one."""
    doubted, sure = watched("cause", "late"), watched("late")
    doubted.steps(2, kept(partials()), silent())
    sure.steps(2, silent())
    doubted.steps(6, kept(partials(), values=MOVED), kept(partials()))
    sure.steps(6, kept(partials()))
    late = next(f for f in doubted.findings if f.parameter == "late")
    assert late.confidence == pytest.approx(sure.only.confidence - 0.2, abs=1e-4)
    assert late.counts
    assert late.evidence["values_elsewhere"] == "had already moved apart"


def test_copies_seen_before_are_a_cause_where_there_is_no_older_one() -> None:
    """What was a copy at first and has nothing to blame is named itself."""
    run = watched("p", "healthy")
    run.steps(4, kept(copies()), kept(copies()))
    run.steps(4, kept(partials()), kept(copies()))
    assert role_of(run, "p") == ("cause", None)
    assert run.only.first_step == 5


def test_what_first_differs_with_an_init_mismatch_is_its_consequence() -> None:
    """(b) In the very first step, with equal values of its own."""
    run = watched("source", "behind")
    run.steps(6, kept(copies(), values=MOVED), kept(partials()))
    assert role_of(run, "source") == ("cause", None)
    assert role_of(run, "behind") == ("consequence", "source")


def test_what_differs_later_than_an_init_mismatch_is_a_cause() -> None:
    """(b), other side: exercised a step later, never seen as a copy."""
    run = watched("source", "late")
    run.step(kept(copies(), values=MOVED), silent())
    run.steps(6, kept(copies(), values=MOVED), kept(partials()))
    assert role_of(run, "late") == ("cause", None)


def test_a_second_init_mismatch_is_a_cause_too() -> None:
    """(b), other side: its own values differ, so nothing else made them."""
    run = watched("one", "two")
    run.steps(6, kept(copies(), values=MOVED), kept(partials(), values=MOVED))
    assert role_of(run, "one") == role_of(run, "two") == ("cause", None)


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


def test_wrong_factors_are_never_consequences() -> None:
    """Whoever sums copies does so whatever the activations are, also after a cause elsewhere."""
    run = watched("cause", "p")
    run.steps(4, kept(partials()), kept(copies()))
    run.steps(4, kept(partials()), summed(copies()))
    assert role_of(run, "p") == ("cause", None)


def test_causes_stand_before_consequences() -> None:
    """And within a role by first step."""
    run = watched("b", "late", "a")
    run.steps(2, kept(partials()), silent(), kept(copies()))
    run.steps(6, kept(partials()), kept(partials()), kept(apart()))
    assert [(f.parameter, f.role) for f in run.findings] == [("b", "cause"), ("late", "cause"), ("a", "consequence")]


def test_faults_of_one_step_are_named_in_the_order_of_backward() -> None:
    """Last layer first; values that differed at the start before any gradient."""
    run = watched("first", "init", "last")
    run.steps(2, kept(partials()), kept(copies(), values=MOVED), kept(partials()))
    (outcome,) = run.steps(1, kept(partials()), kept(copies(), values=MOVED), kept(partials()))
    assert [f.parameter for f in outcome.new] == ["last", "first"]
    run = watched("first", "init", "last", config=Config(patience=1))
    outcome = run.step(summed(copies()), kept(copies(), values=MOVED), summed(copies()))
    assert [f.parameter for f in outcome.new] == ["init", "last", "first"]


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
    """A spread that stops growing does not make yesterday's jump harmless; each rise is said once."""
    run = watched()
    outcomes = run.steps(30, of_spread([1e-6] * 6 + [1e-4] * 30))
    assert run.only.severity == "error"
    assert [f.severity for o in outcomes for f in o.new] == ["info", "error"]


def test_information_makes_no_run_faulty() -> None:
    """Constant drift is a cause that does not count."""
    run = watched()
    run.steps(10, of_spread([1e-6] * 20))
    assert (run.only.role, run.only.counts) == ("cause", False)


# ----------------------------------------------------------------------------------------- thresholds


def limited(**limits: float) -> Config:
    """A configuration with these thresholds."""
    return Config(thresholds=Thresholds(**limits))


def test_past_max_abs_drift_is_an_error_at_once() -> None:
    """At the limit nothing happens, past it patience is not asked for and the text says by how much."""
    quarter = kept(copies(), values=[VALUE, (1.0, 2.25, -3.0, 4.0)])
    run = watched(config=limited(max_abs=0.25))
    run.step(kept(apart()))
    run.step(replace(quarter, before=apart(), after=apart()))
    assert run.findings == []
    run = watched(config=limited(max_abs=0.24))
    run.step(kept(apart()))
    run.step(replace(quarter, before=apart(), after=apart()))
    assert (run.only.kind, run.only.severity, run.only.max_abs) == ("drift", "error", 0.25)
    assert run.only.evidence["threshold"] == "max_abs 0.25 > 0.24"


def test_past_max_rel_drift_is_an_error_at_once() -> None:
    """|a - b| over the larger of the two: 0.5 of 2.5 is 0.2."""
    moved = kept(apart(), values=MOVED)
    at, past = watched(config=limited(max_rel=0.2)), watched(config=limited(max_rel=0.1999))
    for run in (at, past):
        run.step(kept(apart()))
        run.step(moved)
    assert at.findings == []
    assert (past.only.severity, past.only.max_rel) == ("error", pytest.approx(0.2))
    assert past.only.evidence["threshold"] == "max_rel 0.2 > 0.1999"


def test_a_known_drift_that_crosses_a_threshold_is_news() -> None:
    """It was information; it is said again, once, at the step that exceeds the limit."""
    run = watched(config=limited(max_abs=4.5e-6))
    outcomes = run.steps(9, of_spread([k * 1e-6 for k in range(1, 9)]))
    crossed = [(step, f) for step, o in enumerate(outcomes, 1) for f in o.new if "threshold" in f.evidence]
    assert [step for step, _ in crossed] == [6]
    assert crossed[0][1].severity == "error"


@pytest.mark.parametrize(("limit", "kinds"), [(1.49, ["wrong-scale"]), (1.51, [])])
def test_past_ratio_a_scaled_copy_is_wrong(limit: float, kinds: list[str]) -> None:
    """Norms, not squares: 1.5 times the gradient is a ratio of 1.5."""
    run = watched(config=limited(ratio=limit))
    run.step(times(1.5, copies()))
    assert [f.kind for f in run.findings] == kinds
    if kinds:
        assert run.only.evidence["threshold"] == "ratio 1.5 > 1.49"
        assert run.only.ratio == pytest.approx(1.5)


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


def test_limits_are_watched_when_the_gather_budget_is_spent() -> None:
    """Whoever set a limit wants every step compared with it."""
    budget = Explain(gather_checks=2)
    free, bound = Config(explain=budget), Config(explain=budget, thresholds=Thresholds(max_abs=1.0))
    for config, gathers in ((free, 2), (bound, 9)):
        run = watched(config=config)
        run.steps(10, of_spread([1e-6] * 10))
        assert sum(bool(asked) for asked in run.asked) == gathers


# ------------------------------------------------------------------------------------------------ fp16

OVERFLOW = kept([NAN, NAN])


def test_a_found_inf_step_is_skipped() -> None:
    """No verdict on it, none about it, and it says so."""
    run = watched(loss_scaler=True)
    outcomes = run.steps(8, OVERFLOW)
    assert all(o.skipped for o in outcomes)
    assert run.findings == []


def test_a_skipped_step_leaves_patience_unbroken() -> None:
    """Two bad steps, an overflow, one more bad step: confirmed, and dated to the first."""
    run = watched(loss_scaler=True)
    run.steps(2, summed(copies()))
    run.step(OVERFLOW)
    run.step(summed(copies()))
    assert (run.only.kind, run.only.first_step) == ("double-reduce", 1)


def test_an_overflow_of_one_parameter_skips_all() -> None:
    """The scaler skips the whole step: another parameter's row counts for nothing in it."""
    run = watched("p", "overflowing", loss_scaler=True, config=Config(patience=2))
    run.step(summed(copies()), kept(copies()))
    run.step(summed(copies()), OVERFLOW)
    assert run.findings == []
    run.step(summed(copies()), kept(copies()))
    assert run.only.count == 2


@pytest.mark.parametrize("vector", [NAN, (math.inf, 1.0, 1.0, 1.0), (1.0, -math.inf, 1.0, 1.0)])
def test_without_a_scaler_nonfinite_is_a_fault(vector: Vector) -> None:
    """Nothing would skip the step."""
    run = watched()
    run.steps(3, kept([vector, vector]))
    assert (run.only.kind, run.only.point) == ("nonfinite", "grad_pre")
    assert run.only.observed == "non-finite on all ranks"


def test_nonfinite_on_some_ranks_only_is_no_overflow() -> None:
    """With a scaler too: some ranks would skip what the others apply."""
    run = watched(loss_scaler=True)
    outcomes = run.steps(3, kept([FINITE, NAN]))
    assert not any(o.skipped for o in outcomes)
    assert (run.only.kind, run.only.observed) == ("nonfinite", "non-finite on some ranks")


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


def test_a_finite_step_in_between_starts_the_count_again() -> None:
    """Twice thirty-one overflows with one good step between them are normal for a scaler."""
    run = watched(loss_scaler=True)
    run.steps(31, OVERFLOW)
    run.step(kept(copies()))
    run.steps(31, OVERFLOW)
    assert run.findings == []


def test_values_that_differ_at_a_skipped_first_step_are_an_init_mismatch() -> None:
    """The first steps of fp16 training overflow; the initial values were compared all the same."""
    run = watched(loss_scaler=True)
    run.steps(3, replace(OVERFLOW, values=MOVED))
    run.step(kept(copies(), values=MOVED))
    assert (run.only.kind, run.only.first_step) == ("init-mismatch", 0)


# ------------------------------------------------------------------------------------------- presence


def test_absent_ranks_are_named() -> None:
    """And the odd one out, if the others are a majority."""
    run = watched(size=4)
    run.step(kept([GRADIENT, GRADIENT, None, GRADIENT]))
    assert run.only.evidence["absent_ranks"] == [2]
    assert run.only.odd_ranks == (2,)


def test_half_a_group_without_gradient_outvotes_nobody() -> None:
    """Two against two is no majority."""
    run = watched(size=4)
    run.step(kept([GRADIENT, None, None, GRADIENT]))
    assert run.only.evidence["absent_ranks"] == [1, 2]
    assert run.only.odd_ranks == ()


def test_absent_everywhere_is_a_frozen_parameter() -> None:
    """No gradient on any rank is as even as a gradient on all."""
    run = watched()
    run.steps(5, kept([None, None]))
    assert run.findings == []
    assert run.diagnosis.not_exercised == ("p",)


def test_presence_is_said_before_the_reduction() -> None:
    """From the entry side alone, and counted once when the exit side follows."""
    run = watched()
    row = observed(UNEVEN)
    (finding,) = run.diagnosis.presence(When(1, update=0, pristine=True), [row]).new
    assert (finding.kind, finding.first_step) == ("grad-presence", 1)
    outcome = run.step(UNEVEN)
    assert outcome.new == ()
    assert run.only.count == 1
    run.step(UNEVEN)
    assert (run.only.count, run.only.last_step) == (2, 2)


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
def test_between_copies_and_partials_lies_a_grey_zone(deviation: float, *, decided: bool) -> None:
    """Left alone it is drift below, a missing sum above, and undecided between."""
    run = watched()
    run.steps(20, kept(akin(deviation)))
    assert bool(run.findings) == decided
    assert run.diagnosis.unverified == (() if decided else ("p",))


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
}


@pytest.mark.parametrize(("rule", "picture", "kind"), DECLARED.values(), ids=DECLARED)
def test_a_declared_rule_beats_inference(rule: str, picture: Picture, kind: str | None) -> None:
    """What the user says the gradient needs is what it is measured by."""
    run = watched(spec("p", rule=rule, declared=True))
    run.steps(8, picture)
    assert [f.kind for f in run.findings] == ([kind] if kind else [])
    assert run.diagnosis.unverified == ()


def test_a_marker_is_no_declaration() -> None:
    """The mark that makes the framework sum a complete gradient is the fault itself."""
    run = watched(spec("p", rule="sum", declared=False))
    run.steps(3, summed(copies()))
    assert run.only.kind == "double-reduce"


# ----------------------------------------------------------------------------- several calls in a step


def test_a_second_call_of_the_finalizer_is_judged_on_its_own() -> None:
    """It sums what the first has made complete: named although the first call was right."""
    run = watched()
    for _ in range(3):
        run.step(summed(partials()))
        run.step(summed(copies()), call=2)
    assert (run.only.kind, run.only.first_step, run.only.count) == ("double-reduce", 1, 3)


def test_calls_do_not_break_each_others_streak() -> None:
    """Each call's patience counts its own steps."""
    run = watched(config=Config(patience=2))
    run.step(summed(copies()))
    run.step(kept(copies()), call=2)
    run.step(summed(copies()))
    assert run.only.first_step == 1


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


def test_nothing_is_asked_before_anything_was_seen() -> None:
    """The first check has no reason to gather."""
    assert Diagnosis(plan_of("p", "q"), Config()).wanted(1, 1) == ()


def test_copies_are_never_gathered() -> None:
    """Reduced data alone decide about them, also on deep checks."""
    run = watched("kept", "summed", "silent", config=Config(deep_interval=2))
    run.steps(10, kept(copies()), summed(copies()), silent())
    assert not any(run.asked)


def test_partials_are_gathered_on_their_first_checks_and_then_every_deep_interval() -> None:
    """`patience` gathers settle them; after that, they are verified again now and then."""
    run = watched(config=Config(deep_interval=10))
    run.steps(31, summed(partials()))
    assert [step for step, asked in enumerate(run.asked, 1) if asked] == [2, 3, 4, 10, 20, 30]


def test_a_deep_check_finds_a_reduction_that_has_changed() -> None:
    """A sum that became a mean unseen by reduced data is no longer called healthy."""
    run = watched(config=Config(deep_interval=10), leaves_out_settled=True)
    run.steps(15, summed(partials()))
    run.steps(10, averaged(partials()))
    assert run.diagnosis.unverified == ("p",) or run.named == {"p": "averaged-partial"}


def test_values_apart_are_gathered_within_a_budget() -> None:
    """The spread of values is followed so often and no more, but for deep checks."""
    run = watched(config=Config(explain=Explain(gather_checks=5), deep_interval=20))
    run.steps(45, of_spread([1e-6] * 50))
    assert [step for step, asked in enumerate(run.asked, 1) if asked] == [2, 3, 4, 5, 6, 20, 40]


def test_what_is_gathered_is_what_differs() -> None:
    """Elements of gradients that differ after the reduction, and of values that do or are about to."""
    run = watched("unreduced", "summed", "apart")
    run.steps(2, kept(partials()), summed(partials()), kept(copies(), values=MOVED))
    assert run.asked[1] == {0: (True, True), 1: (False, False), 2: (True, False)}


def test_what_is_asked_is_a_function_of_reduced_data_and_the_step() -> None:
    """Two ranks' instances fed the same ask the same at every step, whoever asks first or twice."""
    config = Config(deep_interval=4)
    one, two = (watched("a", "b", "c", config=config, exact=False) for _ in range(2))
    for step in range(1, 14):
        pictures = (drifting(step), summed(partials()), (silent() if step < 5 else averaged(partials())))
        two.diagnosis.wanted(step, 1)
        assert one.diagnosis.wanted(step, 1) == two.diagnosis.wanted(step, 1)
        one.step(*pictures)
        two.step(*pictures)
    assert one.asked == two.asked
    assert one.findings == two.findings != []


def test_settled_rows_need_not_be_handed_over() -> None:
    """Healthy rows are settled after `patience` checks; a fault, or what is open, never is."""
    run = watched("copies", "summed", "fault", "open", "silent")
    run.steps(5, kept(copies()), summed(partials()), summed(copies()), times(0.7, copies()), silent())
    assert run.diagnosis.unsettled(1) == {2, 3}


@pytest.mark.parametrize("patience", [1, 3])
def test_unsettled_until_patience(patience: int) -> None:
    """One check before, a healthy row still has to be handed over."""
    run = watched(config=Config(patience=patience))
    run.steps(patience - 1, kept(copies()))
    assert run.diagnosis.unsettled(1) == {0}
    run.step(kept(copies()))
    assert run.diagnosis.unsettled(1) == frozenset()


# ------------------------------------------------------------------ values: initial, written, unknown


@pytest.mark.parametrize("reduction", [kept(copies()), summed(partials()), kept(partials()), silent()])
def test_different_initial_values_are_named_whatever_the_gradients(reduction: Picture) -> None:
    """Before the first update nothing but initialisation can have set copies apart."""
    run = watched()
    run.step(replace(reduction, values=MOVED))
    assert (run.only.kind, run.only.first_step, run.only.point) == ("init-mismatch", 0, "param")


def test_unreduced_copies_first_seen_apart_in_mid_training_were_not_born_so() -> None:
    """Attached to a run under way, what lies before is unknown: the gradient is to blame, not the initialisation."""
    run = watched(pristine=False)
    run.steps(6, kept(partials(), values=MOVED))
    assert run.only.kind == "missing-reduce"


def test_an_external_write_is_named_after_its_patience() -> None:
    """Values were equal, every reduced gradient was bit-identical, and now the values differ."""
    run = watched()
    run.steps(4, kept(copies()))
    run.steps(2, kept(copies(), values=MOVED))
    assert run.findings == []
    run.step(kept(copies(), values=MOVED))
    assert (run.only.kind, run.only.severity, run.only.point) == ("external-write", "warning", "param")
    assert run.only.first_step == 4


def test_gradients_that_differ_because_of_a_write_do_not_rename_it() -> None:
    """Other values give other gradients from the very step on."""
    run = watched()
    run.steps(4, kept(copies()))
    run.steps(6, lambda step: kept(apart(by=1e-4), values=apart(by=0.5 + step * 1e-4, vector=VALUE)))
    assert (run.only.kind, run.only.first_step) == ("external-write", 4)


def test_values_apart_after_a_gradient_that_differed_are_no_external_write() -> None:
    """One unreduced step explains them, however equal the gradients are from then on."""
    run = watched()
    run.steps(4, kept(copies()))
    run.step(kept(apart()))
    run.steps(6, kept(copies(), values=MOVED))
    assert run.only.kind == "drift"


def test_values_never_seen_equal_are_no_external_write() -> None:
    """The second finalizer call of the first step sees what the first did: copies born different."""
    run = watched()
    for _ in range(5):
        run.step(outside(values=MOVED))
        run.step(kept(copies(), values=MOVED), call=2)
    assert run.only.kind == "init-mismatch"


def test_unchecked_steps_make_an_external_write_less_sure() -> None:
    """A gradient fault may hide in them."""
    every, tenth = watched(), watched(config=Config(interval=10))
    for run in (every, tenth):
        run.steps(2, kept(copies()))
        run.steps(12, kept(copies(), values=MOVED))
    assert tenth.only.confidence < every.only.confidence - 0.4


# ------------------------------------------------------------------------------------------- odd ranks


@pytest.mark.parametrize(
    ("values", "odd"),
    [
        ("AB", ()), ("AAB", (2,)), ("ABA", (1,)), ("ABC", ()), ("AABB", ()), ("AAAB", (3,)), ("BAAA", (0,)),
        ("AABC", ()), ("AAABC", (3, 4)),
    ],
)  # fmt: skip
def test_ranks_are_outvoted_by_a_strict_majority_only(values: str, odd: tuple[int, ...]) -> None:
    """Never at two ranks, and not by a half."""
    vectors = [tuple(x + ord(letter) for x in VALUE) for letter in values]
    run = watched(size=len(values))
    run.steps(2, kept(copies(len(values)), values=vectors))
    assert run.only.odd_ranks == odd


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


def test_every_finding_is_complete() -> None:
    """Code, advice and ranks of the plan stand in each kind that a diagnosis makes."""
    for picture, kind in FAULTY.values():
        run = watched(size=picture.size)
        run.steps(8, picture)
        finding: Finding = run.only
        assert finding.kind == kind
        assert finding.code.startswith("TPW")
        assert finding.advice
        assert finding.ranks == tuple(range(picture.size))
        assert 0.0 < finding.confidence <= 0.99
