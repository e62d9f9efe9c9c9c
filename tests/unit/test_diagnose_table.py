"""The table of DESIGN section 3, row by row: gradients before the reduction x what was done to them -> verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

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
    in_camps,
    kept,
    observed,
    outside,
    partials,
    silent,
    spec,
    summed,
    times,
    watched,
)
from tpwatch.config import Config, Thresholds
from tpwatch.diagnose import When

SIZES = pytest.mark.parametrize("size", [2, 3, 4, 8])
TIERS = pytest.mark.parametrize("exact", [True, False], ids=["elements", "sketches"])
STEPS = 6
"""Enough for the default patience, with sketches too: the first gather comes one check after the first look."""


def after(picture: Picture, **changes: Any) -> Run:
    """A run of one parameter that looks like this at every step."""
    run = watched(size=picture.size, **changes)
    run.steps(STEPS, picture)
    return run


def assert_healthy(run: Run) -> None:
    """No finding, and a claim is made: neither undecided nor never exercised."""
    assert run.findings == []
    assert run.diagnosis.unverified == ()
    assert run.diagnosis.not_exercised == ()


# ------------------------------------------------------------------------------------ copies, near copies


@SIZES
def test_copies_none_post_bit_identical_is_healthy(size: int) -> None:
    """Complete gradients that nobody touches need nothing."""
    assert_healthy(after(kept(copies(size))))


@SIZES
def test_copies_avg_is_healthy(size: int) -> None:
    """The mean of copies is the copy."""
    assert_healthy(after(averaged(copies(size))))


def test_copies_avg_that_rounds_is_healthy() -> None:
    """A mean computed in a narrow type is the copy up to rounding, not bit for bit."""
    picture = times(1 + 2**-9, copies(3))
    assert not observed(picture).kept_lo
    assert_healthy(after(picture))


@SIZES
@TIERS
def test_near_copies_avg_is_healthy(size: int, exact: bool) -> None:  # noqa: FBT001 - a parametrised value
    """Averaging is what near copies need."""
    assert_healthy(after(averaged(apart(size)), exact=exact))


@SIZES
@TIERS
def test_near_copies_none_is_drift(size: int, exact: bool) -> None:  # noqa: FBT001 - as above
    """Gradients equal to rounding that nothing averages: the copies will move apart."""
    finding = after(kept(apart(size)), exact=exact).only
    assert (finding.kind, finding.code, finding.role) == ("drift", "TPW102", "cause")
    assert (finding.observed, finding.expected) == ("none", "avg")
    assert finding.first_step == 1


@SIZES
def test_copies_sum_is_double_reduce(size: int) -> None:
    """N times too large while all replicas agree: tier 1 alone decides."""
    finding = after(summed(copies(size))).only
    assert (finding.kind, finding.severity, finding.observed) == ("double-reduce", "error", "sum")
    assert finding.ratio == pytest.approx(size)
    assert finding.first_step == 1


@SIZES
@TIERS
def test_near_copies_sum_is_double_reduce(size: int, exact: bool) -> None:  # noqa: FBT001 - as above
    """Copies up to rounding that were summed are no partials."""
    finding = after(summed(apart(size)), exact=exact).only
    assert (finding.kind, finding.observed) == ("double-reduce", "sum")
    assert finding.ratio is None, "norms before the reduction differ, so there is no one ratio"


def test_copies_summed_over_another_group_are_undecided() -> None:
    """A factor other than 1 and N fits no reduction of this group: listed, not accused."""
    run = after(times(2.0, copies(4)))
    assert run.findings == []
    assert run.diagnosis.unverified == ("p",)


@pytest.mark.parametrize("kind", ["sum", "avg"])
def test_a_declared_sum_of_copies_is_healthy(kind: str) -> None:
    """A hand-scaled 1/N copy that is summed on purpose can be declared; declaring `avg` accuses it all the same."""
    run = watched(spec("p", rule=kind, declared=True))
    run.steps(STEPS, summed(copies()))
    assert list(run.named.values()) == ([] if kind == "sum" else ["double-reduce"])


# ----------------------------------------------------------------------------------------------- partials


@SIZES
@TIERS
def test_partials_sum_is_healthy(size: int, exact: bool) -> None:  # noqa: FBT001 - as above
    """Parts of a gradient that are added up are complete."""
    assert_healthy(after(summed(partials(size)), exact=exact))


@SIZES
@TIERS
def test_partials_none_is_missing_reduce(size: int, exact: bool) -> None:  # noqa: FBT001 - as above
    """Every rank goes its own way with a part of the gradient."""
    finding = after(kept(partials(size)), exact=exact).only
    assert (finding.kind, finding.code, finding.severity) == ("missing-reduce", "TPW103", "error")
    assert (finding.observed, finding.expected) == ("none", "sum")
    assert finding.first_step == 1


def test_partials_none_with_zero_ranks_names_them() -> None:
    """A gradient that is exactly zero on some ranks is a partial; the zero ranks are evidence, not a kind."""
    before: list[Vector | None] = [GRADIENT, ZERO, ZERO, (1.0, 2.0, 3.0, 4.0)]
    finding = after(kept(before)).only
    assert finding.kind == "missing-reduce"
    assert finding.evidence["zero_ranks"] == [1, 2]


@SIZES
@TIERS
def test_partials_avg_is_averaged_partial(size: int, exact: bool) -> None:  # noqa: FBT001 - as above
    """The mean of parts is N times too small, unless somebody asked for it."""
    finding = after(averaged(partials(size)), exact=exact).only
    assert (finding.kind, finding.code, finding.severity) == ("averaged-partial", "TPW105", "error")
    assert (finding.observed, finding.expected) == ("avg", "sum")


@pytest.mark.parametrize("declared", [False, True])
def test_partials_avg_as_the_rule_says_is_healthy(declared: bool) -> None:  # noqa: FBT001 - as above
    """A marker or a declaration that asks for the mean is believed."""
    run = watched(spec("p", rule="avg", declared=declared))
    run.steps(STEPS, averaged(partials()))
    assert_healthy(run)


def test_partials_sum_equal_only_to_rounding_is_healthy() -> None:
    """A reduction that is not bit-reproducible between ranks is no wrong group, though two camps appear."""
    before = partials(4)
    picture = summed(before)
    off = tuple(x * (1 + 2**-22) for x in picture.after[0] or ())
    picture = replace(picture, after=[picture.after[0], picture.after[1], off, off])
    assert not observed(picture).post.same
    assert_healthy(after(picture))


def test_between_near_copies_and_partials_is_undecided() -> None:
    """Parts that are nearly parallel look like noisy copies: no claim is made about what they are."""
    run = after(kept(akin(0.06)))
    assert run.findings == []
    assert run.diagnosis.unverified == ("p",)


@pytest.mark.parametrize(("deviation", "kind"), [(0.029, "drift"), (0.11, "missing-reduce")])
def test_the_edges_of_the_undecided_range(deviation: float, kind: str) -> None:
    """Just outside of it on either side the kinds are told apart."""
    assert after(kept(akin(deviation))).only.kind == kind


def test_partials_changed_into_something_else_are_undecided() -> None:
    """Neither the sum nor the mean of what was there before: other reductions are not accused."""
    before = partials(2)
    run = after(Picture(before, [GRADIENT, GRADIENT]))
    assert run.findings == []
    assert run.diagnosis.unverified == ("p",)


# ------------------------------------------------------------------------------------------------- uneven


UNEVEN: list[Vector | None] = [GRADIENT, None, GRADIENT, None]


def test_uneven_presence_is_grad_presence_at_once_before_the_reduction() -> None:
    """The entry side alone suffices, because the framework's reduction may hang next."""
    run = watched("p", size=4)
    (finding,) = run.diagnosis.presence(When(1, pristine=True), [observed(kept(UNEVEN))]).new
    assert (finding.kind, finding.severity, finding.point) == ("grad-presence", "error", "grad_pre")
    assert finding.evidence["absent_ranks"] == [1, 3]
    assert (finding.first_step, finding.count) == (1, 1)


