"""Which tensors must be equal over which ranks: candidates of an adapter become a `WatchPlan`.

Pure: an adapter describes each parameter it found as a `Candidate`; the user's include, exclude and
declare patterns are applied here, and the plans of several ranks are compared here. Knows no torch
and no framework.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from tpwatch.config import WatchSelection
from tpwatch.records import ReplicaSpec, Rule, WatchPlan


@dataclass(frozen=True, slots=True)
class Candidate:
    """One parameter of this rank as an adapter sees it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    grad_start: int
    grad_stop: int
    replicated: bool | None
    """True: every rank of the group holds a full copy. False: a shard. None: the witnesses
    disagree."""
    rule: Rule
    """What the framework's markers say will be done to the gradient."""
    reason: str = ""
    """Why it is not watched, where `replicated` is not True."""


@dataclass(frozen=True, slots=True)
class Discovery:
    """The plan of this rank, which candidate each row stands for, and what the user should be told."""

    plan: WatchPlan
    rows: tuple[int, ...]
    """Index into the candidates for each replica of the plan."""
    warnings: tuple[str, ...]


def discover(axis: str, ranks: Sequence[int], candidates: Sequence[Candidate], selection: WatchSelection) -> Discovery:
    """Apply the user's patterns to the candidates of one replica group."""
    replicas: list[ReplicaSpec] = []
    rows: list[int] = []
    left_out: list[tuple[str, str]] = []
    for index, candidate in enumerate(candidates):
        declared = _declaration(candidate.name, selection.declare)
        reason = _why_not(candidate, declared, selection)
        if reason == "sharded":
            continue
        if reason:
            left_out.append((candidate.name, reason))
            continue
        replicas.append(_spec(candidate, declared))
        rows.append(index)
    plan = WatchPlan(axis, tuple(ranks), tuple(replicas), tuple(left_out))
    return Discovery(plan, tuple(rows), _idle_patterns(candidates, selection))


def _declaration(name: str, declare: Mapping[str, str]) -> str | None:
    """The last matching declaration: later patterns are the more specific ones by convention."""
    matching = [rule for pattern, rule in declare.items() if fnmatchcase(name, pattern)]
    return matching[-1] if matching else None


def _why_not(candidate: Candidate, declared: str | None, selection: WatchSelection) -> str:
    """Reason to leave a candidate out.

    ``"sharded"`` for an ordinary shard, which is not worth a line.
    """
    if declared == "sharded":
        return "declared sharded"
    if not any(fnmatchcase(candidate.name, p) for p in selection.include):
        return "not included" if candidate.replicated else "sharded"
    if any(fnmatchcase(candidate.name, p) for p in selection.exclude):
        return "excluded"
    if candidate.replicated or declared == "replicated":
        return ""  # a declared rule alone does not make a shard, or what may be one, a replica
    if candidate.replicated is None:
        return candidate.reason
    return candidate.reason or "sharded"


def _spec(candidate: Candidate, declared: str | None) -> ReplicaSpec:
    rules: dict[str, Rule] = {"sum": "sum", "avg": "avg", "none": "none"}
    is_rule = declared in rules
    return ReplicaSpec(
        name=candidate.name,
        shape=candidate.shape,
        dtype=candidate.dtype,
        grad_start=candidate.grad_start,
        grad_stop=candidate.grad_stop,
        rule=rules[declared] if is_rule and declared else candidate.rule,
        declared=is_rule,
    )


def _idle_patterns(candidates: Sequence[Candidate], selection: WatchSelection) -> tuple[str, ...]:
    """One warning per pattern that matches no parameter.

    A typo there would silently watch nothing.
    """
    sections = {
        "include": selection.include,
        "exclude": selection.exclude,
        "declare": tuple(selection.declare),
    }
    return tuple(
        f"watch.{key}: pattern {pattern!r} matches no parameter of this model"
        for key, patterns in sections.items()
        for pattern in patterns
        if pattern != "*" and not any(fnmatchcase(c.name, pattern) for c in candidates)
    )


# ------------------------------------------------------------------------------------ agreeing on a plan


@dataclass(frozen=True, slots=True)
class Difference:
    """First place where the plan of one rank differs from the leader's."""

    rank: int
    parameter: str
    what: str


def agree(plans: Mapping[int, WatchPlan], leader: int) -> tuple[tuple[str, ...], tuple[Difference, ...]]:
    """Names every rank can watch, in the leader's order, and each other rank's first difference.

    A parameter is common if every rank has it with the same shape, dtype, owned slice and rule.
    Every rank computes this from the same plans and so arrives at the same buffer layout.
    """
    reference = plans[leader]
    by_rank = {rank: {r.name: r for r in plan.replicas} for rank, plan in plans.items()}
    common = tuple(r.name for r in reference.replicas if all(mine.get(r.name) == r for mine in by_rank.values()))
    differences = (_first_difference(rank, plan, reference) for rank, plan in plans.items() if rank != leader)
    return common, tuple(d for d in differences if d)


def _first_difference(rank: int, plan: WatchPlan, reference: WatchPlan) -> Difference | None:
    mine = {r.name: r for r in plan.replicas}
    theirs = {r.name: r for r in reference.replicas}
    for spec in reference.replicas:
        if spec.name not in mine:
            return Difference(rank, spec.name, f"missing on rank {rank}")
        if mine[spec.name] != spec:
            return Difference(rank, spec.name, _field_difference(mine[spec.name], spec, rank))
    for spec in plan.replicas:
        if spec.name not in theirs:
            return Difference(rank, spec.name, f"present on rank {rank} only")
    for here, there in zip(plan.replicas, reference.replicas, strict=True):
        if here.name != there.name:
            return Difference(rank, here.name, f"order: rank {rank} has it where the leader has {there.name}")
    return None


def _field_difference(mine: ReplicaSpec, reference: ReplicaSpec, rank: int) -> str:
    for field in ("shape", "dtype", "rule", "grad_start", "grad_stop", "declared"):
        here, there = getattr(mine, field), getattr(reference, field)
        if here != there:
            return f"{field}: {here} on rank {rank}, {there} on the leader"
    return f"differs on rank {rank}"


def restrict(discovery: Discovery, names: Sequence[str]) -> Discovery:
    """The same discovery with only `names`, in that order."""
    position = {r.name: i for i, r in enumerate(discovery.plan.replicas)}
    keep = [position[name] for name in names]
    plan = replace(discovery.plan, replicas=tuple(discovery.plan.replicas[i] for i in keep))
    return Discovery(plan, tuple(discovery.rows[i] for i in keep), discovery.warnings)
