"""One packed buffer over one replica group, and what comes back.

Layout, collectives, read-back, reduced view.

A buffer is float64 `[2, half]`: columns `f` and `-f`, so that one all-reduce(MAX) brings MAX and
MIN together. This file moves numbers and never interprets them; it knows tensors and process
groups, not faults.

Layout of one half, n replicas: header (`HEADER`), then for the entry side `param` heads `[n,
HEAD]`, `pre` heads
`[n, HEAD]` and three flag columns `[3, n]`; for the exit side `post` heads `[n, HEAD]` and three
flag columns. Both sides have the same, padded size, so that a mispaired collective shows in the
header instead of hanging:
`2 * 8 * (2 * HEAD + 3) = 208` bytes per replica and side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tpwatch.fingerprint.layout import HEAD, SKETCH
from tpwatch.records import PointSpread, RowObservation

HEADER = ("phase", "call", "step", "plan_lo", "plan_hi", "targets", "failed", "disabled", "slow")
"""`phase`: 0 entry, 1 exit, 2 values only. `targets`: digest of what tier 2 is to gather. One
column per flag: MAX is not OR."""

ENTRY, EXIT, VALUES = 0, 1, 2
FLAGS = 3
OUTSIDE = -1.0
"""`present` of a row that this finalizer call does not handle, or whose gradient is not owned here."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets into one half of a buffer for `n` replicas."""

    n: int

    @property
    def half(self) -> int:
        """Float64 columns of one half."""
        return len(HEADER) + self.n * (2 * HEAD + FLAGS)

    def allocate(self, device: torch.device) -> torch.Tensor:
        """A zeroed buffer `[2, half]`."""
        return torch.zeros(2, self.half, dtype=torch.float64, device=device)

    def heads(self, half: torch.Tensor, tensors: int) -> torch.Tensor:
        """View `[tensors, HEAD]` of the heads block of a half.

        `tensors` is 2n on entry, n on exit.
        """
        begin = len(HEADER)
        return half[begin : begin + tensors * HEAD].view(tensors, HEAD)

    def flags(self, half: torch.Tensor, tensors: int) -> torch.Tensor:
        """View `[FLAGS, n]` behind the heads."""
        begin = len(HEADER) + tensors * HEAD
        return half[begin : begin + FLAGS * self.n].view(FLAGS, self.n)


class Buffers:
    """The two send buffers of one replica group, allocated once, and the staging for their headers."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        """Allocate for `layout` on `device`.

        Staging is pinned for CUDA, so that no copy waits for the host.
        """
        self.layout = layout
        self.entry = layout.allocate(device)
        self.exit = layout.allocate(device)
        pinned = device.type == "cuda"
        self._staging = [torch.zeros(len(HEADER), dtype=torch.float64, pin_memory=pinned) for _ in range(4)]
        self._turn = 0

    def seal(self, buffer: torch.Tensor, header: Sequence[float]) -> None:
        """Write the header into the first half and the negated first half into the second, ready for MAX."""
        self._turn = (self._turn + 1) % len(self._staging)
        staging = self._staging[self._turn]
        staging.copy_(torch.tensor(header, dtype=torch.float64))
        buffer[0, : len(HEADER)].copy_(staging, non_blocking=True)
        torch.neg(buffer[0], out=buffer[1])


class Exchange:
    """Collectives over one replica group, counted.

    The only place of the package that calls one while training.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """`group` is the framework's own process group (None: the default group)."""
        self.group = group
        self.size = dist.get_world_size(group)
        self.collectives = 0
        self.bytes = 0

    def reduce_max(self, buffer: torch.Tensor) -> None:
        """All-reduce(MAX) in place, on the calling thread, in program order with the framework's own collectives."""
        self._count(buffer)
        dist.all_reduce(buffer, op=dist.ReduceOp.MAX, group=self.group)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-gather equal-sized 1-D tensors.

        `[m]` on each rank to `[size, m]` in group-rank order.
        """
        self._count(tensor)
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor, group=self.group)
        return torch.stack(parts)

    def _count(self, tensor: torch.Tensor) -> None:
        self.collectives += 1
        self.bytes += tensor.numel() * tensor.element_size()


class Pending:
    """A reduced buffer on its way to the host.

    Pinned memory, a side stream and an event on CUDA, a copy on CPU.
    """

    def __init__(self, buffer: torch.Tensor, host: torch.Tensor) -> None:
        """Start the copy of `buffer` into `host` (same shape, pinned where the device is CUDA)."""
        self._host = host
        self._event: torch.cuda.Event | None = None
        if buffer.is_cuda:
            host.copy_(buffer, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            host.copy_(buffer)

    def ready(self) -> bool:
        """True if the copy has arrived; never waits."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> torch.Tensor:
        """The host tensor, after waiting for the copy (not for the device)."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


class ReadBack:
    """Two host buffers per side, used in turn.

    The copy of one check is read while the next one is on its way.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        """Allocate the host buffers once, pinned for CUDA."""
        pinned = device.type == "cuda"
        shape = (2, layout.half)
        self._hosts = [torch.zeros(shape, dtype=torch.float64, pin_memory=pinned) for _ in range(4)]
        self._turn = 0

    def start(self, buffer: torch.Tensor) -> Pending:
        """Begin reading `buffer` back."""
        self._turn = (self._turn + 1) % len(self._hosts)
        return Pending(buffer, self._hosts[self._turn])


