"""From candidates to a plan, and from the plans of several ranks to one that all of them can watch."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from tpwatch.config import WatchSelection
from tpwatch.discover import Candidate, Difference, Discovery, agree, discover, restrict
from tpwatch.records import ReplicaSpec, WatchPlan


def candidate(name: str, **changes: Any) -> Candidate:
    """A replicated parameter of four elements whose gradient is to be summed."""
    return replace(Candidate(name, (4,), "float32", 0, 4, replicated=True, rule="sum"), **changes)


def found(*candidates: Candidate, **patterns: Any) -> Discovery:
    """What two ranks watch of these candidates under these patterns."""
    return discover("tp", (0, 1), candidates, WatchSelection(**patterns))


def names(discovery: Discovery) -> list[str]:
    """Names of the watched parameters, in order."""
    return [r.name for r in discovery.plan.replicas]


NORM, ROUTER, BIAS = candidate("norm.weight"), candidate("router.weight"), candidate("norm.bias")
SHARD = candidate("qkv.weight", replicated=False)
UNSURE = candidate("odd.weight", replicated=None, reason="the witnesses disagree")


# ------------------------------------------------------------------------------------------- patterns


def test_replicas_are_watched_and_shards_are_not() -> None:
    """Without patterns the adapter decides; a plain shard is not worth a line."""
    discovery = found(NORM, SHARD, ROUTER)
    assert names(discovery) == ["norm.weight", "router.weight"]
    assert discovery.plan.not_watched == ()


def test_a_plan_row_carries_what_the_adapter_saw() -> None:
    """Shape, dtype, owned slice and rule go into the plan unchanged, and undeclared."""
    seen = candidate("w", shape=(2, 3), dtype="bfloat16", grad_start=2, grad_stop=5, rule="avg")
    assert found(seen).plan.replicas == (ReplicaSpec("w", (2, 3), "bfloat16", 2, 5, "avg", declared=False),)


def test_axis_and_ranks_go_into_the_plan() -> None:
    """The plan says which group it is about."""
    plan = discover("etp", [4, 6], [NORM], WatchSelection()).plan
    assert (plan.axis, plan.ranks) == ("etp", (4, 6))


def test_rows_point_at_the_candidates() -> None:
    """The monitor finds each row's tensor by its place among the candidates."""
    assert found(SHARD, NORM, UNSURE, ROUTER).rows == (1, 3)


def test_a_candidate_in_doubt_is_listed_with_its_reason() -> None:
    """What the witnesses disagree on is left out, but not silently."""
    assert found(UNSURE).plan.not_watched == (("odd.weight", "the witnesses disagree"),)


def test_a_shard_with_a_reason_is_listed() -> None:
    """An adapter may have something to say about a tensor that is no replica."""
    expert = candidate("expert.weight", replicated=False, reason="lies on another axis")
    assert found(expert).plan.not_watched == (("expert.weight", "lies on another axis"),)


def test_include_narrows_and_says_what_it_left_out() -> None:
    """Only parameters that match are watched; replicas that do not are listed, shards are not."""
    discovery = found(NORM, ROUTER, SHARD, include=["norm.*"])
    assert names(discovery) == ["norm.weight"]
    assert discovery.plan.not_watched == (("router.weight", "not included"),)


def test_one_matching_include_pattern_is_enough() -> None:
    """Patterns add up."""
    assert names(found(NORM, ROUTER, BIAS, include=["router.*", "*.bias"])) == ["router.weight", "norm.bias"]


def test_exclude_beats_include() -> None:
    """A parameter that matches both is not watched."""
    discovery = found(NORM, BIAS, include=["norm.*"], exclude=["*.bias"])
    assert names(discovery) == ["norm.weight"]
    assert discovery.plan.not_watched == (("norm.bias", "excluded"),)


def test_patterns_are_case_sensitive() -> None:
    """Parameter names are, on every operating system."""
    assert names(found(NORM, exclude=["NORM.*"])) == ["norm.weight"]


# --------------------------------------------------------------------------------------- declarations


@pytest.mark.parametrize("rule", ["sum", "avg", "none"])
def test_a_declared_rule_replaces_the_marker(rule: str) -> None:
    """What the user knows beats what the framework's markers say, and is marked as declared."""
    (spec,) = found(candidate("w", rule="avg"), declare={"w": rule}).plan.replicas
    assert (spec.rule, spec.declared) == (rule, True)


