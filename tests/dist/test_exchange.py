"""The packed buffer: MAX and MIN of every column in one collective, and what is read out of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from tests.dist._harness import run_ranks
from tests.dist._parts import CPU, normal
from tpwatch.exchange import (
    FLAGS,
    HEADER,
    OUTSIDE,
    Buffers,
    Exchange,
    Header,
    Layout,
    ReadBack,
    header_of,
    presence_flags,
    reduction_flags,
)
from tpwatch.fingerprint import choose
from tpwatch.fingerprint.layout import ROW
from tpwatch.reduced import Reduced

AGREED = (0.0, 1.0, 7.0, 11.0, 13.0, 0.0, 0.0, 0.0, 0.0)
"""A header: phase, call, step, two halves of the plan, targets, failed, disabled, slow."""


def exchanged(rank: int, size: int) -> torch.Tensor:
    """Fill one half with this rank's numbers and exchange it; what comes back, `[2, half]`."""
    layout = Layout(size)
    buffers = Buffers(layout, CPU)
    buffers.entry[0] = normal(rank, layout.half, dtype=torch.float64)
    buffers.seal(buffers.entry, tuple(float(rank + i) for i in range(len(HEADER))))
    Exchange(None).reduce_max(buffers.entry)
    return ReadBack(layout, CPU).start(buffers.entry).wait().clone()


@pytest.mark.parametrize("world", [2, 3, 8])
def test_one_collective_brings_max_and_min_of_every_column(world: int) -> None:
    """Each rank ends up with the largest and the smallest of every column over the ranks."""
    columns = torch.stack([normal(r, Layout(5).half, dtype=torch.float64) for r in range(world)])
    columns[:, : len(HEADER)] = torch.tensor([[float(r + i) for i in range(len(HEADER))] for r in range(world)])
    for both in run_ranks(world, exchanged, 5):
        torch.testing.assert_close(both[0], columns.max(0).values, rtol=0, atol=0)
        torch.testing.assert_close(-both[1], columns.min(0).values, rtol=0, atol=0)


def counted_by_torch(rank: int) -> tuple[int, int, int]:
    """Do three collectives; our count, CommDebugMode's, and our bytes."""
    exchange = Exchange(None)
    with CommDebugMode() as mode:
        exchange.reduce_max(torch.zeros(10, dtype=torch.float64))
        exchange.reduce_max(torch.zeros(2, 5, dtype=torch.float64))
        exchange.gather(torch.full((3,), float(rank), dtype=torch.float32), torch.empty(exchange.size, 3))
    return exchange.collectives, mode.get_total_counts(), exchange.bytes


def test_collectives_are_counted_as_torch_counts_them(gloo_ranks: Callable[..., Any]) -> None:
    """The exchange's own count and bytes are what really went over the group."""
    assert gloo_ranks(2, counted_by_torch) == [(3, 3, 80 + 80 + 12)] * 2


def gathered(rank: int) -> list[list[float]]:
    """Gather two numbers that tell the rank."""
    exchange = Exchange(None)
    return exchange.gather(torch.tensor([rank + 0.25, -float(rank)]), torch.empty(exchange.size, 2)).tolist()


def test_gather_returns_rows_in_rank_order(gloo_ranks: Callable[..., Any]) -> None:
    """Row r is what rank r sent, over a real transport, on every rank."""
    assert gloo_ranks(3, gathered) == [[[0.25, 0.0], [1.25, -1.0], [2.25, -2.0]]] * 3


# ------------------------------------------------------------------------------------- presence

SUBSETS = [set(c) for k in range(5) for c in combinations(range(4), k)]
"""Every set of absent ranks that four ranks can have, one row of the plan each."""

GLOBAL_RANKS = (4, 5, 6, 7)


def presence_exchanged(rank: int) -> tuple[list[int], list[Any]]:
    """Exchange presence flags with one row per subset; the uneven rows and all records."""
    layout = Layout(len(SUBSETS))
    buffers = Buffers(layout, CPU)
    present = [0.0 if rank in absent else 1.0 for absent in SUBSETS]
    presence_flags(layout.flags(buffers.entry[0], 2 * layout.n), present, rank)
    buffers.seal(buffers.entry, AGREED)
    Exchange(None).reduce_max(buffers.entry)
    reduced = Reduced(layout, GLOBAL_RANKS, buffers.entry, None)
    return reduced.uneven(), reduced.rows(range(layout.n))


def test_absent_ranks_are_known_by_their_ends() -> None:
    """For every set of absent ranks: uneven or not, and the lowest and highest global rank."""
    for uneven, rows in run_ranks(4, presence_exchanged):
        assert uneven == [i for i, absent in enumerate(SUBSETS) if 0 < len(absent) < 4]
        for absent, row in zip(SUBSETS, rows, strict=True):
            ends = sorted({min(absent), max(absent)}) if absent else []
            assert row.absent == tuple(4 + rank for rank in ends)
            assert (row.present_lo, row.present_hi) == (not absent, len(absent) < 4)
            assert row.in_scope


