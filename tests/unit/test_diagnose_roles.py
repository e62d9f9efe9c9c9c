"""One fault, one finding: causes and consequences, doubt, odd ranks, and faults of values alone."""

from __future__ import annotations

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
    kept,
    observed,
    outside,
    partials,
    silent,
    summed,
    watched,
)
from tpwatch.config import Config
from tpwatch.diagnose import When
from tpwatch.records import Finding

HEALTHY = kept(copies())
MOVED = apart(by=0.5, vector=VALUE)


def of(run: Run, parameter: str) -> Finding:
    """The finding of one parameter."""
    return next(f for f in run.findings if f.parameter == parameter)


def role(run: Run, parameter: str) -> tuple[str, str | None]:
    """Its role and, for a consequence, what it follows from."""
    finding = of(run, parameter)
    return finding.role, finding.caused_by


# --------------------------------------------------------------------------------- one fault, one finding


def moving(step: int) -> Picture:
    """Partials that are never summed: values are equal at step 1 and move apart from then on."""
    return kept(partials(), values=apart(by=0.01 * (step - 1), vector=VALUE))


def test_a_missing_sum_explains_the_values_it_moves_apart() -> None:
    """The spread of the values is evidence of missing-reduce, not also drift."""
    run = watched()
    run.steps(10, moving)
    assert run.named == {"p": "missing-reduce"}
    assert run.only.evidence["spread_param"]["max_abs"] == pytest.approx(0.09)
    assert run.only.max_abs == pytest.approx(0.09)


def test_drift_keeps_its_kind_while_values_move_apart() -> None:
    """Near copies that nobody averages are one drift, from their first step to the last."""
    run = watched()
    run.steps(8, lambda step: kept(apart(), values=apart(by=1e-4 * (step - 1), vector=VALUE)))
    assert run.named == {"p": "drift"}
    assert (run.only.first_step, run.only.last_step) == (1, 8)


def test_an_init_mismatch_explains_a_gradient_that_is_not_summed() -> None:
    """Values that differed from the start are the root cause; what the gradient does is in the evidence."""
    run = watched()
    run.steps(6, kept(partials(), values=MOVED))
    assert run.named == {"p": "init-mismatch"}
    assert run.only.evidence["gradient"] == {"before": "partials", "reduction": "none"}


def test_the_first_kind_stays() -> None:
    """A parameter whose picture changes later keeps its one finding."""
    run = watched()
    run.steps(4, summed(copies()))
    run.steps(6, kept(partials()))
    assert run.named == {"p": "double-reduce"}
    assert run.only.last_step == 4


# ------------------------------------------------------------------ consequence, rule (a): copies earlier


def test_copies_that_differ_after_an_older_cause_are_its_consequence() -> None:
    """Seen as bit-identical copies before, with a cause elsewhere since: it follows, and never counts."""
    run = watched("cause", "p")
    run.steps(2, kept(partials()), HEALTHY)
    run.steps(6, kept(partials()), kept(partials()))
    assert role(run, "p") == ("consequence", "cause")
    assert not of(run, "p").counts


def test_copies_that_differ_without_an_older_cause_are_a_cause() -> None:
    """The same picture with nothing wrong elsewhere is a fault of its own."""
    run = watched("other", "p")
    run.steps(2, HEALTHY, HEALTHY)
    run.steps(6, HEALTHY, kept(partials()))
    assert role(run, "p") == ("cause", None)


def test_never_seen_as_copies_is_a_cause_after_an_older_one_too() -> None:
    """A LoRA factor whose gradient is zero at step 1 and partial at step 2 was never copies: still a cause."""
    run = watched("cause", "p")
    run.steps(2, kept(partials()), silent())
    run.steps(6, kept(partials()), kept(partials()))
    assert role(run, "p") == ("cause", None)


def test_two_faults_of_the_same_step_are_two_causes() -> None:
    """Neither is older than the other."""
    run = watched("a", "b")
    run.steps(2, HEALTHY, HEALTHY)
    run.steps(6, kept(partials()), kept(partials()))
    assert (role(run, "a"), role(run, "b")) == (("cause", None), ("cause", None))


def test_a_double_sum_is_never_a_consequence() -> None:
    """Whoever sums copies does so whatever the activations are."""
    run = watched("cause", "p")
    run.steps(2, kept(partials()), HEALTHY)
    run.steps(6, kept(partials()), summed(copies()))
    assert role(run, "p") == ("cause", None)


def test_a_consequence_is_no_cause_of_others() -> None:
    """`caused_by` names the root, not the link in between."""
    run = watched("cause", "first", "second")
    run.steps(2, kept(partials()), HEALTHY, HEALTHY)
    run.steps(5, kept(partials()), kept(partials()), HEALTHY)
    run.steps(5, kept(partials()), kept(partials()), kept(partials()))
    assert role(run, "first") == role(run, "second") == ("consequence", "cause")


# ------------------------------------------------------ consequence, rule (b): together with a value fault


