"""Tier 2: what is gathered about a flagged row, against the same formulas in numpy on all tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.dist._harness import run_ranks
from tests.dist._parts import CPU, Gradients, normal, plan_of, summed
from tpwatch._guard import Guard
from tpwatch.config import Config
from tpwatch.config import Explain as ExplainConfig
from tpwatch.diagnose.compare import kinship, reduction
from tpwatch.evidence import spread
from tpwatch.exchange import Exchange
from tpwatch.explain import Explainer
from tpwatch.fingerprint import choose
from tpwatch.fingerprint.layout import ROW
from tpwatch.records import Evidence, Target, WatchPlan

L2_BOUND = 2.0**-15
"""Relative error that an implementation of the fingerprint may have in its `l2` column."""

Reducer = Callable[[torch.Tensor], None]


@dataclass
class Deep:
    """One rank's explainer and what it stands on."""

    plan: WatchPlan
    explainer: Explainer
    exchange: Exchange
    guard: Guard

    def explain(
        self,
        values: list[torch.Tensor],
        before: Gradients,
        reduce: Callable[[Gradients], None],
        requests: list[Target],
    ) -> dict[int, Evidence]:
        """Gather before and after `reduce`, which works in place on `before`; the evidence."""
        fingerprints, n = choose(CPU), len(values)
        entry = torch.zeros(2 * n, ROW, dtype=torch.float64)
        after = torch.zeros(n, ROW, dtype=torch.float64)
        fingerprints.rows([*values, *before], entry)
        self.explainer.prepare(requests)
        self.explainer.gather_before(entry, [*values, *before])
        reduce(before)
        fingerprints.rows(before, after)
        self.explainer.gather_after(after, before)
        return self.explainer.conclude()


def deep(parameters: list[torch.Tensor], **knobs: int) -> Deep:
    """Build an explainer over the default group; `knobs` are those of the `explain` section."""
    config = Config(explain=ExplainConfig(**knobs))
    plan, exchange, guard = plan_of(parameters), Exchange(None), Guard(9)
    return Deep(plan, Explainer(plan, exchange, config, guard, CPU), exchange, guard)


def everything(count: int) -> list[Target]:
    """Ask for all there is about `count` rows."""
    return [Target(i, values=True, gradients=True) for i in range(count)]


# ------------------------------------------------------------------------ formulas, against numpy

