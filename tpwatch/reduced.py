"""What came back from both sides of a check, on the host: MIN and MAX of every column over the group.

Knows the layout of the buffers; turns rows into records where somebody asks for them. Concludes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpwatch.exchange import Layout, header_of
from tpwatch.records import PointSpread, RowObservation


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
        """Rows that are not bit-identical, per observation point; values alone have only one."""
        points = ("param", "grad_pre", "grad_post") if len(self.headers) > 1 else ("param",)
        return {name: int(self._parted(at).sum()) for at, name in enumerate(points)}

    def apart(self) -> list[int]:
        """Rows whose values are not bit-identical."""
        return torch.nonzero(self._parted(0)).flatten().tolist()

    def _parted(self, point: int) -> torch.Tensor:
        """Bool `[n]`: not bit-identical at a point: 0 values, 1 gradients before, 2 after the reduction."""
        return (self._heads_hi[point][:, :2] != self._heads_lo[point][:, :2]).any(1)

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
