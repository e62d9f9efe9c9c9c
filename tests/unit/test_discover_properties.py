"""Whatever the differences between the plans of several ranks, all ranks agree on one common list."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit._builders import spec
from tpwatch.discover import Discovery, agree, restrict
from tpwatch.records import ReplicaSpec, WatchPlan

# Derandomised and without a database: a failure is the same on every machine.
steadily = settings(max_examples=150, deadline=None, database=None, derandomize=True)

CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "name": st.just("other"),
    "shape": st.just((2, 2)),
    "dtype": st.just("bfloat16"),
    "grad_start": st.just(1),
    "grad_stop": st.just(3),
    "rule": st.sampled_from(["none", "avg"]),
    "declared": st.sampled_from([True]),
}


@st.composite
def job(draw: st.DrawFn) -> tuple[dict[int, WatchPlan], int]:
    """Plans by rank that were equal once: rows dropped, added, changed and moved at will; and a leader."""
    ranks = draw(st.lists(st.integers(0, 63), min_size=2, max_size=5, unique=True))
    names = [f"p{i}" for i in range(draw(st.integers(0, 6)))]
    plans = {}
    for rank in ranks:
        rows = [spec(name) for name in names if draw(st.integers(0, 5))]
        for _ in range(draw(st.integers(0, 2)) if rows else 0):
            at, (field, change) = draw(st.integers(0, len(rows) - 1)), draw(st.sampled_from(sorted(CHANGES.items())))
            changed = replace(rows[at], **{field: draw(change)})
            if changed.name not in {row.name for row in rows} - {rows[at].name}:
                rows[at] = changed
        if draw(st.booleans()):
            rows = draw(st.permutations(rows))
        plans[rank] = WatchPlan("tp", tuple(ranks), tuple(rows))
    return plans, draw(st.sampled_from(ranks))


def watched_by(plan: WatchPlan, names: tuple[str, ...]) -> WatchPlan:
    """What a rank goes on with."""
    return restrict(Discovery(plan, tuple(range(len(plan.replicas))), ()), names).plan


@steadily
@given(job(), st.randoms(use_true_random=False))
def test_every_rank_arrives_at_the_same_list(plans_and_leader: tuple[dict[int, WatchPlan], int], random: Any) -> None:
    """In whatever order it received the plans; and the plans restricted to it are equal row by row."""
    plans, leader = plans_and_leader
    common, differences = agree(plans, leader)
    received = list(plans.items())
    random.shuffle(received)
    again, in_other_order = agree(dict(received), leader)
    assert again == common
    assert set(in_other_order) == set(differences)
    restricted = {watched_by(plan, common) for plan in plans.values()}
    assert len(restricted) == 1
    assert len({plan.digest for plan in restricted}) == 1


@steadily
@given(job())
def test_only_what_all_ranks_have_in_common_is_watched(plans_and_leader: tuple[dict[int, WatchPlan], int]) -> None:
    """A row is common if and only if every rank has that very row."""
    plans, leader = plans_and_leader
    common, _ = agree(plans, leader)
    rows = [set(plan.replicas) for plan in plans.values()]
    assert set(common) == {row.name for row in set.intersection(*rows)}


@steadily
@given(job())
def test_a_difference_is_named_where_there_is_one(plans_and_leader: tuple[dict[int, WatchPlan], int]) -> None:
    """One for each rank whose rows are not the leader's, none for the others."""
    plans, leader = plans_and_leader
    _, differences = agree(plans, leader)
    others = {rank for rank, plan in plans.items() if plan.replicas != plans[leader].replicas}
    assert [d.rank for d in differences] == [rank for rank in plans if rank in others]
    known = {row.name for plan in plans.values() for row in plan.replicas}
    assert all(d.parameter in known and d.what for d in differences)


specs = st.builds(
    ReplicaSpec,
    name=st.text(min_size=1, max_size=12),
    shape=st.lists(st.integers(0, 2**40), max_size=4).map(tuple),
    dtype=st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]),
    grad_start=st.integers(0, 2**40),
    grad_stop=st.integers(0, 2**40),
    rule=st.sampled_from(["none", "sum", "avg"]),
    declared=st.booleans(),
)


@steadily
@given(specs, specs)
def test_plans_have_one_digest_if_and_only_if_they_are_equal(one: ReplicaSpec, other: ReplicaSpec) -> None:
    """Any field of any row is in it; 64 bits, so that two halves fit into a header."""
    digests = [WatchPlan("tp", (0, 1), (row,)).digest for row in (one, other)]
    assert (digests[0] == digests[1]) == (one == other)
    assert all(0 <= digest < 2**64 for digest in digests)


@steadily
@given(specs, st.sampled_from([f.name for f in fields(ReplicaSpec)]), st.data())
def test_the_digest_changes_with_any_field(row: ReplicaSpec, field: str, data: st.DataObject) -> None:
    """Another value in one field is another plan."""
    other = replace(row, **{field: getattr(data.draw(specs), field)})
    same = getattr(other, field) == getattr(row, field)
    assert (WatchPlan("tp", (0, 1), (other,)).digest == WatchPlan("tp", (0, 1), (row,)).digest) == same


@steadily
@given(st.lists(specs, max_size=4), st.lists(st.tuples(st.text(), st.text()), max_size=3))
def test_a_plan_survives_json(rows: list[ReplicaSpec], left_out: list[tuple[str, str]]) -> None:
    """Written as text and read back it is the same plan, with the same digest."""
    plan = WatchPlan("tp", (4, 5), tuple(rows), tuple(left_out))
    back = WatchPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert back == plan
    assert back.digest == plan.digest