def test_what_first_differs_with_an_init_mismatch_is_its_consequence() -> None:
    """Equal values, and gradients that differ in the very step in which other values did."""
    run = watched("cause", "p")
    run.steps(6, kept(copies(), values=MOVED), kept(partials()))
    assert run.named["cause"] == "init-mismatch"
    assert role(run, "p") == ("consequence", "cause")


def test_what_differs_itself_at_the_start_is_a_cause_too() -> None:
    """Two parameters with different initial values: neither explains the other."""
    run = watched("a", "b")
    run.steps(3, kept(copies(), values=MOVED), kept(copies(), values=MOVED))
    assert (role(run, "a"), role(run, "b")) == (("cause", None), ("cause", None))


def test_what_is_first_exercised_later_than_an_init_mismatch_is_a_cause() -> None:
    """Not the same step, and never seen as copies: neither rule applies."""
    run = watched("cause", "p")
    run.step(kept(copies(), values=MOVED), silent())
    run.steps(6, kept(copies(), values=MOVED), kept(partials()))
    assert role(run, "p") == ("cause", None)


def test_a_missing_sum_is_no_source_within_its_own_step() -> None:
    """It moves values apart from the next update on, not at once."""
    run = watched("a", "b")
    run.steps(6, kept(partials()), kept(apart()))
    assert (role(run, "a"), role(run, "b")) == (("cause", None), ("cause", None))


# ----------------------------------------------------------------------------------------------- doubt


def test_a_cause_is_less_sure_if_values_elsewhere_had_diverged() -> None:
    """It may follow from the older fault after all, and says so."""
    alone, late = watched("other", "p"), watched("other", "p")
    for run, other in ((alone, HEALTHY), (late, kept(partials()))):
        run.steps(2, other, silent())
        run.steps(6, other, kept(partials()))
    assert (of(alone, "p").role, of(late, "p").role) == ("cause", "cause")
    assert of(late, "p").confidence == pytest.approx(of(alone, "p").confidence - 0.2)
    assert "values_elsewhere" in of(late, "p").evidence
    assert "values_elsewhere" not in of(alone, "p").evidence


# ------------------------------------------------------------------------------------------- odd ranks


@pytest.mark.parametrize(
    ("camps", "odd"),
    [("AB", ()), ("AAB", (2,)), ("ABA", (1,)), ("AABB", ()), ("ABBB", (0,)), ("AABC", ()), ("AAABC", (3, 4))],
)
def test_odd_ranks_need_a_strict_majority_against_them(camps: str, odd: tuple[int, ...]) -> None:
    """Ranks by letter hold equal values: more than half must agree before the others are odd."""
    held: dict[str, Vector] = {"A": VALUE, "B": (1.0, 2.0, -3.0, 5.0), "C": (1.0, 2.0, -3.0, 6.0)}
    run = watched(size=len(camps))
    run.steps(3, kept(copies(len(camps)), values=[held[c] for c in camps]))
    assert run.only.kind == "init-mismatch"
    assert run.only.odd_ranks == odd


def test_odd_ranks_are_global_ranks() -> None:
    """The second group of a job does not number its ranks from 0."""
    run = watched(size=3)
    run = Run(type(run.plan)("tp", (8, 10, 12), run.plan.replicas))
    run.steps(3, kept(copies(3), values=[VALUE, GRADIENT, VALUE]))
    assert (run.only.odd_ranks, run.only.ranks) == ((10,), (8, 10, 12))


# ------------------------------------------------------------------------------------ faults of values


def test_init_mismatch_is_said_at_the_first_check() -> None:
    """No patience: the label is update 0, before any step."""
    run = watched()
    (finding,) = run.step(kept(copies(), values=MOVED)).new
    assert (finding.kind, finding.first_step, finding.point) == ("init-mismatch", 0, "param")


def test_no_init_mismatch_at_a_late_attach_to_gradients_nobody_reduces() -> None:
    """After unwatched steps, values that differ may just have drifted: that is what is said."""
    run = watched(pristine=False, done=99)
    run.steps(6, kept(partials(), values=MOVED))
    assert run.named == {"p": "missing-reduce"}
    assert run.only.first_step == 100


def test_init_mismatch_at_a_late_attach_where_gradients_are_equal() -> None:
    """Nothing that is watched could have moved these values apart, however late the first look."""
    run = watched(pristine=False, done=99)
    run.steps(2, kept(copies(), values=MOVED))
    assert run.named == {"p": "init-mismatch"}
    assert run.only.first_step == 99


def test_no_init_mismatch_after_values_were_equal() -> None:
    """A later difference has another cause."""
    run = watched()
    run.step(HEALTHY)
    run.steps(5, kept(copies(), values=MOVED))
    assert run.named == {"p": "external-write"}


def test_external_write_is_dated_to_the_update_before_it_was_seen() -> None:
    """Values at step 4 are those of update 3: what ran since the check of step 3 is to blame."""
    run = watched()
    run.steps(3, HEALTHY)
    run.steps(3, kept(copies(), values=MOVED))
    finding = run.only
    assert (finding.kind, finding.point, finding.severity) == ("external-write", "param", "warning")
    assert finding.first_step == 3