@dataclass(frozen=True, slots=True)
class Header:
    """The reduced header: smallest and largest value of each column over the group."""

    lo: tuple[float, ...]
    hi: tuple[float, ...]

    @property
    def mismatch(self) -> str:
        """The first column that must agree and does not, as text; empty if all agree."""
        for name in ("phase", "call", "step", "plan_lo", "plan_hi"):
            at = HEADER.index(name)
            if self.lo[at] != self.hi[at]:
                return f"{name}: {self.lo[at]:.0f} on one rank, {self.hi[at]:.0f} on another"
        return ""

    def flag(self, name: str) -> bool:
        """True if any rank set the flag."""
        return self.hi[HEADER.index(name)] > 0.0

    def agrees(self, name: str) -> bool:
        """True if every rank sent the same value in this column."""
        at = HEADER.index(name)
        return self.lo[at] == self.hi[at]


def header_of(reduced: torch.Tensor) -> Header:
    """Read the header of a reduced buffer (a small host copy if it still lies on a device)."""
    n = len(HEADER)
    both = reduced[:, :n].tolist()
    return Header(tuple(-x for x in both[1]), tuple(both[0]))


class Reduced:
    """Both sides of one check on the host, as MIN and MAX per column.

    Rows are turned into records on demand.
    """

    def __init__(self, layout: Layout, ranks: Sequence[int], entry: torch.Tensor, exit_: torch.Tensor | None) -> None:
        """`entry` and `exit_` are reduced host buffers `[2, half]`.

        Without an exit side (values only) post is empty.
        """
        n = layout.n
        self.ranks = ranks
        self.headers = [header_of(b) for b in (entry, exit_) if b is not None]
        hi, lo = entry[0], -entry[1]
        self._heads_hi = [layout.heads(hi, 2 * n)[:n], layout.heads(hi, 2 * n)[n:]]
        self._heads_lo = [layout.heads(lo, 2 * n)[:n], layout.heads(lo, 2 * n)[n:]]
        self._flags_hi, self._flags_lo = layout.flags(hi, 2 * n), layout.flags(lo, 2 * n)
        post_hi = torch.zeros(layout.half, dtype=torch.float64) if exit_ is None else exit_[0]
        post_lo = post_hi if exit_ is None else -exit_[1]
        self._heads_hi.append(layout.heads(post_hi, n))
        self._heads_lo.append(layout.heads(post_lo, n))
        self._after_hi, self._after_lo = layout.flags(post_hi, n), layout.flags(post_lo, n)

    def signature(self) -> torch.Tensor:
        """int64 `[n]`: equal to the last check's where the picture of a row is unchanged in kind.

        Packs the facts that rules branch on (bit-equality, presence, silence, non-finite, own
        gradient kept, rounded factor), so that a steady, healthy row costs no Python at all.
        """
        facts = [(hi[:, :2] == lo[:, :2]).all(1) for hi, lo in zip(self._heads_hi, self._heads_lo, strict=True)]
        facts += [hi[:, 3] == 0 for hi in self._heads_hi]
        facts += [hi[:, 4] > 0 for hi in self._heads_hi]
        facts += [self._flags_lo[0] > 0, self._flags_hi[0] > 0, self._flags_hi[0] < 0]
        facts += [self._after_lo[0] > 0, self._after_hi[0] > 0, self._heads_lo[1][:, 3] == 0]
        facts += [self._after_hi[2] > _LOOSE]
        bits = torch.stack(facts).to(torch.int64)
        weights = (1 << torch.arange(len(facts), dtype=torch.int64)).unsqueeze(1)
        factor = (self._after_hi[1] * _FACTOR_STEPS).round().clamp(-_FACTOR_CAP, _FACTOR_CAP).to(torch.int64)
        settled = torch.where(facts[1], factor, torch.zeros_like(factor))
        return (bits * weights).sum(0) + (settled + _FACTOR_CAP) * (1 << len(facts))

    def differing(self) -> dict[str, int]:
        """Rows that are not bit-identical, per observation point."""
        names = ("param", "grad_pre", "grad_post")
        pairs = zip(names, self._heads_hi, self._heads_lo, strict=True)
        return {name: int((hi[:, :2] != lo[:, :2]).any(1).sum()) for name, hi, lo in pairs}

    def ratios(self) -> tuple[float | None, float | None]:
        """Smallest and largest norm(post) / norm(pre) of a row, by the largest norms of the group; None without any."""
        before, after = self._heads_hi[1][:, 2], self._heads_hi[2][:, 2]
        if len(self.headers) == 1 or not (rows := before > 0).any():
            return None, None
        low, high = (after[rows] / before[rows]).sqrt().aminmax()
        return float(low), float(high)

    def uneven(self) -> list[int]:
        """Rows whose gradient is present on some ranks only."""
        return torch.nonzero((self._flags_lo[0] == 0) & (self._flags_hi[0] > 0)).flatten().tolist()

    def rows(self, indices: Sequence[int]) -> list[RowObservation]:
        """Records of the given rows."""
        if not indices:
            return []
        at = torch.tensor(indices, dtype=torch.int64)
        heads = [
            (hi.index_select(0, at).tolist(), lo.index_select(0, at).tolist())
            for hi, lo in zip(self._heads_hi, self._heads_lo, strict=True)
        ]
        flags = [
            t.index_select(1, at).T.tolist() for t in (self._flags_hi, self._flags_lo, self._after_hi, self._after_lo)
        ]
        return [self._row(index, k, heads, flags) for k, index in enumerate(indices)]

    def _row(
        self,
        index: int,
        k: int,
        heads: list[tuple[list[list[float]], list[list[float]]]],
        flags: list[list[list[float]]],
    ) -> RowObservation:
        param, pre, post = (_spread(hi[k], lo[k]) for hi, lo in heads)
        before_hi, before_lo, after_hi, after_lo = (f[k] for f in flags)
        present = (before_lo[0] > 0, before_hi[0] > 0)
        return RowObservation(
            index=index, param=param, pre=pre, post=post, in_scope=before_hi[0] >= 0.0,
            present_lo=present[0], present_hi=present[1], absent=self._absent(before_hi, before_lo),
            kept_lo=after_lo[0] > 0, kept_hi=after_hi[0] > 0,
            scale_lo=after_lo[1], scale_hi=after_hi[1], residual_hi=after_hi[2],
        )  # fmt: skip

    def _absent(self, hi: Sequence[float], lo: Sequence[float]) -> tuple[int, ...]:
        """Lowest and highest rank that set its absent columns; see `presence_flags`."""
        if hi[0] < 0 or hi[1] < 0:
            return ()
        ends = sorted({int(lo[2]), int(hi[1])})
        return tuple(self.ranks[i] for i in ends if 0 <= i < len(self.ranks))