def outside_exchanged(rank: int) -> tuple[list[int], Any]:
    """Exchange one row that no rank handles."""
    del rank
    layout = Layout(1)
    buffers = Buffers(layout, CPU)
    presence_flags(layout.flags(buffers.entry[0], 2), [OUTSIDE], dist.get_rank())
    buffers.seal(buffers.entry, AGREED)
    Exchange(None).reduce_max(buffers.entry)
    reduced = Reduced(layout, (0, 1), buffers.entry, None)
    return reduced.uneven(), reduced.rows([0])[0]


def test_rows_outside_the_scope_are_neither_present_nor_missing() -> None:
    """A row that this finalizer call does not handle is no presence fault."""
    for uneven, row in run_ranks(2, outside_exchanged):
        assert (uneven, row.in_scope, row.absent) == ([], False, ())


# --------------------------------------------------------------------------------------- header


@pytest.mark.parametrize("column", ["phase", "call", "step", "plan_lo", "plan_hi"])
def test_header_names_the_column_that_differs(column: str) -> None:
    """Ranks that are not at the same place of the program are told apart by name and value."""
    other = list(AGREED)
    other[HEADER.index(column)] += 1.0
    header = Header(lo=AGREED, hi=tuple(other))
    at = AGREED[HEADER.index(column)]
    assert header.mismatch == f"{column}: {at:.0f} on one rank, {at + 1:.0f} on another"


def test_header_of_equal_ranks_agrees() -> None:
    """The same header on every rank is no mismatch, with and without flags."""
    header = Header(lo=AGREED, hi=AGREED)
    assert header.mismatch == ""
    assert header.agrees("targets")
    assert not header.flag("failed")


def sealed(rank: int, flag: str) -> dict[str, bool]:
    """Rank 1 alone sets one flag; the flags that the group reads, and whether the targets agree."""
    buffers, header = Buffers(Layout(1), CPU), list(AGREED)
    header[HEADER.index(flag)] = float(rank == 1)
    buffers.seal(buffers.entry, header)
    Exchange(None).reduce_max(buffers.entry)
    read = header_of(buffers.entry)
    flags = {name: read.flag(name) for name in HEADER[HEADER.index("failed") :]}
    return {**flags, "targets": not read.agrees("targets")}


@pytest.mark.parametrize("flag", HEADER[HEADER.index("targets") :])
def test_a_flag_of_one_rank_reaches_every_rank(flag: str) -> None:
    """Each flag has a column of its own: one rank is enough to set it, and sets no other."""
    for read in run_ranks(3, sealed, flag):
        assert [name for name, is_set in read.items() if is_set] == [flag]


def test_both_sides_of_a_check_have_the_same_size() -> None:
    """A mispaired entry and exit exchange is seen in the header, not as a size error."""
    buffers = Buffers(Layout(17), CPU)
    assert buffers.entry.shape == buffers.exit.shape
    # The last column that the entry side uses is the last column there is.
    flags = Layout(17).flags(buffers.entry[0], 2 * 17)
    flags.fill_(3.0)
    assert buffers.entry[0, -1] == 3.0


# ------------------------------------------------------------------------- what the exit side says


def own_flags(pre: torch.Tensor, post: torch.Tensor) -> list[float]:
    """Kept, factor and residual of one tensor before and after a reduction."""
    rows = torch.zeros(2, ROW, dtype=torch.float64)
    choose(CPU, "reference").rows([pre, post], rows)
    flags = torch.zeros(FLAGS, 1, dtype=torch.float64)
    reduction_flags(flags, rows[:1], rows[1:])
    return flags[:, 0].tolist()


@pytest.mark.parametrize("factor", [1.0, 2.0, 8.0, 1 / 3, -0.5, 0.0])
@pytest.mark.parametrize("scale", [1e-200, 1e-3, 1.0, 1e200])
def test_a_multiple_is_recognised_with_its_factor(factor: float, scale: float) -> None:
    """Post = c * pre gives c and no residual, also where squares leave the range of float64."""
    pre = normal(1, 3001, dtype=torch.float64) * scale
    kept, found, residual = own_flags(pre, pre * factor)
    assert kept == float(factor == 1.0)
    assert found == pytest.approx(factor, abs=1e-9)
    assert residual == pytest.approx(0.0, abs=1e-9)


def test_another_tensor_is_no_multiple() -> None:
    """An unrelated tensor leaves nearly all of itself as residual."""
    kept, factor, residual = own_flags(normal(1, 3001), normal(2, 3001))
    assert kept == 0.0
    assert abs(factor) < 0.9
    assert residual > 0.4


def test_a_gradient_that_appears_has_full_residual() -> None:
    """Zero before and something after: no factor can explain it."""
    assert own_flags(torch.zeros(9), torch.ones(9)) == [0.0, 0.0, 1.0]


def test_silence_is_kept_silence() -> None:
    """Zero before and after is the gradient kept, with nothing left."""
    assert own_flags(torch.zeros(9), torch.zeros(9)) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e308, 5e-324, -0.0])
def test_exit_flags_are_finite_whatever_the_gradient(value: float) -> None:
    """NaN and Inf never enter MAX, whatever stands before and after the reduction."""
    odd = torch.tensor([value, 1.0, value], dtype=torch.float64)
    for pre, post in ((odd, odd), (odd, odd * 2), (odd, torch.ones(3)), (torch.ones(3), odd)):
        assert torch.tensor(own_flags(pre, post)).isfinite().all()
