"""What time does to a verdict: patience, first steps, growth, thresholds, skipped steps, and what is asked for."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.unit._builders import (
    GRADIENT,
    VALUE,
    Picture,
    Run,
    Vector,
    apart,
    averaged,
    copies,
    gathered,
    kept,
    observed,
    outside,
    partials,
    silent,
    summed,
    times,
    watched,
)
from tpwatch.config import Config, Explain, Thresholds
from tpwatch.diagnose import BUFFER_HEADER, When, layout_finding, skipped_finding, state_finding
from tpwatch.diagnose.history import rising
from tpwatch.diagnose.judges import SCALER_PATIENCE

SUM_OF_COPIES, HEALTHY = summed(copies()), kept(copies())


def news(run: Run, count: int, picture: Picture) -> list[int]:
    """Findings new at each of `count` steps."""
    return [len(outcome.new) for outcome in run.steps(count, picture)]


# ------------------------------------------------------------------------------------------- patience


@pytest.mark.parametrize("patience", [1, 2, 3, 5])
def test_a_fault_counts_at_its_patience_and_not_a_check_earlier(patience: int) -> None:
    """The finding appears with check number `patience`, once."""
    run = watched(config=Config(patience=patience))
    assert news(run, patience + 2, SUM_OF_COPIES) == [0] * (patience - 1) + [1, 0, 0]


def test_one_look_less_than_patience_leaves_no_trace() -> None:
    """Two bad checks and a good one are no finding, then or later."""
    run = watched()
    run.steps(2, SUM_OF_COPIES)
    run.steps(4, HEALTHY)
    assert run.findings == []


def test_a_good_check_starts_the_count_again() -> None:
    """Patience is of checks in a row: two, a break, and two more are not four."""
    run = watched()
    run.steps(2, SUM_OF_COPIES)
    run.step(HEALTHY)
    assert news(run, 3, SUM_OF_COPIES) == [0, 0, 1]
    assert run.only.first_step == 4


def test_sketches_have_to_agree_patience_times() -> None:
    """The first gather is asked for after the first look, so sketches decide one check later than elements."""
    by_elements, by_sketches = (watched(exact=exact) for exact in (True, False))
    assert news(by_elements, 5, kept(partials())) == [0, 0, 1, 0, 0]
    assert news(by_sketches, 5, kept(partials())) == [0, 0, 0, 1, 0]


def test_first_step_is_that_of_the_first_look() -> None:
    """A fault that is confirmed at step 12 began at step 10."""
    run = watched()
    run.steps(9, HEALTHY)
    run.steps(3, SUM_OF_COPIES)
    finding = run.only
    assert (finding.first_step, finding.last_step, finding.count) == (10, 12, 3)


def test_first_step_counts_steps_not_checks() -> None:
    """At an interval of ten the first step is the first checked one that showed the fault."""
    run = watched(config=Config(interval=10))
    for step in (10, 20, 30):
        run.step(SUM_OF_COPIES, number=step)
    assert (run.only.first_step, run.only.last_step, run.only.count) == (10, 30, 3)


def test_confidence_grows_with_the_streak() -> None:
    """A finding that goes on is surer than when it was new, and never certain."""
    run = watched()
    run.steps(3, SUM_OF_COPIES)
    early = run.only.confidence
    run.steps(5, SUM_OF_COPIES)
    assert early < run.only.confidence < 1.0


# ----------------------------------------------------------------------------------- severity of drift


def spreading(*amounts: float) -> list[Picture]:
    """Unreduced near copies whose values are this far apart, step by step."""
    return [kept(apart(), values=apart(by=amount, vector=VALUE) if amount else ()) for amount in amounts]


def drift_of(*amounts: float) -> Run:
    """A run of such steps."""
    run = watched()
    for picture in spreading(*amounts):
        run.step(picture)
    assert run.only.kind == "drift"
    return run


def test_constant_spread_is_information() -> None:
    """A rounding-level spread that stays makes no run faulty."""
    finding = drift_of(*[0.0, *[1e-6] * 12]).only
    assert finding.severity == "info"
    assert not finding.counts


def test_a_growing_spread_is_a_warning_within_six_steps() -> None:
    """Values equal at step 1 that move apart by as much at each step reach warning at step 6 at the latest."""
    finding = drift_of(*[1e-6 * k for k in range(6)]).only
    assert finding.severity == "warning"
    assert (finding.first_step, finding.counts) == (1, True)


@pytest.mark.parametrize(("gain", "severity"), [(0.24, "info"), (0.26, "warning")])
def test_the_edge_of_growth(gain: float, severity: str) -> None:
    """A rising series that gains less than a quarter over its window is the noise of a constant one."""
    assert drift_of(0.0, *[1e-3 * (1 + gain * k / 3) for k in range(4)]).only.severity == severity


@pytest.mark.parametrize(("factor", "severity"), [(9.9, "warning"), (10.1, "error")])
def test_the_edge_of_a_jump(factor: float, severity: str) -> None:
    """A last spread more than ten times the usual one is an error; less, after growth, a warning."""
    usual = [1e-6, 1.001e-6, 1.002e-6, 1.003e-6]
    assert drift_of(0.0, 0.0, *usual, 1.001e-6 * factor).only.severity == severity


def test_severity_only_rises_and_is_news_when_it_does() -> None:
    """A spread that stops growing does not make the jump before it harmless."""
    run = drift_of(0.0, *[1e-6] * 5)
    (worse,) = run.step(*spreading(1e-3)).new
    assert worse.severity == "error"
    assert news(run, 4, *spreading(1e-3)) == [0, 0, 0, 0]
    assert run.only.severity == "error"


@pytest.mark.parametrize(
    ("series", "share"),
    [([1, 2, 3, 4], 1.0), ([4, 3, 2, 1], 0.0), ([5, 5, 5], 0.5), ([1, 1, 1, 2], 0.75), ([1, 3, 2], 2 / 3)],
)
def test_rising_is_the_share_of_rising_pairs(series: list[float], share: float) -> None:
    """Counted by hand: pairs in order, ties as halves."""
    assert rising(series) == pytest.approx(share)


# ----------------------------------------------------------------------------------------- thresholds


def limited(**limits: float) -> Run:
    """A run with limits of the user's own."""
    return watched(config=Config(thresholds=Thresholds(**limits)))


