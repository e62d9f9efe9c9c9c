"""Tier 2: gather what was flagged, over the group, and measure it. Knows tensors; names no fault.

A deep check adds at most four collectives, whatever was flagged (two a side): one all-gather of
full fingerprint rows, with the elements of small tensors behind them, and one elementwise
all-reduce(MAX) of `[x, -x]` over the flagged tensors, within a byte budget that moves on from check
to check. What is gathered is decided by the caller from reduced data and the step number alone, so
that every rank enters the same collectives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tpwatch._guard import Guard
from tpwatch.config import Config
from tpwatch.fingerprint.layout import ROW, SKETCH, SKETCH_NORM
from tpwatch.records import Evidence, Spread, Target, WatchPlan

HASH, L2, ABSMAX, COORDINATES = slice(0, 2), 2, 3, slice(ROW - SKETCH, ROW)
"""Columns of a fingerprint row used here."""

SKETCH_SCALE = math.sqrt(SKETCH_NORM)
"""Factor by which the norm of the sketch coordinates estimates the norm of the tensor."""


class Collectives(Protocol):
    """What is asked of an exchange."""

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-gather equal-sized 1-D tensors: `[m]` on each rank to `[size, m]` in group-rank order."""
        ...

    def reduce_max(self, buffer: torch.Tensor) -> None:
        """All-reduce(MAX) in place."""
        ...


@dataclass(slots=True)
class _Side:
    """What one side of a deep check gathered, still on the device."""

    gathered: torch.Tensor
    """`[size, m]`: per target its rows, then the elements of exact targets."""
    spreads: torch.Tensor | None
    """`[2, total]` reduced `[x, -x]` of the budgeted tensors."""


