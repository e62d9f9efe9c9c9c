"""What gathered rows and elements say about a flagged parameter: spreads, deviations, residuals, camps.

Knows tensors on the host; names no fault, asks no rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tpwatch.fingerprint.layout import ROW, SKETCH, SKETCH_NORM
from tpwatch.records import Evidence, Spread, WatchPlan

HASH, L2, ABSMAX, COORDINATES = slice(0, 2), 2, 3, slice(ROW - SKETCH, ROW)
"""Columns of a fingerprint row used here."""

SKETCH_SCALE = math.sqrt(SKETCH_NORM)
"""Factor by which the norm of the sketch coordinates estimates the norm of the tensor."""


def spread(hi: torch.Tensor, lo: torch.Tensor, floor: float | None) -> Spread:
    """Elementwise spread from MAX and MIN over the group.

    max_rel is the largest (MAX - MIN) / max(|MAX|, |MIN|) over elements above `floor`; without one
    (gradients have no natural scale) the floor is a thousandth of the largest element.
    """
    gap = hi - lo
    size = torch.maximum(hi.abs(), lo.abs())
    limit = floor if floor is not None else 1e-3 * float(size.max()) if size.numel() else 0.0
    counted = (size > limit) & (size > 0)
    relative = torch.where(counted, gap / size.clamp_min(1e-300), torch.zeros_like(gap))
    top = (float(gap.max()), float(relative.max())) if gap.numel() else (0.0, 0.0)
    return Spread(
        max_abs=top[0],
        max_rel=top[1],
        differing=int((gap > 0).sum()),
        elements=gap.numel(),
        l2=float(gap.norm()),
    )


class Cut:
    """Cuts the gathered blocks of both sides into evidence per target."""

    def __init__(
        self,
        plan: WatchPlan,
        at: list[int],
        is_exact: Callable[[int], bool],
        before: torch.Tensor,
        after: torch.Tensor,
    ) -> None:
        """`before` and `after` are `[size, m]` on the host."""
        m = len(at)
        self._plan, self._at = plan, at
        self._param = before[:, : m * ROW].view(-1, m, ROW)
        self._pre = before[:, m * ROW : 2 * m * ROW].view(-1, m, ROW)
        self._post = after[:, : m * ROW].view(-1, m, ROW)
        sizes = [plan.replicas[i].grad_numel if is_exact(i) else 0 for i in at]
        self._pre_elements = before[:, 2 * m * ROW :].split(sizes, dim=1)
        self._post_elements = after[:, m * ROW :].split(sizes, dim=1)

    def meaningful(self, k: int) -> bool:
        """False if a rank could not build its payload (see `_copy`)."""
        return all(bool(side[:, k].isfinite().all()) for side in (self._param, self._pre, self._post))

    def evidence(self, k: int, values: Spread | None, gradients: Spread | None) -> Evidence:
        """Evidence about the k-th target."""
        pre, post, param = self._pre[:, k], self._post[:, k], self._param[:, k]
        exact = self._pre_elements[k].shape[1] > 0
        x, y = (self._pre_elements[k], self._post_elements[k]) if exact else (_sketch(pre), _sketch(post))
        square = (x * x).sum(1) if exact else pre[:, L2]
        size = len(self._plan.ranks)
        scale = float(square.max()) ** 0.5
        length = float(post[:, L2].mean()) ** 0.5
        return Evidence(
            index=self._at[k], exact=exact,
            deviation_param=deviation(_sketch(param), param[:, L2]),
            deviation_pre=deviation(x, square),
            deviation_post=deviation(y, (y * y).sum(1) if exact else post[:, L2]),
            residual_sum=_residual(y, x.sum(0), length), residual_avg=_residual(y, x.mean(0), length),
            tolerance=_tolerance(self._plan.replicas[self._at[k]].dtype, size, scale, length),
            norms_pre=_norms(pre), norms_post=_norms(post), zero_ranks=self._zero(pre),
            camps_param=self._camps(param), camps_post=self._camps(post), param=values, post=gradients,
        )  # fmt: skip

    def _zero(self, rows: torch.Tensor) -> tuple[int, ...]:
        return tuple(rank for rank, row in zip(self._plan.ranks, rows, strict=True) if float(row[ABSMAX]) == 0.0)

    def _camps(self, rows: torch.Tensor) -> tuple[tuple[int, ...], ...]:
        """Ranks grouped by equal hash, largest camp first, then by first rank."""
        camps: dict[tuple[float, ...], list[int]] = {}
        for rank, row in zip(self._plan.ranks, rows, strict=True):
            camps.setdefault(tuple(row[HASH].tolist()), []).append(rank)
        return tuple(sorted((tuple(c) for c in camps.values()), key=lambda c: (-len(c), c[0])))


def deviation(x: torch.Tensor, square: torch.Tensor) -> float:
    """sqrt(mean_r |x_r - mean x|^2 / mean_r |x_r|^2) of `[size, m]` rows with squared norms `[size]`; 0 of zeros."""
    mean_square = float(square.mean())
    if mean_square <= 0.0:
        return 0.0
    return float(((x - x.mean(0)).square().sum(1).mean() / mean_square).sqrt())


def _residual(y: torch.Tensor, expected: torch.Tensor, length: float) -> float:
    """max_r |y_r - expected| / |post|; infinite where post is zero and the expectation is not."""
    worst = float((y - expected).square().sum(1).max().sqrt())
    if worst == 0.0:
        return 0.0
    return worst / length if length > 0 else math.inf


_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


def _tolerance(dtype: str, size: int, scale: float, length: float) -> float:
    """Residual that rounding explains.

    2u sqrt(N) max|g_r| / |post| (FINGERPRINTS D), u from the parameter's dtype.

    Gradients may be kept in a wider type than the parameter; the coarser one is assumed, which errs
    towards "ambiguous". The float32 term covers a bucket that was scaled or flattened on the way.
    """
    unit = _ROUNDOFF.get(dtype, 2.0**-21)
    return 2.0 * unit * math.sqrt(size) * scale / length if length > 0 else 0.0


def _sketch(rows: torch.Tensor) -> torch.Tensor:
    """Sketch coordinates of `[size, ROW]` rows, scaled so that norms are those of the tensors."""
    return rows[:, COORDINATES] * SKETCH_SCALE


def _norms(rows: torch.Tensor) -> tuple[float, ...]:
    return tuple(float(x) ** 0.5 for x in rows[:, L2])
