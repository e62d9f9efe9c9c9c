"""What `probe` measured, read back over all ranks, and the questions the tests ask of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

from tests.commands import REPOSITORY
from tpwatch.lab.launch import Workers

PROBE = Path(__file__).with_name("probe.py")
NEAR = 0.1
"""Relative spread that separates another rounding (bf16: below 2e-2) from another gradient."""

SAME = 1e-5
"""Relative error below which two layouts have computed the same float32 gradient (seen: 3e-6)."""


@dataclass(frozen=True)
class Row:
    """One replicated parameter in one call of the reduction, by rank."""

    value: list[torch.Tensor]
    pre: list[torch.Tensor | None]
    post: list[torch.Tensor | None]

    @property
    def presence(self) -> list[bool]:
        """Which ranks have a gradient."""
        return [gradient is not None for gradient in self.pre]

    @property
    def before(self) -> list[torch.Tensor]:
        """The gradients in front of the reduction; there must be one on every rank."""
        return [gradient for gradient in self.pre if gradient is not None]

    @property
    def after(self) -> list[torch.Tensor]:
        """The gradients behind the reduction."""
        return [gradient for gradient in self.post if gradient is not None]

    @property
    def zero_ranks(self) -> list[int]:
        """Ranks whose gradient is exactly zero in front of the reduction."""
        return [rank for rank, gradient in enumerate(self.before) if not gradient.any()]

    def multiplied(self) -> float | None:
        """The factor c of copies that became c times themselves, to 1e-6; None if it is not so."""
        before, after = self.before, self.after
        if not before or not equal(before) or not equal(after) or not before[0].any():
            return None
        factor = float(after[0].norm() / before[0].norm())
        return factor if torch.allclose(after[0], factor * before[0], rtol=1e-6) else None

    def unreduced(self) -> bool:
        """Gradients of different ranks differ, and come out as they went in."""
        pairs = zip(self.before, self.after, strict=True)
        return bool(self.before) and not equal(self.before) and all(torch.equal(*p) for p in pairs)

    def spread(self) -> float:
        """Largest distance of a rank's gradient from rank 0's, relative to the largest norm."""
        scale = max(float(gradient.norm()) for gradient in self.before)
        return max(float((other - self.before[0]).norm()) for other in self.before) / scale


@dataclass(frozen=True)
class Run:
    """One job over all ranks: losses of rank 0, and `steps[i][name]` with a row for each call."""

    losses: list[float]
    steps: list[dict[str, list[Row]]]
    reduction: str
    tp: int

    def rows(self, step: int) -> dict[str, Row]:
        """The first call in step `step` (from 1)."""
        return {name: calls[0] for name, calls in self.steps[step - 1].items()}

    def all_rows(self) -> Iterator[Row]:
        """Every row there is."""
        for step in self.steps:
            for calls in step.values():
                yield from calls

    def value_spread(self, step: int) -> tuple[float, int]:
        """Largest difference of a value between ranks and the number of elements that differ."""
        gaps = [(other - row.value[0]).abs() for row in self.rows(step).values() for other in row.value[1:]]
        return max(float(gap.max()) for gap in gaps), sum(int((gap > 0).sum()) for gap in gaps)


def same(gradient: torch.Tensor, reference: torch.Tensor) -> bool:
    """The same gradient up to rounding, measured by norms."""
    return bool((gradient - reference).norm() <= SAME * reference.norm())


def equal(tensors: list[torch.Tensor]) -> bool:
    """Bit-identical, all of them."""
    return all(torch.equal(tensor, tensors[0]) for tensor in tensors)


def run_probe(out: Path, world: int, jobs: list[str]) -> dict[str, Run]:
    """Measure jobs, one after the other, in one set of processes."""
    command = [sys.executable, str(PROBE), str(out), *jobs]
    with mock.patch.dict(os.environ, PYTHONPATH=str(REPOSITORY)), Workers(command, world) as ranks:
        assert ranks.wait(timeout=150) == 0
    return {job: _load(out, job, world) for job in jobs}


def _load(out: Path, job: str, world: int) -> Run:
    """Read the files of the first TP group, whose ranks are the first ones of the world."""
    paths = [out / f"{job.replace(':', '-')}.rank{rank}.pt" for rank in range(world)]
    first = torch.load(paths[0])
    ranks = [first, *(torch.load(path) for path in paths[1 : first["tp"]])]
    steps = [
        {name: [_row(call) for call in zip(*(step[name] for step in by_rank), strict=True)] for name in by_rank[0]}
        for by_rank in zip(*(rank["steps"] for rank in ranks), strict=True)
    ]
    return Run(first["losses"], steps, first["reduction"], first["tp"])


def _row(call: tuple[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None], ...]) -> Row:
    """Turn what every rank recorded of one call into columns."""
    values, before, after = zip(*call, strict=True)
    return Row(list(values), list(before), list(after))