def test_uneven_presence_is_one_finding_of_both_sides() -> None:
    """Where the reduction did not hang, the exit side does not report it again, nor count it twice."""
    run = watched("p", size=4)
    row = observed(kept(UNEVEN))
    run.diagnosis.presence(When(1, pristine=True), [row])
    assert run.diagnosis.observe(When(1, pristine=True), [row], {}).new == ()
    assert run.only.count == 1
    assert run.diagnosis.presence(When(2, update=1), [row]).new == ()
    assert run.only.count == 2


@pytest.mark.parametrize(
    ("before", "odd"),
    [
        ([GRADIENT, None, GRADIENT, GRADIENT], (1,)),
        ([None, GRADIENT, None, None], (1,)),
        (UNEVEN, ()),
        ([GRADIENT, None], ()),
    ],
)
def test_uneven_presence_outvotes_by_majority_only(before: list[Vector | None], odd: tuple[int, ...]) -> None:
    """With or without a gradient: the smaller side is odd, and at half and half nobody is."""
    run = watched("p", size=len(before))
    run.diagnosis.presence(When(1, pristine=True), [observed(kept(before))])
    assert run.only.odd_ranks == odd


def test_a_gradient_on_no_rank_is_not_uneven() -> None:
    """A frozen parameter is frozen on all ranks, and never exercised."""
    run = watched("p")
    run.steps(STEPS, kept([None, None]))
    assert run.findings == []
    assert run.diagnosis.not_exercised == ("p",)


