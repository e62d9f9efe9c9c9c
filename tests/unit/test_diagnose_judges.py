"""One judge at a time: families of explanations, what may be claimed without a verdict, and helpers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.unit._builders import (
    GRADIENT,
    VALUE,
    ZERO,
    Picture,
    apart,
    averaged,
    copies,
    gathered,
    kept,
    observed,
    partials,
    spec,
    summed,
    times,
)
from tpwatch.config import Config, Thresholds
from tpwatch.diagnose import compare, judges
from tpwatch.diagnose.history import History
from tpwatch.diagnose.judges import Case
from tpwatch.diagnose.rules import BY_KIND

MOVED = apart(by=0.5, vector=VALUE)
SCALED = times(0.7, copies())
OTHER = Picture(copies(), [(2.0, 1.0, -1.0, 0.5)] * 2)
WOKEN = Picture([ZERO] * 2, copies())


def suspected(picture: Picture, **history: object) -> str:
    """The family that this picture belongs to after such a history, with values equal until now."""
    seen = observed(picture)
    known = History(**{"values_were_equal": True, **history})  # type: ignore[arg-type]
    return judges.suspicion(compare.pattern(seen, picture.size), seen, known)


FAMILIES = {
    "copies left alone": (kept(copies()), "healthy", "unreduced"),
    "mean of copies": (averaged(copies()), "healthy", "unreduced"),
    "sum of copies": (summed(copies()), "copies/sum", "copies/sum"),
    "different, left alone": (kept(partials()), "unreduced", "unreduced"),
    "different, changed": (summed(partials()), "changed", "apart"),
    "scaled": (SCALED, "copies/scaled", "apart"),
    "changed into something else": (OTHER, "copies/other", "apart"),
    "woken": (WOKEN, "woken", "apart"),
    "uneven": (kept([GRADIENT, None]), "uneven", "uneven"),
}


@pytest.mark.parametrize(("picture", "equal", "apart_"), FAMILIES.values(), ids=FAMILIES)
def test_families_of_explanations(picture: Picture, equal: str, apart_: str) -> None:
    """With equal values; and with values apart, after a reduced gradient that was not the same everywhere."""
    assert suspected(picture) == equal
    assert suspected(replace(picture, values=MOVED), diverged_at=1) == apart_


@pytest.mark.parametrize("picture", [kept(copies()), kept(partials()), summed(partials()), SCALED, WOKEN])
def test_values_apart_without_a_gradient_that_explains_it_were_written(picture: Picture) -> None:
    """If they were equal before; what was never seen equal has another history."""
    moved = replace(picture, values=MOVED)
    assert suspected(moved) == "written"
    assert suspected(moved, values_were_equal=False) != "written"
    assert suspected(moved, born_different=True) != "written"


def test_what_was_written_stays_so_while_values_differ() -> None:
    """Gradients that differ since are its effect; copies that are equal again end it."""
    moved = kept(partials(), values=MOVED)
    assert suspected(moved, suspicion="written", diverged_at=5) == "written"
    assert suspected(kept(copies()), suspicion="written", diverged_at=5) == "healthy"


def case(picture: Picture, history: History, config: Config | None = None) -> Case:
    """A case of one parameter that is marked to be summed."""
    seen = observed(picture)
    pattern = compare.pattern(seen, picture.size)
    history.advance(judges.suspicion(pattern, seen, history), 1, 1, seen)
    return Case(spec("p"), seen, history, pattern, picture.size, loss_scaler=False, config=config or Config())


def after_gathers(picture: Picture, count: int, *, exact: bool = True) -> Case:
    """The same after `count` gathers of it."""
    history = History()
    one = case(picture, history)
    for check in range(1, count + 1):
        history.learn(gathered(picture, exact=exact), (check, check))
    return one


@pytest.mark.parametrize(
    ("picture", "gathers", "status"),
    [
        (kept(copies()), 0, "healthy"),
        (summed(partials()), 0, "unverified"),
        (summed(partials()), 1, "healthy"),
        (averaged(apart()), 1, "healthy"),
        (Picture(partials(), copies()), 1, "undecided"),
        (SCALED, 0, "unverified"),
    ],
)
def test_what_may_be_claimed_without_a_verdict(picture: Picture, gathers: int, status: str) -> None:
    """Healthy only once it is known what was done."""
    one = after_gathers(picture, gathers)
    assert judges.judge(one) is None
    assert judges.status(one) == status


@pytest.mark.parametrize(("exact", "gathers", "ceiling"), [(True, 1, 0.99), (False, 3, 0.9)])
def test_sketches_ask_for_more_gathers_and_claim_less(*, exact: bool, gathers: int, ceiling: float) -> None:
    """One look at elements is enough; estimates must agree `patience` times."""
    verdict = judges.judge(after_gathers(kept(partials()), 1, exact=exact))
    assert verdict is not None
    assert (verdict.kind, verdict.needs_gathers, verdict.ceiling) == ("missing-reduce", gathers, ceiling)


# --------------------------------------------------------------------------------------------- thresholds


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({}, ""),
        ({"max_abs": 0.5}, ""),
        ({"max_abs": 0.49}, "max_abs 0.5 > 0.49"),
        ({"max_rel": 0.2}, ""),
        ({"max_rel": 0.19}, "max_rel 0.2 > 0.19"),
        ({"max_abs": 0.1, "max_rel": 0.1}, "max_abs 0.5 > 0.1"),
        ({"ratio": 0.1}, ""),
    ],
)
def test_a_threshold_is_exceeded_by_more_than_itself(limits: dict[str, float], text: str) -> None:
    """Values 2 and 2.5: half apart, a fifth of the larger one."""
    picture = kept(copies(), values=[(1.0, 2.0, 3.0, 4.0), (1.0, 2.5, 3.0, 4.0)])
    one = case(picture, History(values_were_equal=True), Config(thresholds=Thresholds(**limits)))
    one.history.learn(gathered(picture), (1, 1))
    assert judges.threshold(one) == text


def test_thresholds_say_nothing_about_values_that_never_were_equal() -> None:
    """An init-mismatch is named as such, however small or large."""
    picture = kept(copies(), values=MOVED)
    one = case(picture, History(born_different=True), Config(thresholds=Thresholds(max_abs=0.0)))
    one.history.learn(gathered(picture), (1, 1))
    assert judges.threshold(one) == ""
    verdict = judges.judge(one)
    assert verdict is not None
    assert verdict.kind == "init-mismatch"


# ------------------------------------------------------------------------------------------------ helpers


def test_the_ratio_is_of_norms_not_of_squares() -> None:
    """Three times the gradient is a ratio of 3."""
    assert judges.norm_ratio(observed(times(3.0, copies()))) == pytest.approx(3.0)


@pytest.mark.parametrize("picture", [kept(partials()), summed(partials()), WOKEN, Picture(copies(), [GRADIENT, ZERO])])
def test_there_is_no_ratio_unless_all_ranks_share_it(picture: Picture) -> None:
    """Norms must be the same on every rank, before and after, and not zero before."""
    assert judges.norm_ratio(observed(picture)) is None


def test_lopsided_is_a_reduced_gradient_that_some_ranks_alone_cannot_use() -> None:
    """What nothing reduces may overflow on one rank; everywhere or nowhere is even."""
    one_rank = observed(kept([GRADIENT, (math.nan, *GRADIENT[1:])]))
    everywhere = observed(kept([(math.inf, *GRADIENT[1:])] * 2))
    assert judges.lopsided(spec("p", rule="sum"), one_rank)
    assert not judges.lopsided(spec("p", rule="none"), one_rank)
    assert not judges.lopsided(spec("p", rule="sum"), everywhere)
    assert not judges.lopsided(spec("p", rule="sum"), observed(kept(copies())))


def test_no_judge_is_more_severe_than_its_rule_says() -> None:
    """The rules page states the highest severity of each kind."""
    verdicts = [judges.judge(after_gathers(p, 1)) for p in (kept(partials()), summed(copies()), averaged(partials()))]
    for verdict in verdicts:
        assert verdict is not None
        assert verdict.severity == BY_KIND[verdict.kind].severity
