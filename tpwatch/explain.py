"""Tier 2: gather what was flagged, over the group, and have it measured (`evidence`). Names no fault.

A deep check adds at most four collectives, whatever was flagged (two a side): one all-gather of
full fingerprint rows, with the elements of small tensors behind them, and one elementwise
all-reduce(MAX) of `[x, -x]` over the flagged tensors, within a byte budget that moves on from check
to check. What is gathered is decided by the caller from reduced data and the step number alone, so
that every rank enters the same collectives; and the memory for it is taken before the ranks agree
to gather, so that one that has none can still say so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tpwatch._guard import Guard
from tpwatch.config import Config
from tpwatch.evidence import Cut, spread
from tpwatch.fingerprint.layout import ROW
from tpwatch.records import Evidence, Spread, Target, WatchPlan


class Collectives(Protocol):
    """What is asked of an exchange."""

    def gather(self, tensor: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        """All-gather equal-sized 1-D tensors: `[m]` on each rank to `[size, m]` in group-rank order, into `room`."""
        ...

    def reduce_max(self, buffer: torch.Tensor) -> None:
        """All-reduce(MAX) in place."""
        ...


@dataclass(frozen=True, slots=True)
class _Side:
    """Memory of one side of a deep check, and once its collectives are done what they brought; on the device."""

    payload: torch.Tensor
    """`[m]`: per target its rows, then the elements of exact targets."""
    gathered: torch.Tensor
    """`[size, m]`: the payloads of all ranks."""
    spreads: torch.Tensor
    """`[2, total]`: `[x, -x]` of the budgeted tensors."""


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
        self._next = 0
        self._sides: tuple[_Side, _Side] | None = None
        self._done = 0

    def prepare(self, requests: Sequence[Target]) -> None:
        """Choose what fits the budget and take the memory for both sides. If that raises, no rank may gather.

        Not a collective, and nothing is settled by it: the ranks may not agree to gather.
        """
        self._requests, self._sides, self._done = tuple(requests), None, 0
        if requests:
            self._chosen, self._next = self._within_budget()
            rows, exact = ROW * len(requests), sum(self._exact_sizes())
            before = self._side(2 * rows + exact, sum(self._value_sizes()))
            self._sides = before, self._side(rows + exact, sum(self._grad_sizes()))

    def gather_before(
        self,
        rows: torch.Tensor,
        tensors: Sequence[torch.Tensor | None],
    ) -> None:
        """Entry side: `rows` is `[2n, ROW]`, `tensors` are 2n: values, then gradients before the reduction."""
        if self._sides is None:
            return
        self._cursor, n = self._next, len(self._plan.replicas)
        at = [r.index for r in self._requests]
        self._gather(self._sides[0], rows, at + [n + i for i in at], tensors[n:])
        self._spread(self._sides[0].spreads, tensors[:n], self._chosen[0], self._value_sizes())
        self._done = 1

    def gather_after(self, rows: torch.Tensor, gradients: Sequence[torch.Tensor | None]) -> None:
        """Exit side: `rows` is `[n, ROW]` of gradients after the reduction.

        Same targets as on entry.
        """
        if self._sides is None:
            return
        self._gather(self._sides[1], rows, [r.index for r in self._requests], gradients)
        self._spread(self._sides[1].spreads, gradients, self._chosen[1], self._grad_sizes())
        self._done += 1

    def conclude(self) -> dict[int, Evidence]:
        """Evidence per flagged row of the last deep check.

        Empty if there was none, or only one side of it.
        """
        sides, requests, done = self._sides, self._requests, self._done
        self._sides, self._requests, self._done = None, (), 0
        if sides is None or done != len(sides):
            return {}
        before, after = sides
        spreads = self._measure(before.spreads, self._chosen[0], self._value_sizes(), floor=self._rel_floor)
        moved = self._measure(after.spreads, self._chosen[1], self._grad_sizes(), floor=None)
        cut = Cut(
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

    def _exact(self) -> list[int]:
        return [r.index for r in self._requests if self._is_exact(r.index)]

    def _exact_sizes(self) -> list[int]:
        return [self._plan.replicas[i].grad_numel for i in self._exact()]

    def _side(self, payload: int, spreads: int) -> _Side:
        sizes = ((payload,), (len(self._plan.ranks), payload), (2, spreads))
        return _Side(*(torch.empty(size, dtype=torch.float64, device=self._device) for size in sizes))

    def _gather(self, side: _Side, rows: torch.Tensor, at: list[int], gradients: Sequence[torch.Tensor | None]) -> None:
        """All-gather the rows `at`, then the elements of exact targets."""
        behind = ROW * len(at)

        def build() -> bool:
            side.payload[:behind].view(-1, ROW).copy_(rows[at])
            return self._copy(side.payload[behind:], gradients, self._exact(), self._exact_sizes())

        if not self._guard.attempt("gathering", build).value:
            side.payload.fill_(math.inf)
        self._exchange.gather(side.payload, side.gathered)

    def _spread(
        self, both: torch.Tensor, tensors: Sequence[torch.Tensor | None], indices: list[int], sizes: list[int]
    ) -> None:
        """Reduce `[x, -x]` of the chosen tensors in one collective; in none if there are none."""
        if not indices:
            return

        def build() -> bool:
            copied = self._copy(both[0], tensors, indices, sizes)
            torch.neg(both[0], out=both[1])
            return copied

        if not self._guard.attempt("gathering", build).value:
            both.fill_(math.inf)
        self._exchange.reduce_max(both)

    def _copy(
        self, to: torch.Tensor, tensors: Sequence[torch.Tensor | None], indices: list[int], sizes: list[int]
    ) -> bool:
        """Put the elements of the tensors one behind the other; False if one has another size than the plan says.

        The caller then sends infinities: they mark a payload as meaningless.
        """
        pieces = [self._elements(tensors[index], size) for index, size in zip(indices, sizes, strict=True)]
        if [piece.numel() for piece in pieces] != sizes:
            return False
        for room, piece in zip(to.split(sizes), pieces, strict=True):
            room.copy_(piece)
        return True

    def _elements(self, tensor: torch.Tensor | None, numel: int) -> torch.Tensor:
        """Flat float64 elements, non-finite ones as zero; zeros where this rank has no gradient."""
        if tensor is None:
            return torch.zeros(numel, dtype=torch.float64, device=self._device)
        flat = tensor.detach().reshape(-1).to(torch.float64)
        return torch.nan_to_num(flat, nan=0.0, posinf=0.0, neginf=0.0)

    def _within_budget(self) -> tuple[tuple[list[int], list[int]], int]:
        """Rows whose value and whose gradient spread fit the byte budget from the cursor on, and where it is to go."""
        requests = self._requests
        start = next((k for k, r in enumerate(requests) if r.index >= self._cursor), 0)
        chosen: tuple[list[int], list[int]] = ([], [])
        left, cursor = self._config.gather_bytes, self._cursor
        for request in (*requests[start:], *requests[:start]):
            spec = self._plan.replicas[request.index]
            cost = 16 * (math.prod(spec.shape) * request.values + spec.grad_numel * request.gradients)
            if cost > self._config.gather_bytes:
                continue  # it never fits, and must not keep the others waiting
            if cost > left:
                cursor = request.index
                break
            left -= cost
            if request.values:
                chosen[0].append(request.index)
            if request.gradients and spec.grad_numel:
                chosen[1].append(request.index)
        return chosen, cursor

    def _value_sizes(self) -> list[int]:
        return [math.prod(self._plan.replicas[i].shape) for i in self._chosen[0]]

    def _grad_sizes(self) -> list[int]:
        return [self._plan.replicas[i].grad_numel for i in self._chosen[1]]

    @staticmethod
    def _measure(both: torch.Tensor, indices: list[int], sizes: list[int], *, floor: float | None) -> dict[int, Spread]:
        if not indices:
            return {}
        hi, lo = both[0].cpu().split(sizes), (-both[1].cpu()).split(sizes)
        whole = zip(indices, hi, lo, strict=True)
        return {i: spread(h, low, floor) for i, h, low in whole if bool(h.isfinite().all() and low.isfinite().all())}