# -------------------------------------------------------------------------------------------------- camps


CAMPS = [[0, 1], [2, 3]]


@TIERS
@pytest.mark.parametrize("before", [partials(4), apart(4)], ids=["partials", "near copies"])
def test_post_in_two_camps_is_wrong_group(before: list[Vector], exact: bool) -> None:  # noqa: FBT001 - as above
    """Ranks agree inside camps and differ between them: the camps are in the evidence."""
    before = [tuple(x * (1 + rank) for x in v) for rank, v in enumerate(before)]
    finding = after(in_camps(before, CAMPS), exact=exact).only
    assert (finding.kind, finding.code, finding.severity) == ("wrong-group", "TPW106", "error")
    assert finding.evidence["camps_grad_post"] == CAMPS


def test_a_wrong_group_outvotes_the_smaller_camp() -> None:
    """Three of four ranks agree: the fourth is the odd one."""
    assert after(in_camps(partials(4), [[0, 1, 3]])).only.odd_ranks == (2,)


def test_no_camps_at_two_ranks() -> None:
    """Two ranks that differ are two camps of one, which says nothing about groups."""
    picture = Picture(partials(2), [GRADIENT, VALUE])
    assert after(picture).findings == []


# ------------------------------------------------------------------------------------------ silent, woken


def test_silent_is_not_exercised() -> None:
    """Zero before and after on every rank: no claim is made, in either direction."""
    run = after(silent())
    assert run.findings == []
    assert run.diagnosis.not_exercised == ("p",)
    assert run.diagnosis.unverified == ()


@pytest.mark.parametrize(("make", "kind"), [(kept, "missing-reduce"), (averaged, "averaged-partial"), (summed, None)])
def test_silent_is_re_armed(make: Callable[[list[Vector]], Picture], kind: str | None) -> None:
    """A LoRA factor whose gradient is zero at first is judged from the step at which it is not."""
    run = watched("p")
    run.steps(2, silent())
    run.steps(STEPS, make(partials()))
    assert run.diagnosis.not_exercised == ()
    assert list(run.named.values()) == ([kind] if kind else [])
    assert [f.first_step for f in run.findings] == ([3] if kind else [])


def test_silent_steps_between_do_not_reset_patience() -> None:
    """A step without evidence neither continues nor breaks a streak."""
    run = watched("p")
    outcomes = [run.step(kept(partials()) if step % 2 else silent()) for step in range(1, 6)]
    assert [len(o.new) for o in outcomes] == [0, 0, 0, 0, 1]
    assert (run.only.first_step, run.only.count) == (1, 3)


def test_woken_is_unverified() -> None:
    """Zero before the reduction and not after it: something else writes there, which is no known fault."""
    run = after(Picture([ZERO, ZERO], [GRADIENT, GRADIENT]))
    assert run.findings == []
    assert run.diagnosis.unverified == ("p",)
    assert run.diagnosis.not_exercised == ()


def test_other_is_unverified() -> None:
    """Copies turned into something that is no multiple of them."""
    run = after(Picture(copies(), [(1.0, 1.0, 1.0, 1.0)] * 2))
    assert run.findings == []
    assert run.diagnosis.unverified == ("p",)


def test_scaled_past_the_ratio_is_wrong_scale() -> None:
    """Undecided without a threshold, an error at once with one."""
    run = watched("p", size=4, config=Config(thresholds=Thresholds(ratio=1.5)))
    run.step(times(2.0, copies(4)))
    assert (run.only.kind, run.only.ratio) == ("wrong-scale", 2.0)


def test_outside_of_the_call_is_neither_present_nor_missing() -> None:
    """Another model chunk's parameter, or a slice owned elsewhere: nothing is said about it."""
    run = after(outside())
    assert run.findings == []
    assert run.diagnosis.not_exercised == ()
    assert run.diagnosis.unverified == ()