@pytest.mark.parametrize(("limit", "severity"), [(0.25, "info"), (0.2499, "error")])
def test_the_edge_of_max_abs(limit: float, severity: str) -> None:
    """A spread of exactly the limit is tolerated; a smaller limit makes it an error."""
    run = limited(max_abs=limit)
    run.step(kept(apart()))
    run.steps(4, kept(apart(), values=apart(by=0.25, vector=VALUE)))
    assert (run.only.severity, "threshold" in run.only.evidence) == (severity, severity == "error")


@pytest.mark.parametrize(("limit", "severity"), [(0.2, "info"), (0.1999, "error")])
def test_the_edge_of_max_rel(limit: float, severity: str) -> None:
    """2 against 2.5 is 0.5 / 2.5 = 0.2 apart, relative to the larger one."""
    run = limited(max_rel=limit)
    run.step(kept(apart()))
    run.steps(4, kept(apart(), values=[(1.0, 2.0, -3.0, 4.0), (1.0, 2.5, -3.0, 4.0)]))
    assert (run.only.kind, run.only.severity) == ("drift", severity)
    assert run.only.max_rel == pytest.approx(0.2)


@pytest.mark.parametrize(("limit", "kinds"), [(2.0, []), (1.999, ["wrong-scale"])])
def test_the_edge_of_ratio(limit: float, kinds: list[str]) -> None:
    """A factor of exactly the limit is tolerated; the limit is on norms, not on squares."""
    run = watched(size=4, config=Config(thresholds=Thresholds(ratio=limit)))
    run.steps(4, times(2.0, copies(4)))
    assert list(run.named.values()) == kinds


def test_past_a_threshold_no_patience_is_needed() -> None:
    """The gather that shows the excess makes the finding, long before patience would."""
    run = watched(config=Config(patience=9, thresholds=Thresholds(max_abs=0.1)))
    run.step(kept(apart()))
    assert news(run, 3, kept(apart(), values=apart(by=0.25, vector=VALUE))).count(1) == 1
    assert run.only.evidence["threshold"] == "max_abs 0.25 > 0.1"


# ---------------------------------------------------------------------------- loss scaler, non-finite

NAN: Vector = (math.nan, 1.0, 1.0, 1.0)
OVERFLOW = kept([NAN, NAN])


def test_a_skipped_step_leaves_patience_unbroken() -> None:
    """Two bad checks, a found-inf step, one bad check: three in a row."""
    run = watched(loss_scaler=True)
    run.steps(2, SUM_OF_COPIES)
    outcome = run.step(OVERFLOW)
    assert (outcome.skipped, outcome.new) == (True, ())
    assert len(run.step(SUM_OF_COPIES).new) == 1
    assert (run.only.first_step, run.only.count) == (1, 3)