def test_declared_sharded_takes_a_replica_out() -> None:
    """The user says it is no replica; the plan says that they did."""
    discovery = found(NORM, declare={"norm.*": "sharded"})
    assert names(discovery) == []
    assert discovery.plan.not_watched == (("norm.weight", "declared sharded"),)


@pytest.mark.parametrize("doubtful", [SHARD, UNSURE])
def test_declared_replicated_watches_what_nothing_marks(doubtful: Candidate) -> None:
    """A replica without a mark can be watched, with the rule that the adapter saw."""
    (spec,) = found(doubtful, declare={doubtful.name: "replicated"}).plan.replicas
    assert (spec.name, spec.rule, spec.declared) == (doubtful.name, doubtful.rule, False)


@pytest.mark.parametrize("rule", ["sum", "avg", "none"])
@pytest.mark.parametrize("doubtful", [SHARD, UNSURE])
def test_a_declared_rule_does_not_make_a_shard_a_replica(doubtful: Candidate, rule: str) -> None:
    """A broad pattern with a rule must not compare shards, which differ by nature."""
    assert names(found(doubtful, declare={"*": rule})) == []


def test_the_last_matching_declaration_wins() -> None:
    """A general pattern first, the exception after it; the other way round the general one holds."""
    (late,) = found(NORM, declare={"*": "sum", "norm.*": "avg"}).plan.replicas
    (early,) = found(NORM, declare={"norm.*": "avg", "*": "sum"}).plan.replicas
    assert (late.rule, early.rule) == ("avg", "sum")


def test_a_later_rule_takes_back_sharded() -> None:
    """`sharded` is a declaration like the others: the last one holds."""
    assert names(found(NORM, declare={"*": "sharded", "norm.*": "sum"})) == ["norm.weight"]


def test_exclude_beats_declared_replicated() -> None:
    """Who excludes a parameter does not want it watched, whatever it is."""
    assert names(found(SHARD, exclude=["qkv.*"], declare={"*": "replicated"})) == []


# ------------------------------------------------------------------------------------------- warnings


@pytest.mark.parametrize(
    ("key", "patterns"),
    [("include", ["*", "typo.*"]), ("exclude", ["typo.*"]), ("declare", {"typo.*": "sum"})],
)
def test_a_pattern_that_matches_nothing_is_said(key: str, patterns: Any) -> None:
    """A typo would silently watch nothing: knob and pattern are named."""
    (warning,) = found(NORM, **{key: patterns}).warnings
    assert warning == f"watch.{key}: pattern 'typo.*' matches no parameter of this model"


def test_a_pattern_that_matches_only_a_shard_is_not_idle() -> None:
    """It names a parameter of the model, so it is no typo."""
    assert found(SHARD, exclude=["qkv.*"]).warnings == ()


def test_the_default_patterns_warn_of_nothing() -> None:
    """A stage without any parameter is legal, and no fault of the user's."""
    assert found().warnings == ()


# -------------------------------------------------------------------------------------------- agreeing


def plan(*specs: ReplicaSpec, first: int = 0) -> WatchPlan:
    """A plan of these rows."""
    return WatchPlan("tp", (first, first + 1, first + 2), specs)


A, B, C = (ReplicaSpec(name, (4,), "float32", 0, 4, "sum") for name in "abc")


def test_equal_plans_agree_on_everything() -> None:
    """All names in order, and nothing to report."""
    assert agree({0: plan(A, B), 1: plan(A, B)}, 0) == (("a", "b"), ())


def test_a_parameter_missing_on_one_rank_is_watched_by_none() -> None:
    """The rest is still watched; the rank and the parameter are named."""
    common, differences = agree({0: plan(A, B, C), 1: plan(A, C), 2: plan(A, B, C)}, 0)
    assert common == ("a", "c")
    assert differences == (Difference(1, "b", "missing on rank 1"),)


def test_a_parameter_that_only_another_rank_has_is_named() -> None:
    """The leader's plan is no yardstick of what exists."""
    common, differences = agree({0: plan(A), 1: plan(A, B)}, 0)
    assert common == ("a",)
    assert differences == (Difference(1, "b", "present on rank 1 only"),)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"shape": (2, 2)}, "shape: (2, 2) on rank 1, (4,) on the leader"),
        ({"dtype": "bfloat16"}, "dtype: bfloat16 on rank 1, float32 on the leader"),
        ({"rule": "avg"}, "rule: avg on rank 1, sum on the leader"),
        ({"grad_start": 2}, "grad_start: 2 on rank 1, 0 on the leader"),
        ({"grad_stop": 2}, "grad_stop: 2 on rank 1, 4 on the leader"),
        ({"declared": True}, "declared: True on rank 1, False on the leader"),
    ],
)
def test_a_row_that_differs_is_not_common_and_says_how(changes: dict[str, Any], text: str) -> None:
    """Every field that the buffers or the rules depend on has to be equal."""
    common, differences = agree({0: plan(A, B), 1: plan(A, replace(B, **changes))}, 0)
    assert common == ("a",)
    assert differences == (Difference(1, "b", text),)