SHAPES: dict[str, Callable[[int, torch.dtype], torch.Tensor]] = {
    "one": lambda seed, dtype: normal(seed, 1, dtype=dtype),
    "odd": lambda seed, dtype: normal(seed, 7, 19, dtype=dtype),
    "limit": lambda seed, dtype: normal(seed, 1024, dtype=dtype),
    "transposed": lambda seed, dtype: normal(seed, 12, 9, dtype=dtype).T,
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def holed(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Put a NaN and an infinity somewhere into a tensor of three or more elements."""
    if tensor.numel() > 2:
        flat = tensor.reshape(-1).clone()
        flat[seed % flat.numel()] = math.nan
        flat[(seed * 7 + 1) % flat.numel()] = -math.inf
        return flat.view(tensor.shape)
    return tensor


def case(rank: int, shape: str, dtype: torch.dtype, *, holes: bool) -> list[torch.Tensor]:
    """Value, gradient before and gradient after, of one rank: all different on every rank."""
    tensors = [SHAPES[shape](100 * kind + rank, dtype) for kind in range(3)]
    return [holed(t, 11 * k + rank) for k, t in enumerate(tensors)] if holes else tensors


def measured(rank: int, shape: str, dtype: torch.dtype, holes: bool) -> Evidence:  # noqa: FBT001
    """Evidence about one tensor whose gradient is replaced by an unrelated one."""
    value, before, after = case(rank, shape, dtype, holes=holes)
    watched = deep([value])
    gradients: Gradients = [before]

    def replaced(held: Gradients) -> None:
        held[0] = after

    evidence = watched.explain([value], gradients, replaced, everything(1))[0]
    assert watched.guard.errors == 0
    return evidence


def flat(tensors: list[torch.Tensor]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """One row per rank in float64, logical order, non-finite elements as zero."""
    rows = np.stack([t.to(torch.float64).contiguous().view(-1).numpy() for t in tensors])
    return np.where(np.isfinite(rows), rows, 0.0)


def numpy_deviation(rows: np.ndarray[Any, Any]) -> float:
    """sqrt(mean_r |x_r - mean x|^2 / mean_r |x_r|^2)."""
    centred = rows - rows.mean(axis=0)
    return float(np.sqrt((centred**2).sum(axis=1).mean() / (rows**2).sum(axis=1).mean()))


def numpy_residual(post: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """max_r |post_r - expected| / sqrt(mean_r |post_r|^2)."""
    length = np.sqrt((post**2).sum(axis=1).mean())
    return float(np.sqrt(((post - expected) ** 2).sum(axis=1)).max() / length)


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", list(SHAPES))
def test_exact_evidence_is_what_numpy_finds(shape: str, dtype: torch.dtype, *, holes: bool) -> None:
    """Deviation, residuals, norms and spreads of small tensors come from their elements."""
    world = 3
    value, before, after = (
        list(kind) for kind in zip(*(case(r, shape, dtype, holes=holes) for r in range(world)), strict=True)
    )
    v, x, y = flat(value), flat(before), flat(after)
    for found in run_ranks(world, measured, shape, dtype, holes):
        assert found.exact
        assert found.deviation_pre == pytest.approx(numpy_deviation(x), rel=1e-9)
        assert found.deviation_post == pytest.approx(numpy_deviation(y), rel=1e-9)
        assert found.residual_sum == pytest.approx(numpy_residual(y, x.sum(axis=0)), rel=L2_BOUND)
        assert found.residual_avg == pytest.approx(numpy_residual(y, x.mean(axis=0)), rel=L2_BOUND)
        assert found.norms_pre == pytest.approx(np.sqrt((x**2).sum(axis=1)), rel=L2_BOUND)
        assert found.norms_post == pytest.approx(np.sqrt((y**2).sum(axis=1)), rel=L2_BOUND)
        for measured_spread, rows, floor in ((found.param, v, Config().thresholds.rel_floor), (found.post, y, None)):
            assert measured_spread is not None
            high, low = rows.max(axis=0), rows.min(axis=0)
            size = np.maximum(abs(high), abs(low))
            counted = size > (1e-3 * size.max() if floor is None else floor)
            assert measured_spread.max_abs == (high - low).max()
            assert measured_spread.max_rel == pytest.approx(((high - low)[counted] / size[counted]).max(), rel=1e-12)
            assert measured_spread.differing == int((high > low).sum())
            assert measured_spread.elements == rows.shape[1]
            assert measured_spread.l2 == pytest.approx(np.sqrt(((high - low) ** 2).sum()), rel=1e-9)


@pytest.mark.parametrize(
    ("floor", "relative", "counted"),
    [
        (0.0, 2.0, "every element"),
        (1e-3, 0.5, "all but the tiny one"),
        (None, 0.5, "all but the tiny one"),
        (3.0, 0.25, "the largest one"),
        (100.0, 0.0, "none"),
    ],
)
def test_small_elements_do_not_enter_the_relative_spread(floor: float | None, relative: float, counted: str) -> None:
    """Above the floor, or without one above a thousandth of the largest: the absolute spread has all."""
    high, low = torch.tensor([4.0, 2.0, 1e-5]), torch.tensor([3.0, 1.0, -1e-5])
    found = spread(high, low, floor)
    assert found.max_rel == pytest.approx(relative), counted
    assert (found.max_abs, found.differing, found.elements) == (1.0, 3, 3)


def camps(rank: int) -> Evidence:
    """Values in camps {1, 2, 3} and {0}, gradients afterwards in {0, 1} and {2, 3}; rank 3 silent."""
    value = normal(1 if rank == 0 else 0, 40)
    before = torch.zeros(40) if rank == 3 else normal(10 + rank, 40)
    watched = deep([value])
    gradients: Gradients = [before]

    def reduced(held: Gradients) -> None:
        held[0] = normal(20 + rank // 2, 40)

    return watched.explain([value], gradients, reduced, everything(1))[0]


def test_camps_and_silent_ranks_are_named() -> None:
    """Ranks with equal bits stand together, the largest camp first; exactly zero is told apart."""
    for found in run_ranks(4, camps):
        assert found.camps_param == ((1, 2, 3), (0,))
        assert found.camps_post == ((0, 1), (2, 3))
        assert found.zero_ranks == (3,)


def absent(rank: int) -> tuple[dict[int, Evidence], int]:
    """Rank 1 has no gradient at all."""
    watched = deep([normal(0, 40)])
    held: Gradients = [None if rank == 1 else normal(5, 40)]
    found = watched.explain([normal(0, 40)], held, lambda _held: None, everything(1))
    return found, watched.guard.errors


def test_an_absent_gradient_counts_as_zero() -> None:
    """The ranks that have one are compared with nothing, and nobody fails."""
    for found, errors in run_ranks(2, absent):
        assert errors == 0
        # x and 0: the mean is x/2, both are x/2 away from it, and the mean square is half of |x|^2.
        assert found[0].deviation_pre == pytest.approx(math.sqrt(0.25 / 0.5))
        assert found[0].zero_ranks == (1,)


# --------------------------------------------------------------------------- exact against sketched

RELATIONS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "partials": normal,
    "correlated": lambda rank, n: normal(99, n) + normal(rank, n),
    "near-copies": lambda rank, n: normal(99, n) * (1 + 1e-3 * normal(rank, n)),
    "one-sided": lambda rank, n: normal(7, n) if rank == 0 else torch.zeros(n),
}


def both_ways(rank: int, relation: str, n: int) -> tuple[Evidence, Evidence]:
    """Evidence about the same summed gradients from their elements and from their sketches."""
    found = []
    for limit in (n, 0):
        watched = deep([normal(0, n)], exact_elements=limit)
        held: Gradients = [RELATIONS[relation](rank, n)]
        found.append(watched.explain([normal(0, n)], held, summed, everything(1))[0])
    return found[0], found[1]


@pytest.mark.parametrize("n", [1023, 70_001])
@pytest.mark.parametrize("relation", list(RELATIONS))
def test_sketches_agree_with_the_elements(relation: str, n: int) -> None:
    """Within what 16 coordinates can tell, and with the same conclusion about the tensors."""
    for exact, sketched in run_ranks(3, both_ways, relation, n):
        assert (exact.exact, sketched.exact) == (True, False)
        # A norm from 16 coordinates has a relative standard deviation of 18 %: three of them.
        assert sketched.deviation_pre == pytest.approx(exact.deviation_pre, rel=0.54)
        assert kinship(sketched.deviation_pre) == kinship(exact.deviation_pre)
        assert reduction(sketched) == reduction(exact)
        assert sketched.norms_pre == pytest.approx(exact.norms_pre)


# ------------------------------------------------------------------------- which reduction it was


def average(gradient: torch.Tensor) -> None:
    """Reduce to the mean."""
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()


def other(gradient: torch.Tensor) -> None:
    """Reduce to 0.7 times the sum."""
    dist.all_reduce(gradient)
    gradient *= 0.7


def largest(gradient: torch.Tensor) -> None:
    """Reduce to the elementwise maximum."""
    dist.all_reduce(gradient, op=dist.ReduceOp.MAX)


def left_alone(_gradient: torch.Tensor) -> None:
    """Reduce nothing."""


def total(gradient: torch.Tensor) -> None:
    """Reduce to the sum."""
    dist.all_reduce(gradient)


OPERATIONS: dict[str, tuple[Reducer, str]] = {
    "sum": (total, "sum"),
    "avg": (average, "avg"),
    "none": (left_alone, "other"),
    "scaled": (other, "other"),
    "max": (largest, "other"),
}
"""What is done to the partials, and what it is to be called; left alone shows in tier 1 already."""

SIZES = (1, 3, 7, 129, 1023, 1025, 4097, 66_000)


def reductions(rank: int, dtype: torch.dtype) -> dict[str, list[str]]:
    """Name every operation on partials of every size."""
    tensors = [normal(0, size, dtype=dtype) for size in SIZES]
    named = {}
    for name, (operation, _) in OPERATIONS.items():
        watched = deep(tensors)
        held: Gradients = [normal(31 * rank + i, s, dtype=dtype) for i, s in enumerate(SIZES)]

        def apply(gradients: Gradients, do: Reducer = operation) -> None:
            for gradient in gradients:
                if gradient is not None:
                    do(gradient)

        found = watched.explain(tensors, held, apply, everything(len(SIZES)))
        named[name] = [reduction(found[i]) for i in range(len(SIZES))]
    return named


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_reduction_of_partials_is_recognised(world: int, dtype: torch.dtype) -> None:
    """Sum, mean and anything else, at odd sizes, from elements and from sketches."""
    expected = {name: [called] * len(SIZES) for name, (_, called) in OPERATIONS.items()}
    assert run_ranks(world, reductions, dtype) == [expected] * world


def over_gloo(rank: int) -> list[str]:
    """Name a real gloo sum and mean of four partials of odd size."""
    names = []
    for operation in (total, average):
        watched = deep([normal(0, 77), normal(1, 2049)])
        held: Gradients = [normal(rank, 77), normal(40 + rank, 2049)]

        def apply(gradients: Gradients, do: Reducer = operation) -> None:
            for gradient in gradients:
                if gradient is not None:
                    do(gradient)

        found = watched.explain([normal(0, 77), normal(1, 2049)], held, apply, everything(2))
        names += [reduction(found[0]), reduction(found[1])]
    return names


def test_the_reduction_is_recognised_over_gloo(gloo_ranks: Callable[..., Any]) -> None:
    """The transport's own order of summation stays within the tolerance of the elements."""
    assert gloo_ranks(4, over_gloo) == [["sum", "sum", "avg", "avg"]] * 4


def cancelling(rank: int) -> str:
    """Partials that cancel to nothing but rounding in bf16, summed."""
    big = normal(1, 50, dtype=torch.bfloat16) * 100
    held: Gradients = [big if rank == 0 else -big + normal(2, 50, dtype=torch.bfloat16) / 1000]
    watched = deep([normal(0, 50, dtype=torch.bfloat16)])
    found = watched.explain([normal(0, 50, dtype=torch.bfloat16)], held, summed, everything(1))
    return reduction(found[0])


def test_what_rounding_could_explain_either_way_is_ambiguous() -> None:
    """Where the sum is smaller than the rounding of the partials, no claim is made."""
    assert run_ranks(2, cancelling) == ["ambiguous"] * 2


# ------------------------------------------------------------------------------ cost and failures


def rotating(rank: int) -> tuple[list[list[int]], list[int]]:
    """Four deep checks of five rows, one too large for the budget of two small ones."""
    sizes = (100, 100, 1000, 100, 100)
    values = [normal(10 * i + rank, size) for i, size in enumerate(sizes)]
    watched = deep(values, gather_bytes=2 * 16 * 100)
    chosen, counts = [], []
    for _ in range(4):
        before = watched.exchange.collectives
        requests = [Target(i, values=True, gradients=False) for i in range(5)]
        found = watched.explain(values, list(values), lambda _held: None, requests)
        assert sorted(found) == [0, 1, 2, 3, 4]
        chosen.append([i for i, evidence in found.items() if evidence.param is not None])
        counts.append(watched.exchange.collectives - before)
    return chosen, counts


def test_the_byte_budget_moves_on_from_check_to_check() -> None:
    """Every row that fits gets its turn; one that never fits does not stop the others."""
    expected = [[0, 1], [3, 4], [0, 1], [3, 4]]
    assert run_ranks(2, rotating) == [(expected, [3, 3, 3, 3])] * 2


def both_spreads(rank: int) -> list[tuple[bool, bool]]:
    """Which spreads come back for each combination of wishes."""
    values = [normal(10 * i + rank, 20) for i in range(3)]
    watched = deep(values)
    requests = [
        Target(0, values=True, gradients=False),
        Target(1, values=False, gradients=True),
        Target(2, values=False, gradients=False),
    ]
    found = watched.explain(values, list(values), lambda _held: None, requests)
    return [(found[i].param is not None, found[i].post is not None) for i in range(3)]


def test_only_the_spreads_asked_for_are_measured() -> None:
    """Values, gradients, or the rows alone."""
    assert run_ranks(2, both_spreads) == [[(True, False), (False, True), (False, False)]] * 2


def bounded(rank: int, count: int) -> int:
    """Collectives of one deep check of `count` rows, all of it asked for."""
    values = [normal(i + rank, 4) for i in range(count)]
    watched = deep(values)
    watched.explain(values, list(values), lambda _held: None, everything(count))
    return watched.exchange.collectives


@pytest.mark.parametrize("count", [1, 40, 400])
def test_a_deep_check_is_four_collectives_whatever_is_flagged(count: int) -> None:
    """Two gathers and two elementwise reductions, for one row and for four hundred."""
    assert run_ranks(2, bounded, count) == [4, 4]


def failing(rank: int, side: str) -> tuple[set[int], set[int], int, int]:
    """Rank 1 cannot read its second tensor on one side: evidence and spreads, calls, errors."""
    values = [normal(rank, 30), normal(10 + rank, 30)]
    watched = deep(values)
    held: Gradients = [normal(20 + rank, 30), normal(30 + rank, 30)]
    broken = list(values)
    if rank == 1 and side == "values":
        broken[1] = torch.zeros(2)
    if rank == 1 and side == "gradients":
        held[1] = torch.zeros(2)
    found = watched.explain(broken, held, lambda _held: None, everything(2))
    spreads = {i for i, evidence in found.items() if evidence.param is not None}
    return set(found), spreads, watched.exchange.collectives, watched.guard.errors


@pytest.mark.parametrize(("side", "rows", "spreads"), [("values", {0, 1}, set()), ("gradients", set(), set())])
def test_a_rank_that_cannot_send_joins_with_nothing(side: str, rows: set[int], spreads: set[int]) -> None:
    """The same four collectives on every rank; what one rank could not send is no evidence."""
    results = run_ranks(3, failing, side)
    assert [r[:3] for r in results] == [(rows, spreads, 4)] * 3


def half_done(rank: int) -> tuple[dict[int, Evidence], dict[int, Evidence]]:
    """Conclude after the entry side alone, and again."""
    watched = deep([normal(rank, 30)])
    rows = torch.zeros(2, ROW, dtype=torch.float64)
    watched.explainer.prepare(everything(1))
    watched.explainer.gather_before(rows, [normal(rank, 30), normal(rank, 30)])
    return watched.explainer.conclude(), watched.explainer.conclude()


def test_half_a_deep_check_is_no_evidence() -> None:
    """A step whose exit side never came leaves nothing behind."""
    assert run_ranks(2, half_done) == [({}, {})] * 2