_FACTOR_STEPS, _FACTOR_CAP, _LOOSE = 16.0, 1 << 20, 0.05


def _spread(hi: Sequence[float], lo: Sequence[float]) -> PointSpread:
    return PointSpread(
        same=hi[0] == lo[0] and hi[1] == lo[1], l2_lo=lo[2], l2_hi=hi[2],
        absmax_lo=lo[3], absmax_hi=hi[3], nonfinite_lo=int(lo[4]), nonfinite_hi=int(hi[4]),
    )  # fmt: skip


def presence_flags(flags: torch.Tensor, present: Sequence[float], group_rank: int) -> None:
    """Fill the entry flags `[3, n]`.

    Presence, and two masked columns whose MAX and MIN are the ends of the absent ranks.

    `present` is 1.0 with a gradient, 0.0 without, `OUTSIDE` if not handled. Where this rank is
    absent it sends its group rank in both columns; where it is not, -1 towards MAX and a value
    above every rank towards MIN.
    """
    flags[0] = torch.tensor(present, dtype=torch.float64)
    absent = flags[0] == 0.0
    flags[1] = torch.where(absent, float(group_rank), -1.0)
    flags[2] = torch.where(absent, float(group_rank), float(1 << 30))


def reduction_flags(flags: torch.Tensor, pre: torch.Tensor, post: torch.Tensor) -> None:
    """Fill the exit flags `[3, n]` from own fingerprint rows `[n, ROW]`.

    Kept, factor c, residual of post = c * pre.

    c = <post, pre> / <pre, pre> on the sketches, which are linear; where pre is zero, c is 0 and
    the residual is 1 if post is not zero. Both are divided by their largest coordinate first,
    so that no square overflows: NaN must not enter MAX.
    """
    flags[0] = (pre[:, :2] == post[:, :2]).all(1)
    before, after = pre[:, -SKETCH:], post[:, -SKETCH:]
    largest = torch.maximum(before.abs().amax(1), after.abs().amax(1)).clamp_min(_TINY).unsqueeze(1)
    before, after = before / largest, after / largest
    square = (before * before).sum(1)
    factor = torch.where(square > 0, (before * after).sum(1) / square.clamp_min(_TINY), 0.0)
    left = (after - factor.unsqueeze(1) * before).norm(dim=1)
    flags[1] = factor
    flags[2] = torch.where(left > 0, left / after.norm(dim=1).clamp_min(_TINY), 0.0)


_TINY = 1e-300
