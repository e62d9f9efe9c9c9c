"""Acting together over the whole job: one tiny vector over all ranks, at checked steps, just before the update.

A replica group that stopped alone would leave its data-parallel and pipeline peers in a collective for ever. So where a
policy can stop the run, every rank of the job meets every other at the same place of the same step (the optimizer is
about to use the gradients) and learns whether any group wants to stop. The same vector carries the number of faults per
kind and the worst ratio and spread, so that the rank that logs sees the whole job and not only its own group.

Whether a step has this meeting depends on the step number alone. Knows numbers and one process group; decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tpwatch.records import KINDS


@dataclass(frozen=True, slots=True)
class Word:
    """What one replica group has to say about a step; of its ranks only the leader counts."""

    stop: bool
    save: bool
    """A checkpoint is wanted before the stop."""
    counts: Mapping[str, int]
    """Causes of warning or error, by kind."""
    ratio: float
    """Largest norm(post) / norm(pre) of a finding, 0 if none has one."""
    max_abs: float


@dataclass(frozen=True, slots=True)
class JobView:
    """What the job as a whole said about a step; the same on every rank."""

    step: int
    stop: bool
    save: bool
    groups_stopping: int
    counts: Mapping[str, int]
    """Findings summed over replica groups: data-parallel peers of a parameter each count their own."""
    ratio: float
    max_abs: float

    def to_json(self) -> dict[str, object]:
        """As an event says it. Measures to three digits: their last ones change at every step and tell nothing."""
        ratio, max_abs = (float(f"{measure:.3g}") for measure in (self.ratio, self.max_abs))
        return {"counts": dict(self.counts), "ratio": ratio, "max_abs": max_abs, "stopping": self.stop}


class Job:
    """The meeting of all ranks. Two collectives a meeting: a sum of counts and a maximum of measures."""

    def __init__(self, *, leader: bool, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        """`leader`: this rank speaks for its replica group. `group`: all ranks of the job (None: the default group)."""
        self._leader = leader
        self._group = group
        self._sums = torch.zeros(2 + len(KINDS), dtype=torch.float64, device=device)
        self._tops = torch.zeros(2, dtype=torch.float64, device=device)

    def meet(self, step: int, word: Word) -> JobView:
        """Say this group's word and hear the job's. A collective over all ranks; waits for the result."""
        said = [word.stop, word.save, *(word.counts.get(kind, 0) for kind in KINDS)]
        sums = [float(number) * self._leader for number in said]
        self._sums.copy_(torch.tensor(sums, dtype=torch.float64))
        self._tops.copy_(torch.tensor([word.ratio, word.max_abs], dtype=torch.float64))
        dist.all_reduce(self._sums, op=dist.ReduceOp.SUM, group=self._group)
        dist.all_reduce(self._tops, op=dist.ReduceOp.MAX, group=self._group)
        stopping, saving, *counts = self._sums.tolist()
        ratio, max_abs = self._tops.tolist()
        seen = {kind: int(count) for kind, count in zip(KINDS, counts, strict=True) if count}
        return JobView(step, stopping > 0, saving > 0, int(stopping), seen, ratio, max_abs)
