"""Who has a gradient and who has not: this rank's flags, and the full list of absent ranks once it matters.

Knows the flag columns of the entry side and one gather; what follows from an absence is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tpwatch.diagnose import presence_finding
from tpwatch.exchange import FLAGS, presence_flags
from tpwatch.handshake import AT_ONCE
from tpwatch.ledger import Ledger
from tpwatch.parts import Parts
from tpwatch.records import RowObservation
from tpwatch.reduced import Reduced


class Presence:
    """Presence of the gradients of one plan over one replica group."""

    def __init__(self, parts: Parts) -> None:
        """Nothing is known yet. Memory for the gather is taken now: none is needed to join the others."""
        n, exchange, device = len(parts.plan.replicas), parts.exchange, parts.device
        self._parts = parts
        self._marks = torch.zeros(n, dtype=torch.float64, device=device)
        self._room = torch.zeros(exchange.size * n, dtype=torch.float64, device=device)
        self._present: tuple[float, ...] = ()
        self._flags = torch.zeros(FLAGS, 0, dtype=torch.float64, device=device)
        self._absent: dict[int, tuple[int, ...]] = {}
        self._foretold: set[int] = set()

    def pack(self, flags: torch.Tensor, present: Sequence[float]) -> None:
        """Write this rank's flags `[FLAGS, n]`; worked out only when they change.

        They are written every time: the buffer holds what the last all-reduce left there.
        """
        if tuple(present) != self._present:
            marked = torch.zeros_like(flags)
            presence_flags(marked, present, self._parts.group_rank)
            self._flags, self._present = marked, tuple(present)
        flags.copy_(self._flags)

    def find_absent(self, rows: Sequence[RowObservation]) -> bool:
        """Learn which ranks lack the gradients of `rows`: the reduced columns tell the ends only.

        One collective the first time a row is uneven and whenever its ends have changed, once every rank has said
        through the store that it comes: one that could not read the buffer does not know of it. Then the ends are all
        that is known, and False says that not all ranks are here.
        """
        if all(_ends(self._absent.get(row.index, ())) == row.absent for row in rows):
            return True
        if self._parts.assembly.agree_to("absent", AT_ONCE):
            return False
        mine = [self._present[row.index] for row in rows]
        marks = self._marks[: len(mine)]
        marks.copy_(torch.tensor(mine, dtype=torch.float64))
        exchange = self._parts.exchange
        room = self._room[: exchange.size * len(mine)].view(exchange.size, -1)
        present = exchange.gather(marks, room).T.tolist()
        for row, column in zip(rows, present, strict=True):
            pairs = zip(self._parts.plan.ranks, column, strict=True)
            self._absent[row.index] = tuple(rank for rank, mark in pairs if mark == 0.0)
        return True

    def foretell(self, step: int, reduced: Reduced, ledger: Ledger) -> None:
        """Write down rows that are uneven, each once, before anything is concluded about this check."""
        if any(header.mismatch or header.flag("failed") for header in reduced.headers):
            return
        for row in reduced.rows([index for index in reduced.uneven() if index not in self._foretold]):
            self._foretold.add(row.index)
            ledger.finding(step, presence_finding(self._parts.plan, row, step))

    def complete(self, rows: Sequence[RowObservation]) -> list[RowObservation]:
        """Return `rows` with all absent ranks, where `find_absent` has learned of just these."""
        return [self._completed(row, self._absent.get(row.index, ())) for row in rows]

    @staticmethod
    def _completed(row: RowObservation, absent: tuple[int, ...]) -> RowObservation:
        return replace(row, absent=absent) if row.absent and _ends(absent) == row.absent else row


def _ends(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Lowest and highest of sorted ranks, one if they are the same."""
    return (ranks[0], ranks[-1]) if len(ranks) > 1 else ranks