def test_a_skipped_step_says_nothing_about_any_row() -> None:
    """One overflowing parameter makes the step one without verdict for all of them."""
    run = watched("a", "b", loss_scaler=True, config=Config(patience=1))
    assert run.step(OVERFLOW, SUM_OF_COPIES).skipped
    assert run.findings == []
    assert not run.step(HEALTHY, SUM_OF_COPIES).skipped
    assert run.named == {"b": "double-reduce"}


def test_nonfinite_without_a_scaler_is_a_fault_after_patience() -> None:
    """Nothing will skip that step, so the values are lost."""
    run = watched()
    outcomes = run.steps(4, OVERFLOW)
    assert not any(outcome.skipped for outcome in outcomes)
    assert [len(outcome.new) for outcome in outcomes] == [0, 0, 1, 0]
    assert (run.only.kind, run.only.first_step, run.only.point) == ("nonfinite", 1, "grad_pre")


def test_nonfinite_on_some_ranks_is_a_fault_with_a_scaler_too() -> None:
    """After a reduction, ranks that differ in this would skip different steps."""
    run = watched(loss_scaler=True)
    outcomes = run.steps(4, kept([NAN, GRADIENT]))
    assert not any(outcome.skipped for outcome in outcomes)
    assert (run.only.kind, run.only.observed) == ("nonfinite", "non-finite on some ranks")


@pytest.mark.parametrize(("count", "kinds"), [(SCALER_PATIENCE, []), (SCALER_PATIENCE + 1, ["nonfinite"])])
def test_nonfinite_that_persists_is_no_overflow(count: int, kinds: list[str]) -> None:
    """No initial scale takes more halvings than this."""
    run = watched(loss_scaler=True)
    run.steps(count, OVERFLOW)
    assert list(run.named.values()) == kinds


def test_a_finite_step_ends_a_row_of_overflows() -> None:
    """A scaler that found its scale may overflow again later."""
    run = watched(loss_scaler=True)
    for _ in range(3):
        run.steps(SCALER_PATIENCE - 1, OVERFLOW)
        run.step(HEALTHY)
    assert run.findings == []


# ------------------------------------------------------------------------------------ asking for evidence


def gathers(run: Run) -> list[int]:
    """Steps, from 1, at which the first parameter was gathered."""
    return [step for step, asked in enumerate(run.asked, start=1) if 0 in asked]


def test_partials_are_gathered_patience_times_then_every_deep_interval() -> None:
    """Asked for from the second step on, and again at multiples of `deep_interval` only."""
    run = watched(config=Config(patience=2, deep_interval=10))
    run.steps(31, summed(partials()))
    assert gathers(run) == [2, 3, 10, 20, 30]


def test_a_sparse_schedule_has_its_deep_checks_too() -> None:
    """The first check at or behind each multiple of `deep_interval` is deep, whether or not it is a multiple itself."""
    run = watched(config=Config(patience=2, deep_interval=10))
    checked = range(1, 64, 7)
    for step in checked:
        run.step(summed(partials()), number=step)
    assert [step for step, asked in zip(checked, run.asked, strict=True) if 0 in asked] == [8, 15, 22, 36, 43, 50]


def test_copies_are_never_gathered() -> None:
    """Tier 1 says all there is to say."""
    run = watched(config=Config(deep_interval=5))
    run.steps(20, SUM_OF_COPIES)
    assert gathers(run) == []


def test_a_deep_check_finds_what_changed_since() -> None:
    """Partials that were summed at first and are averaged later look alike to tier 1: re-verification tells."""
    run = watched(config=Config(deep_interval=5))
    run.steps(6, summed(partials()))
    assert run.findings == []
    run.steps(80, averaged(partials()))
    assert run.named == {"p": "averaged-partial"}


def test_the_gather_budget_of_an_old_finding_is_bounded() -> None:
    """Values that differ are gathered `gather_checks` times, then at deep checks only."""
    run = watched(config=Config(deep_interval=100, explain=Explain(gather_checks=7)))
    run.step(kept(apart()))
    run.steps(40, kept(apart(), values=apart(by=1e-3, vector=VALUE)))
    assert len(gathers(run)) == 7


def test_a_limit_on_values_keeps_them_gathered() -> None:
    """The user asked to be told when a limit is passed, however late that is."""
    config = Config(thresholds=Thresholds(max_abs=0.1), explain=Explain(gather_checks=3))
    run = watched(config=config)
    run.step(kept(apart()))
    run.steps(10, kept(apart(), values=apart(by=1e-3, vector=VALUE)))
    run.step(kept(apart(), values=apart(by=0.25, vector=VALUE)))
    assert run.only.evidence["threshold"] == "max_abs 0.25 > 0.1"