def test_another_order_keeps_everything_and_is_said() -> None:
    """The leader's order holds for the buffers; the framework's own buffers may still be mispaired."""
    common, (difference,) = agree({0: plan(A, B, C), 1: plan(A, C, B)}, 0)
    assert common == ("a", "b", "c")
    assert (difference.rank, difference.parameter) == (1, "c")
    assert difference.what == "order: rank 1 has it where the leader has b"


def test_each_rank_reports_its_first_difference_only() -> None:
    """One line a rank: what follows a first difference often follows from it."""
    _, differences = agree({0: plan(A, B, C), 1: plan(C), 2: plan(A, B)}, 0)
    assert differences == (Difference(1, "a", "missing on rank 1"), Difference(2, "c", "missing on rank 2"))


def test_the_leader_need_not_be_the_first_rank() -> None:
    """Order and reference come from the leader, wherever it is in the mapping."""
    common, (difference,) = agree({4: plan(B, A), 5: plan(A, B)}, 5)
    assert common == ("a", "b")
    assert difference.rank == 4


def test_every_rank_computes_the_same_whatever_order_the_plans_come_in() -> None:
    """Names and their order, and with them the buffer layout, may not depend on who computes."""
    plans = {0: plan(A, B, C), 1: plan(C, A), 2: plan(A, replace(B, rule="avg"), C)}
    results = [agree({rank: plans[rank] for rank in order}, 0) for order in permutations(plans)]
    assert {common for common, _ in results} == {("a", "c")}
    assert len({frozenset(differences) for _, differences in results}) == 1


def test_restricted_plans_of_all_ranks_are_equal() -> None:
    """After agreeing, each rank's plan has the same rows in the same order, and the same digest."""
    mine, theirs = found(NORM, ROUTER, BIAS), found(BIAS, NORM)
    common, _ = agree({0: mine.plan, 1: theirs.plan}, 0)
    plans = [restrict(d, common).plan for d in (mine, theirs)]
    assert [r.name for r in plans[0].replicas] == ["norm.weight", "norm.bias"]
    assert plans[0].digest == plans[1].digest


def test_restrict_keeps_rows_pointing_at_their_candidates() -> None:
    """Rows move with their replicas into the order asked for; warnings stay."""
    discovery = found(SHARD, NORM, ROUTER, BIAS, exclude=["typo"])
    restricted = restrict(discovery, ["norm.bias", "norm.weight"])
    assert names(restricted) == ["norm.bias", "norm.weight"]
    assert restricted.rows == (3, 1)
    assert restricted.warnings == discovery.warnings
    assert restricted.plan.not_watched == discovery.plan.not_watched


# -------------------------------------------------------------------------------------------- the digest


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "z"},
        {"shape": (2, 2)},
        {"dtype": "bfloat16"},
        {"grad_start": 1},
        {"grad_stop": 3},
        {"rule": "avg"},
        {"declared": True},
    ],
)
def test_the_digest_changes_with_any_field(changes: dict[str, Any]) -> None:
    """Ranks whose plans differ in anything find out before they exchange a buffer."""
    assert plan(A, replace(B, **changes)).digest != plan(A, B).digest


def test_every_field_of_a_replica_is_tried_above() -> None:
    """A new field must enter the digest, and the test of it."""
    tried = {"name", "shape", "dtype", "grad_start", "grad_stop", "rule", "declared"}
    assert set(ReplicaSpec.__dataclass_fields__) == tried


def test_the_digest_changes_with_order_and_number() -> None:
    """The same rows in another order, or one less, are another layout."""
    assert len({plan(*rows).digest for rows in ((A, B), (B, A), (A,), (A, B, C), ())}) == 5


def test_the_digest_is_that_of_the_rows_alone() -> None:
    """Ranks of one group, and a plan read back from a file, have the same digest in 64 bits."""
    original = plan(A, B)
    again = WatchPlan.from_json(original.to_json())
    assert again == original
    assert plan(A, B, first=8).digest == again.digest == original.digest
    assert 0 <= original.digest < 2**64