@pytest.mark.parametrize("gradients", [HEALTHY, averaged(apart()), summed(partials())])
def test_external_write_after_reduced_gradients_that_were_bit_identical(gradients: Picture) -> None:
    """Whatever the reduction, ranks that applied the same gradient and differ were written to."""
    run = watched()
    run.steps(3, gradients)
    run.steps(5, Picture(gradients.before, gradients.after, values=MOVED))
    assert run.named == {"p": "external-write"}


@pytest.mark.parametrize("before", [apart(), partials()], ids=["near copies", "partials"])
def test_no_external_write_after_gradients_that_differed(before: list[Vector]) -> None:
    """One unequal update is explanation enough for values that differ since."""
    run = watched()
    run.step(kept(before))
    run.steps(6, kept(copies(), values=MOVED))
    assert "external-write" not in run.named.values()


def test_external_write_is_less_sure_where_steps_were_not_checked() -> None:
    """A gradient fault may hide in between."""
    runs = [watched(config=Config(interval=interval)) for interval in (1, 10)]
    for run in runs:
        run.steps(2, HEALTHY)
        run.steps(3, kept(copies(), values=MOVED))
    assert [run.only.kind for run in runs] == ["external-write"] * 2
    assert runs[1].only.confidence < runs[0].only.confidence


def test_what_first_differs_with_an_external_write_is_its_consequence() -> None:
    """Rule (b) for a write in mid-training: unequal activations from that very step on."""
    run = watched("written", "p")
    run.steps(2, HEALTHY, silent())
    run.steps(6, kept(copies(), values=MOVED), kept(partials()))
    assert run.named["written"] == "external-write"
    assert role(run, "p") == ("consequence", "written")


def test_two_parameters_written_in_the_same_step_are_two_causes() -> None:
    """Rule (b) asks for equal values: what was itself written to follows from nobody."""
    run = watched("a", "b")
    run.steps(2, HEALTHY, HEALTHY)
    run.steps(4, kept(copies(), values=MOVED), kept(copies(), values=MOVED))
    assert run.named == {"a": "external-write", "b": "external-write"}
    assert (role(run, "a"), role(run, "b")) == (("cause", None), ("cause", None))


def test_values_alone_at_the_end_of_training_can_be_compared() -> None:
    """Call 0 has no gradients; what it sees of values enters the history of the first call."""
    run = watched(config=Config(patience=1))
    run.steps(3, HEALTHY)
    (finding,) = run.values(kept(copies(), values=MOVED)).new
    assert (finding.kind, finding.first_step) == ("external-write", 3)


def test_a_comparison_of_equal_values_finds_nothing() -> None:
    """It neither exercises a gradient nor settles anything."""
    run = watched()
    run.step(silent())
    run.values(silent())
    assert run.findings == []
    assert run.diagnosis.not_exercised == ("p",)


@pytest.mark.parametrize(("lost", "kinds"), [(0, {"external-write"}), (2, {"external-write"}), (1, {"drift"})])
def test_what_parted_in_a_check_that_was_lost_was_written_by_nobody(lost: int, kinds: set[str]) -> None:
    """Its gradients may have differed: nobody has seen them, and a later call of the same step has others."""
    run = watched(config=Config(patience=1))
    run.steps(2, HEALTHY)
    if lost:
        run.diagnosis.missed(lost)
    run.step(outside(), call=2)
    run.steps(6, kept(apart(), values=MOVED))
    assert {f.kind for f in run.findings} == kinds


# ------------------------------------------------------------------------------------------------- order


def test_causes_come_first_then_by_first_step() -> None:
    """A report reads from the root down."""
    run = watched("follows", "late", "early")
    run.steps(2, HEALTHY, silent(), kept(partials()))
    run.steps(6, kept(partials()), kept(partials()), kept(partials()))
    assert [f.parameter for f in run.findings] == ["early", "late", "follows"]


def test_within_a_step_values_come_before_gradients_and_the_last_layer_first() -> None:
    """The order of backward: the deepest fault that is nearest to the loss is told first."""
    run = watched("first", "middle", "last", config=Config(patience=1))
    outcome = run.step(kept(copies(), values=MOVED), summed(copies()), summed(copies()))
    assert [f.parameter for f in outcome.new] == ["first", "last", "middle"]


def test_presence_foretold_and_observed_is_one_finding() -> None:
    """Both sides of a check speak of the same parameter; a healthy neighbour stays out of it."""
    run = watched("whole", "uneven")
    row = observed(kept([GRADIENT, None]), 1)
    run.diagnosis.presence(When(1, pristine=True), [row])
    run.diagnosis.observe(When(1, pristine=True), [observed(HEALTHY, 0), row], {})
    assert run.named == {"uneven": "grad-presence"}


def test_a_row_outside_is_no_consequence() -> None:
    """A parameter that this call did not handle has nothing to follow from anything."""
    run = watched("cause", "elsewhere")
    run.steps(6, kept(partials()), outside())
    assert run.named == {"cause": "missing-reduce"}
