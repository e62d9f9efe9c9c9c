"""What is packed on every rank comes out of the reduced buffers as it went in, whatever the numbers."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tpwatch.exchange import HEADER, OUTSIDE, Buffers, Layout, header_of, presence_flags
from tpwatch.fingerprint.layout import HEAD
from tpwatch.reduced import Reduced

steadily = settings(
    max_examples=80,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)

CPU = torch.device("cpu")
PRESENT = (1.0, 0.0, OUTSIDE)

hashes = st.integers(0, 2**32 - 1).map(float)
amounts = st.floats(0, 1e300)
heads = st.tuples(hashes, hashes, amounts, amounts, st.integers(0, 10**6).map(float))
headers = st.tuples(*[st.integers(0, 2**53).map(float)] * len(HEADER))


@st.composite
def groups(draw: st.DrawFn) -> dict[str, Any]:
    """What each rank of a group has to say of the same replicas."""
    size, n = draw(st.integers(2, 5)), draw(st.integers(1, 4))
    table = st.lists(heads, min_size=n, max_size=n)
    flags = st.lists(st.tuples(st.booleans(), st.floats(-1e6, 1e6), st.floats(0, 1)), min_size=n, max_size=n)
    present = draw(
        st.lists(st.lists(st.sampled_from(PRESENT[:2]), min_size=size, max_size=size), min_size=n, max_size=n)
    )
    return {
        "n": n,
        "header": draw(headers),
        "points": [[draw(table) for _ in range(size)] for _ in range(3)],
        "after": [draw(flags) for _ in range(size)],
        "present": list(map(list, zip(*present, strict=True))),
    }


def reduced(group: dict[str, Any]) -> tuple[Reduced, torch.Tensor]:
    """Pack every rank's buffers, take the largest of each column as an all-reduce would, and read them."""
    layout = Layout(group["n"])
    assert HEAD == 5
    both: list[torch.Tensor] = []
    for rank in range(len(group["after"])):
        buffers = Buffers(layout, CPU)
        param, pre, post = (torch.tensor(point[rank], dtype=torch.float64) for point in group["points"])
        entry, exit_ = buffers.entry[0], buffers.exit[0]
        layout.heads(entry, 2 * layout.n).copy_(torch.cat([param, pre]))
        presence_flags(layout.flags(entry, 2 * layout.n), group["present"][rank], rank)
        layout.heads(exit_, layout.n).copy_(post)
        layout.flags(exit_, layout.n).copy_(torch.tensor(group["after"][rank], dtype=torch.float64).T)
        for buffer in (buffers.entry, buffers.exit):
            buffers.seal(buffer, group["header"])
        both.append(torch.stack([buffers.entry, buffers.exit]))
    entry, exit_ = torch.stack(both).amax(0)
    return Reduced(layout, range(10, 10 + len(both)), entry, exit_), entry


@steadily
@given(groups())
def test_least_and_largest_of_every_column_come_back(group: dict[str, Any]) -> None:
    """Norms, largest elements, non-finite counts and equality of hashes, at all three points."""
    rows = reduced(group)[0].rows(range(group["n"]))
    for index, row in enumerate(rows):
        for point, seen in zip(group["points"], (row.param, row.pre, row.post), strict=True):
            column = [rank[index] for rank in point]
            assert seen.same == (len({head[:2] for head in column}) == 1)
            assert (seen.l2_lo, seen.l2_hi) == (min(h[2] for h in column), max(h[2] for h in column))
            assert (seen.absmax_lo, seen.absmax_hi) == (min(h[3] for h in column), max(h[3] for h in column))
            assert (seen.nonfinite_lo, seen.nonfinite_hi) == (min(h[4] for h in column), max(h[4] for h in column))


@steadily
@given(groups())
def test_the_flags_of_the_exit_side_come_back(group: dict[str, Any]) -> None:
    """Own gradient kept on all and on some ranks, least and largest factor, largest residual."""
    for index, row in enumerate(reduced(group)[0].rows(range(group["n"]))):
        kept, factors, residuals = zip(*(rank[index] for rank in group["after"]), strict=True)
        assert (row.kept_lo, row.kept_hi) == (all(kept), any(kept))
        assert (row.scale_lo, row.scale_hi, row.residual_hi) == (min(factors), max(factors), max(residuals))


@steadily
@given(groups())
def test_presence_comes_back_with_the_ends_of_the_absent_ranks(group: dict[str, Any]) -> None:
    """Who has a gradient: all, some, and the lowest and highest global rank that has none."""
    for index, row in enumerate(reduced(group)[0].rows(range(group["n"]))):
        marks = [rank[index] for rank in group["present"]]
        absent = [10 + rank for rank, mark in enumerate(marks) if mark == 0.0]
        assert (row.present_lo, row.present_hi) == (not absent, len(absent) < len(marks))
        assert row.absent == tuple(sorted({*absent[:1], *absent[-1:]}))


@steadily
@given(groups())
def test_a_header_comes_back_to_the_last_bit(group: dict[str, Any]) -> None:
    """Steps and halves of digests are whole numbers up to 2^53: none is rounded."""
    header = header_of(reduced(group)[1])
    assert header.lo == header.hi == group["header"]
    assert header.mismatch == ""