class Explainer:
    """Gathers and measures flagged rows of one plan. One instance per replica group."""

    def __init__(
        self,
        plan: WatchPlan,
        exchange: Collectives,
        config: Config,
        guard: Guard,
        device: torch.device,
    ) -> None:
        """Start with nothing gathered."""
        self._plan = plan
        self._exchange = exchange
        self._config = config.explain
        self._rel_floor = config.thresholds.rel_floor
        self._guard = guard
        self._device = device
        self._cursor = 0
        self._requests: tuple[Target, ...] = ()
        self._chosen: tuple[list[int], list[int]] = ([], [])
        self._before: _Side | None = None
        self._after: _Side | None = None

    def gather_before(
        self,
        requests: Sequence[Target],
        rows: torch.Tensor,
        values: Sequence[torch.Tensor | None],
        gradients: Sequence[torch.Tensor | None],
    ) -> None:
        """Entry side: `rows` is `[2n, ROW]` (params, then gradients before the reduction)."""
        n = len(self._plan.replicas)
        self._requests = tuple(requests)
        self._chosen = self._within_budget()
        at = [r.index for r in requests]
        blocks = [rows[at].flatten(), rows[[n + i for i in at]].flatten()]
        gathered = self._gather(blocks, gradients)
        self._before = _Side(gathered, self._spread(values, self._chosen[0], self._value_sizes()))

    def gather_after(self, rows: torch.Tensor, gradients: Sequence[torch.Tensor | None]) -> None:
        """Exit side: `rows` is `[n, ROW]` of gradients after the reduction.

        Same targets as on entry.
        """
        blocks = [rows[[r.index for r in self._requests]].flatten()]
        gathered = self._gather(blocks, gradients)
        self._after = _Side(gathered, self._spread(gradients, self._chosen[1], self._grad_sizes()))

    def conclude(self) -> dict[int, Evidence]:
        """Evidence per flagged row of the last deep check.

        Empty if there was none, or only one side of it.
        """
        before, after, requests = self._before, self._after, self._requests
        self._before = self._after = None
        self._requests = ()
        if before is None or after is None:
            return {}
        spreads = self._measure(before.spreads, self._chosen[0], self._value_sizes(), floor=self._rel_floor)
        moved = self._measure(after.spreads, self._chosen[1], self._grad_sizes(), floor=None)
        cut = _Cut(
            self._plan,
            [r.index for r in requests],
            self._is_exact,
            before.gathered.cpu(),
            after.gathered.cpu(),
        )
        return {
            r.index: cut.evidence(k, spreads.get(r.index), moved.get(r.index))
            for k, r in enumerate(requests)
            if cut.meaningful(k)
        }

    # ------------------------------------------------------------------------------------------- pieces

    def _is_exact(self, index: int) -> bool:
        return 0 < self._plan.replicas[index].grad_numel <= self._config.exact_elements

    def _gather(self, blocks: list[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """All-gather rows, then the elements of exact targets."""
        exact = [r.index for r in self._requests if self._is_exact(r.index)]
        sizes = [self._plan.replicas[i].grad_numel for i in exact]
        total = sum(b.numel() for b in blocks) + sum(sizes)
        return self._exchange.gather(self._flat(blocks, gradients, exact, sizes, total))

    def _spread(
        self, tensors: Sequence[torch.Tensor | None], indices: list[int], sizes: list[int]
    ) -> torch.Tensor | None:
        """Reduce `[x, -x]` of the chosen tensors in one collective; None if there are none."""
        if not indices:
            return None
        flat = self._flat([], tensors, indices, sizes, sum(sizes))
        both = torch.stack((flat, -flat))
        both[both == -math.inf] = math.inf
        self._exchange.reduce_max(both)
        return both

    def _flat(
        self,
        blocks: list[torch.Tensor],
        tensors: Sequence[torch.Tensor | None],
        indices: list[int],
        sizes: list[int],
        total: int,
    ) -> torch.Tensor:
        """One float64 payload of the agreed size, whatever fails here.

        Infinities mark it as meaningless.
        """

        def build() -> torch.Tensor:
            pieces = [self._elements(tensors[i], size) for i, size in zip(indices, sizes, strict=True)]
            return torch.cat([*blocks, *pieces])

        built = self._guard.attempt("gathering", build)
        if built.value is not None and built.value.numel() == total:
            return built.value
        return torch.full((total,), math.inf, dtype=torch.float64, device=self._device)

    def _elements(self, tensor: torch.Tensor | None, numel: int) -> torch.Tensor:
        """Flat float64 elements, non-finite ones as zero; zeros where this rank has no gradient."""
        if tensor is None:
            return torch.zeros(numel, dtype=torch.float64, device=self._device)
        flat = tensor.detach().reshape(-1).to(torch.float64)
        return torch.nan_to_num(flat, nan=0.0, posinf=0.0, neginf=0.0)

    def _within_budget(self) -> tuple[list[int], list[int]]:
        """Rows whose value and whose gradient spread fit the byte budget, starting where the last check stopped."""
        requests = self._requests
        start = next((k for k, r in enumerate(requests) if r.index >= self._cursor), 0)
        chosen: tuple[list[int], list[int]] = ([], [])
        left = self._config.gather_bytes
        for request in (*requests[start:], *requests[:start]):
            spec = self._plan.replicas[request.index]
            cost = 16 * (math.prod(spec.shape) * request.values + spec.grad_numel * request.gradients)
            if cost > self._config.gather_bytes:
                continue  # it never fits, and must not keep the others waiting
            if cost > left:
                self._cursor = request.index
                break
            left -= cost
            if request.values:
                chosen[0].append(request.index)
            if request.gradients and spec.grad_numel:
                chosen[1].append(request.index)
        return chosen

    def _value_sizes(self) -> list[int]:
        return [math.prod(self._plan.replicas[i].shape) for i in self._chosen[0]]

    def _grad_sizes(self) -> list[int]:
        return [self._plan.replicas[i].grad_numel for i in self._chosen[1]]

    @staticmethod
    def _measure(
        both: torch.Tensor | None, indices: list[int], sizes: list[int], *, floor: float | None
    ) -> dict[int, Spread]:
        if both is None:
            return {}
        hi, lo = both[0].cpu().split(sizes), (-both[1]).cpu().split(sizes)
        whole = zip(indices, hi, lo, strict=True)
        return {i: spread(h, low, floor) for i, h, low in whole if bool(h.isfinite().all() and low.isfinite().all())}


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


class _Cut:
    """Cuts the gathered blocks of both sides into evidence per target."""

    def __init__(
        self,
        plan: WatchPlan,
        at: list[int],
        is_exact: object,
        before: torch.Tensor,
        after: torch.Tensor,
    ) -> None:
        """`before` and `after` are `[size, m]` on the host."""
        m = len(at)
        self._plan, self._at = plan, at
        self._param = before[:, : m * ROW].view(-1, m, ROW)
        self._pre = before[:, m * ROW : 2 * m * ROW].view(-1, m, ROW)
        self._post = after[:, : m * ROW].view(-1, m, ROW)
        sizes = [plan.replicas[i].grad_numel if is_exact(i) else 0 for i in at]  # type: ignore[operator]
        self._pre_elements = before[:, 2 * m * ROW :].split(sizes, dim=1)
        self._post_elements = after[:, m * ROW :].split(sizes, dim=1)

    def meaningful(self, k: int) -> bool:
        """False if a rank could not build its payload (see `_flat`)."""
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