def test_what_is_gathered_is_what_differs() -> None:
    """Values are asked for where values differ or may soon; gradients where the reduced gradient differs."""
    run = watched("sum", "none", "apart")
    moved = apart(by=1e-3, vector=VALUE)
    pictures = (summed(partials()), kept(partials()), kept(copies(), values=moved))
    run.steps(2, *pictures)
    assert run.asked[1] == {0: (False, False), 1: (True, True), 2: (True, False)}


def test_nothing_is_wanted_before_anything_was_seen() -> None:
    """The first check gathers nothing: nobody has been flagged."""
    run = watched("a", "b")
    assert run.diagnosis.wanted(50, 1) == ()


# -------------------------------------------------------------------------------- several calls, few rows


def test_calls_of_one_step_have_separate_histories() -> None:
    """Two model chunks: each parameter is seen by its own call, and outside of the other."""
    run = watched("first", "second")
    for _ in range(3):
        run.step(SUM_OF_COPIES, outside())
        run.step(outside(), kept(partials()), call=2)
    assert run.named == {"first": "double-reduce", "second": "missing-reduce"}
    assert {f.first_step for f in run.findings} == {1}


def test_a_second_look_in_the_same_step_adds_no_patience() -> None:
    """Two calls that see the same bad picture are two streaks, not one of double length."""
    run = watched()
    run.step(SUM_OF_COPIES)
    run.step(SUM_OF_COPIES, call=2)
    run.step(SUM_OF_COPIES)
    run.step(HEALTHY, call=2)
    assert run.findings == []


def test_calls_ask_for_evidence_of_their_own_rows() -> None:
    """What the first call showed is no reason to gather at the second."""
    run = watched("first", "second")
    run.step(summed(partials()), outside())
    run.step(outside(), HEALTHY, call=2)
    assert [t.index for t in run.diagnosis.wanted(2, 1)] == [0]
    assert run.diagnosis.wanted(2, 2) == ()


def test_rows_are_unsettled_until_patience() -> None:
    """A healthy row has to be handed over `patience` times, then no longer; a faulty one always."""
    run = watched("good", "bad", "never")
    unsettled = []
    for _ in range(4):
        run.step(HEALTHY, SUM_OF_COPIES, silent())
        unsettled.append(sorted(run.diagnosis.unsettled(1)))
    assert unsettled == [[0, 1], [0, 1], [1], [1]]


@pytest.mark.parametrize("late", [1, 2, 4, 9])
def test_settled_rows_need_not_be_handed_over(late: int) -> None:
    """Leaving out what did not change leads to the same findings at the same steps."""
    runs = [watched("a", "b", "c", leaves_out_settled=lazy) for lazy in (False, True)]
    story = [
        *[(HEALTHY, summed(partials()), silent())] * late,
        *[(SUM_OF_COPIES, summed(partials()), kept(partials()))] * 6,
        *[(HEALTHY, averaged(copies()), silent())] * 6,
    ]
    outcomes: list[list[Any]] = [[run.step(*pictures).new for pictures in story] for run in runs]
    assert outcomes[0] == outcomes[1]
    assert runs[0].findings == runs[1].findings
    assert runs[1].named == {"a": "double-reduce", "c": "missing-reduce"}


def test_a_gather_that_was_not_asked_for_is_learned_all_the_same() -> None:
    """Evidence is a fact wherever it comes from; an estimate and an exact one may follow each other."""
    run, picture = watched(config=Config(patience=1)), kept(partials())
    row = observed(picture)
    run.diagnosis.observe(When(1, pristine=True), [row], {0: gathered(picture)})
    assert run.named == {"p": "missing-reduce"}
    ends = [math.sqrt(square) for square in (row.pre.l2_lo, row.pre.l2_hi)]
    assert sorted(run.only.evidence["norms_pre"]) == pytest.approx(ends)


def test_a_presence_that_heals_is_not_forgotten() -> None:
    """A gradient that was absent once keeps its finding, with the last step it was seen."""
    run = watched()
    uneven = kept([GRADIENT, None])
    run.steps(2, uneven)
    run.steps(3, HEALTHY)
    assert (run.only.kind, run.only.first_step, run.only.last_step) == ("grad-presence", 1, 2)


