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
from typing import Any

import torch
import torch.distributed as dist

from tpwatch._guard import Guard
from tpwatch.records import KINDS


@dataclass(frozen=True, slots=True)
class Word:
    """What one rank has to say about a step: the same as the others of its replica group, unless it failed."""

    stop: bool
    save: bool
    """A checkpoint is wanted before the stop."""
    counts: Mapping[str, int]
    """Causes of warning or error, by kind; of each group those of its leader count."""
    ratio: float
    """Largest norm(post) / norm(pre) of a finding, 0 if none has one."""
    max_abs: float
    now: bool = False
    """Training does not survive what was found: stop, however few faults there are."""


@dataclass(frozen=True, slots=True)
class JobView:
    """What the job as a whole said about a step; the same on every rank."""

    step: int
    stop: bool
    save: bool
    now: bool
    counts: Mapping[str, int]
    """Findings summed over replica groups: data-parallel peers of a parameter each count their own."""
    ratio: float
    max_abs: float

    def to_json(self) -> dict[str, object]:
        """As an event says it. Measures to three digits: their last ones change at every step and tell nothing."""
        ratio, max_abs = (float(f"{measure:.3g}") for measure in (self.ratio, self.max_abs))
        return {"counts": dict(self.counts), "ratio": ratio, "max_abs": max_abs, "stopping": self.stop}


class Job:
    """The meeting of all ranks. Two collectives, on their way together: a sum of counts, and a maximum of the rest.

    Where it may stop the run it is heard at once, which waits for the slowest rank and for the device: whoever hears
    later stops an update later. (Megatron's optimizer waits right behind it all the same, for the norm of the
    gradients.) Where it only tells, it is heard at the next meeting, and nobody waits.
    """

    def __init__(self, *, leader: bool, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        """`leader`: this rank speaks for its replica group. `group`: all ranks of the job (None: the default group)."""
        self._leader = leader
        self._group = group
        self._both = torch.zeros(len(KINDS) + 5, dtype=torch.float64, device=device)
        self._sums, self._tops = self._both[: len(KINDS)], self._both[len(KINDS) :]
        self._under_way: tuple[int, tuple[Any, Any]] | None = None

    def meet(self, step: int, word: Word, guard: Guard) -> JobView | None:
        """Say this rank's word and hear the job's, at once. A collective over all ranks."""
        self.hear()  # to a meeting under way the same is said again now
        self.say(step, word, guard)
        return self.hear()

    def say(self, step: int, word: Word, guard: Guard) -> None:
        """Say this rank's word, or nothing where that fails. A collective over all ranks, and nobody waits for it."""
        if not guard.attempt("the word of this rank", self._fill, word).ok:
            self._both.zero_()
        sums = dist.all_reduce(self._sums, op=dist.ReduceOp.SUM, group=self._group, async_op=True)
        tops = dist.all_reduce(self._tops, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._under_way = step, (sums, tops)

    def hear(self) -> JobView | None:
        """What the job said at the meeting under way, waiting for it; None if there is none."""
        if self._under_way is None:
            return None
        (step, works), self._under_way = self._under_way, None
        for work in works:
            work.wait()
        heard = self._both.tolist()
        stop, save, now, ratio, max_abs = heard[len(KINDS) :]
        seen = {kind: int(count) for kind, count in zip(KINDS, heard, strict=False) if count}
        return JobView(step, stop > 0, save > 0, now > 0, seen, ratio, max_abs)

    def _fill(self, word: Word) -> None:
        counts = [float(word.counts.get(kind, 0)) * self._leader for kind in KINDS]
        tops = [float(x) for x in (word.stop, word.save, word.now, word.ratio, word.max_abs)]
        self._both.copy_(torch.tensor([*counts, *tops], dtype=torch.float64))
