"""What holds for whatever a run looks like: stories of random pictures, told in two ways that must not matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit._builders import (
    GRADIENT,
    VALUE,
    ZERO,
    Picture,
    Run,
    Vector,
    Vectors,
    apart,
    averaged,
    copies,
    in_camps,
    kept,
    outside,
    partials,
    spec,
    summed,
    times,
    watched,
)
from tpwatch.config import Config, Thresholds
from tpwatch.records import SEVERITIES, Finding

# Derandomised and without a database: a failure is the same on every machine.
steadily = settings(
    max_examples=40,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)

NAMES = ("a", "b", "c")


@dataclass(frozen=True)
class Story:
    """A group, its settings, and what each of its parameters looks like at each step."""

    size: int
    config: Config
    rules: tuple[tuple[str, bool], ...]
    """Marked or declared reduction of each parameter."""
    exact: bool
    steps: tuple[tuple[Picture, ...], ...]

    def tell(self, change: Callable[[Picture], Picture] = lambda picture: picture, **options: Any) -> Run:
        """The run of this story, of pictures changed in some way."""
        specs = [spec(n, rule=rule, declared=said) for n, (rule, said) in zip(NAMES, self.rules, strict=False)]
        run = watched(*specs, size=self.size, config=self.config, exact=self.exact, **options)
        for pictures in self.steps:
            run.step(*map(change, pictures))
        return run


def gradients(size: int) -> st.SearchStrategy[Vectors]:
    """Copies, near copies, partials, silence, zeros on some ranks, and gradients absent on some."""
    some = st.lists(st.sampled_from([GRADIENT, ZERO, VALUE]), min_size=size, max_size=size)
    uneven = st.lists(st.sampled_from([GRADIENT, None]), min_size=size, max_size=size)
    usual = st.sampled_from([copies(size), apart(size), partials(size), partials(size)])
    return st.one_of(usual, usual, some, uneven, st.just([ZERO] * size))


def reductions(size: int) -> st.SearchStrategy[Callable[..., Picture]]:
    """What may be done to them: nothing, sum, mean, another factor, a sum over camps only."""

    def camps(before: Vectors, **changes: Any) -> Picture:
        return in_camps(before, [range(size // 2), range(size // 2, size)], **changes)

    def doubled(before: Vectors, **changes: Any) -> Picture:
        return times(2.0, before, **changes)

    return st.sampled_from([kept, summed, averaged, doubled, camps])


@st.composite
def pictures(draw: st.DrawFn, size: int) -> Picture:
    """One parameter at one check."""
    if draw(st.integers(0, 9)) == 0:
        return outside(size)
    before = draw(gradients(size))
    reduce = kept if None in before else draw(reductions(size))
    moved = draw(st.sampled_from([0.0, 0.0, 0.0, 1e-6, 0.25]))
    return reduce(before, values=apart(size, by=moved, vector=VALUE))


@st.composite
def stories(draw: st.DrawFn) -> Story:
    """Runs of stretches: a few steps that look alike, then something else."""
    size, width = draw(st.integers(2, 5)), draw(st.integers(1, len(NAMES)))
    limits = draw(st.sampled_from([Thresholds(), Thresholds(), Thresholds(max_abs=0.1), Thresholds(ratio=1.5)]))
    config = Config(patience=draw(st.integers(1, 3)), deep_interval=draw(st.integers(3, 9)), thresholds=limits)
    row = st.tuples(*[pictures(size)] * width)
    stretches = draw(st.lists(st.tuples(row, st.integers(1, 5)), min_size=1, max_size=4))
    rule = st.tuples(st.sampled_from(["none", "sum", "avg"]), st.booleans())
    rules = draw(st.tuples(*[rule] * width))
    steps = tuple(look for look, count in stretches for _ in range(count))
    return Story(size, config, rules, draw(st.booleans()), steps)


# ------------------------------------------------------------------------------------------- permutation


def permuted(order: Sequence[int]) -> Callable[[Picture], Picture]:
    """Position i of the changed picture is position `order[i]` of the original."""

    def move(vectors: Vectors) -> list[Vector | None]:
        return [vectors[p] for p in order]

    def change(picture: Picture) -> Picture:
        values = move(picture.values) if picture.values else ()
        return replace(picture, before=move(picture.before), after=move(picture.after), values=values)

    return change


RANKED = ("zero_ranks", "absent_ranks")
CAMPS = ("camps_param", "camps_grad_post")
BY_RANK = ("norms_pre", "norms_post")


def under_the_names_of(order: Sequence[int], finding: Finding) -> object:
    """A finding with each rank i called `order[i]`, and ranks and camps in no order."""
    facts = dict(finding.evidence)
    for key in RANKED:
        facts[key] = frozenset(order[rank] for rank in facts.get(key, ()))
    for key in CAMPS:
        facts[key] = frozenset(frozenset(order[rank] for rank in camp) for camp in facts.get(key, ()))
    for key in BY_RANK:
        facts[key] = {order[i]: norm for i, norm in enumerate(facts.get(key, ()))}
    odd = frozenset(order[rank] for rank in finding.odd_ranks)
    return replace(finding, evidence=facts, odd_ranks=()), odd


@steadily
@given(stories(), st.data())
def test_the_order_of_ranks_changes_nothing_but_their_names(story: Story, data: st.DataObject) -> None:
    """Which rank holds what is no argument; only who is named in a finding follows the rank."""
    order = data.draw(st.permutations(range(story.size)))
    one, other = story.tell(), story.tell(permuted(order))
    same = list(range(story.size))
    assert [under_the_names_of(order, f) for f in other.findings] == [under_the_names_of(same, f) for f in one.findings]
    assert other.asked == one.asked
    assert other.diagnosis.unverified == one.diagnosis.unverified
    assert other.diagnosis.not_exercised == one.diagnosis.not_exercised


# ----------------------------------------------------------------------------------------------- scale


def scaled(factor: float) -> Callable[[Picture], Picture]:
    """All gradients times `factor`, before and after; values as they are."""

    def change(picture: Picture) -> Picture:
        before, after = times(factor, picture.before).after, times(factor, picture.after).after
        return replace(picture, before=before, after=after, values=picture.held)

    return change


def verdict(finding: Finding) -> Finding:
    """A finding without what has the unit of a gradient."""
    gradient = ("norms_pre", "norms_post", "spread_grad_post")
    facts = {key: fact for key, fact in finding.evidence.items() if key not in gradient}
    return replace(finding, evidence=facts, max_abs=0.0)


@steadily
@given(stories(), st.integers(-24, 24))
def test_the_scale_of_gradients_changes_no_verdict(story: Story, exponent: int) -> None:
    """A power of two rounds nothing: with another loss scale everything is found at the same step, as sure."""
    one, other = story.tell(), story.tell(scaled(2.0**exponent))
    assert [verdict(f) for f in other.findings] == [verdict(f) for f in one.findings]
    assert other.asked == one.asked
    assert other.diagnosis.unverified == one.diagnosis.unverified


# ---------------------------------------------------------------------------------------------- agreement


@steadily
@given(stories())
def test_two_instances_that_are_fed_the_same_agree(story: Story) -> None:
    """Every rank of a group reaches the same findings, statuses and wishes, though they advance in turns."""
    ranks = [replace(story, steps=()).tell() for _ in range(2)]
    for look in story.steps:
        outcomes = [rank.step(*look) for rank in ranks]
        assert outcomes[0] == outcomes[1]
        step = ranks[0].done + 1
        assert ranks[0].diagnosis.wanted(step, 1) == ranks[1].diagnosis.wanted(step, 1)
        assert ranks[0].diagnosis.unsettled(1) == ranks[1].diagnosis.unsettled(1)
        assert ranks[0].findings == ranks[1].findings
        assert ranks[0].diagnosis.unverified == ranks[1].diagnosis.unverified


@steadily
@given(stories(), st.integers(1, 9))
def test_asking_what_is_wanted_changes_nothing(story: Story, times_asked: int) -> None:
    """`wanted` and `unsettled` are questions: a rank that asks more often reaches the same findings."""
    one, other = story.tell(), replace(story, steps=()).tell()
    for look in story.steps:
        for step in range(other.done, other.done + times_asked):
            other.diagnosis.wanted(step, 1)
            other.diagnosis.unsettled(1)
        other.step(*look)
    assert other.findings == one.findings


# ------------------------------------------------------------------------------------------ invariants


@steadily
@given(stories())
def test_one_parameter_has_one_finding_and_it_is_sound(story: Story) -> None:
    """One root cause each, dates in order, a confidence that is a share, a cause for each consequence."""
    run = story.tell()
    names = [f.parameter for f in run.findings]
    assert len(names) == len(set(names))
    causes = {f.parameter for f in run.findings if f.role == "cause"}
    for finding in run.findings:
        assert 0 <= finding.first_step <= finding.last_step <= run.done
        assert 1 <= finding.count <= run.done
        assert 0.0 <= finding.confidence < 1.0
        assert (finding.caused_by in causes) is (finding.role == "consequence")
        assert 2 * len(finding.odd_ranks) < story.size


@steadily
@given(stories())
def test_findings_never_vanish_nor_get_milder(story: Story) -> None:
    """What was said once stays said: kind, role and first step are kept, severity and confidence only rise."""
    run, before = replace(story, steps=()).tell(), dict[str, Finding]()
    for look in story.steps:
        run.step(*look)
        now = {f.parameter: f for f in run.findings}
        for name, old in before.items():
            new = now[name]
            assert (new.kind, new.role, new.first_step) == (old.kind, old.role, old.first_step)
            assert SEVERITIES.index(new.severity) >= SEVERITIES.index(old.severity)
            assert (new.confidence, new.count, new.max_abs) >= (old.confidence, old.count, old.max_abs)
        before = now


@steadily
@given(st.integers(2, 5), st.lists(st.integers(0, 4), min_size=1, max_size=20), st.booleans())
def test_a_healthy_run_has_no_finding(size: int, looks: list[int], exact: bool) -> None:  # noqa: FBT001 - drawn
    """Healthy rows of the table in any order and mixture accuse nobody."""
    healthy = [
        kept(copies(size)),
        averaged(copies(size)),
        averaged(apart(size)),
        summed(partials(size)),
        kept([ZERO] * size),
    ]
    run = watched(size=size, exact=exact)
    for look in looks:
        run.step(healthy[look])
    assert run.findings == []


@steadily
@given(stories())
def test_leaving_out_settled_rows_changes_nothing(story: Story) -> None:
    """The monitor hands over only what changed or is open: same faults, same steps, same questions."""

    def brief(run: Run) -> list[tuple[object, ...]]:
        return [(f.kind, f.parameter, f.role, f.first_step, f.last_step, f.severity) for f in run.findings]

    one, other = story.tell(), story.tell(leaves_out_settled=True)
    assert brief(other) == brief(one)
    assert other.asked == one.asked
    assert other.diagnosis.unverified == one.diagnosis.unverified
    assert other.diagnosis.not_exercised == one.diagnosis.not_exercised