def test_the_ratio_is_the_latest_and_stays_where_there_is_none() -> None:
    """A factor that changes is seen to; a step without a gradient takes nothing away."""
    run = watched(config=Config(thresholds=Thresholds(ratio=2.5)))
    run.steps(4, times(3.0, copies()))
    assert run.only.ratio == pytest.approx(3.0)
    run.steps(4, times(5.0, copies()))
    run.step(silent())
    assert run.only.ratio == pytest.approx(5.0)


# ----------------------------------------------------------------------------------------- what holds


def holding(run: Run) -> list[str]:
    """Kinds that hold after the last check."""
    return [f.kind for f in run.diagnosis.holding]


def test_a_fault_holds_until_its_parameter_has_settled_as_healthy() -> None:
    """Not a check longer than `patience`; the finding itself stays for ever, and holds again when the fault is back."""
    run = watched()
    run.steps(4, SUM_OF_COPIES)
    held = [holding(run)]
    for picture in (*[HEALTHY] * 4, SUM_OF_COPIES, HEALTHY):
        run.step(picture)
        held.append(holding(run))
    bad, good = ["double-reduce"], list[str]()
    assert held == [bad, bad, bad, good, good, bad, bad]
    assert [f.kind for f in run.findings] == bad


@pytest.mark.parametrize("idle", [silent, outside])
def test_a_step_that_shows_nothing_ends_nothing(idle: Any) -> None:
    """No gradient, or none that this call handles: nobody has seen the fault go."""
    run = watched()
    run.steps(4, SUM_OF_COPIES)
    run.steps(5, idle())
    assert holding(run) == ["double-reduce"]


def test_drift_holds_while_values_differ() -> None:
    """A gradient that is reduced rightly again does not bring the copies together; writing one over the others does."""
    run = watched()
    run.steps(4, kept(partials()))
    run.steps(6, summed(partials(), values=[VALUE, (*VALUE[:3], VALUE[3] + 1e-3)]))
    assert holding(run) == ["missing-reduce"]
    run.steps(4, summed(partials()))
    assert holding(run) == []


def test_what_is_seen_once_at_a_save_holds_for_good() -> None:
    """Optimizer state is compared at saves only; a step without its finalizer is over at the next that has one."""
    run = watched()
    run.diagnosis.add(state_finding(run.diagnosis.plan, "p", ("exp_avg",), 1))
    run.diagnosis.add(skipped_finding(run.diagnosis.plan, 1, 1))
    assert sorted(holding(run)) == ["finalize-skipped", "optimizer-mismatch"]
    run.steps(3, HEALTHY)
    assert holding(run) == ["optimizer-mismatch"]


def test_a_parameter_that_is_left_out_for_good_holds_for_good() -> None:
    """A difference between the plans of ranks is said once; one between buffers is looked for at every check."""
    run = watched()
    run.diagnosis.add(layout_finding(run.diagnosis.plan, "other", "on rank 1 only", 0))
    run.diagnosis.add(layout_finding(run.diagnosis.plan, BUFFER_HEADER, "step: 1 on one rank, 2 on another", 0))
    run.steps(3, HEALTHY)
    assert [f.parameter for f in run.diagnosis.holding] == ["other"]


def test_values_that_are_equal_again_are_no_mismatch_any_more() -> None:
    """Made equal by hand or by `resync`, however they came to differ at the start."""
    run = watched()
    run.step(kept(copies(), values=[VALUE, (*VALUE[:3], VALUE[3] + 0.5)]))
    run.steps(5, HEALTHY)
    assert (run.only.kind, run.only.count) == ("init-mismatch", 1)
    assert holding(run) == []


def test_a_call_that_is_not_made_any_more_holds_nothing_open() -> None:
    """One accidental second call of the finalizer has seen too little to settle anything."""
    run = watched()
    run.steps(2, HEALTHY)
    run.step(HEALTHY, call=2)
    run.steps(4, SUM_OF_COPIES)
    run.steps(4, HEALTHY)
    assert holding(run) == []
    assert [f.kind for f in run.findings] == ["double-reduce"]


def test_a_finalizer_that_is_skipped_now_and_then_holds() -> None:
    """In between there are checks."""
    run = watched()
    for step in (2, 4, 6):
        run.diagnosis.add(skipped_finding(run.diagnosis.plan, step, step // 2))
        run.diagnosis.observe(When(step + 1, update=step), [observed(HEALTHY)], {})
        assert holding(run) == ["finalize-skipped"]
    run.diagnosis.observe(When(8, update=7), [observed(HEALTHY)], {})
    assert holding(run) == []
