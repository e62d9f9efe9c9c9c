"""Making copies equal again that were found apart: an intervention that changes training, off unless asked for.

Each tensor is gathered piece by piece, and every rank computes the same result from the same pieces in the same order:
the copies are bit-identical afterwards whatever the collective library does. Optimizer state goes with the value: from
unequal moments or masters the next update would part the copies again. Knows tensors and one process group; which
replicas are meant is decided by the caller, from reduced data, alike on every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import torch

from tpwatch.alike import LABELS, Alike
from tpwatch.ledger import Ledger
from tpwatch.parts import Parts
from tpwatch.records import Finding

logger = logging.getLogger("tpwatch")

_NAMED = 5
"""Parameters that a line names."""

PIECE = 16 * 2**20
"""Bytes of a tensor that are gathered at a time: of so much there are as many copies as ranks for a moment."""


class Resync:
    """Makes replicas of one group equal, in value and optimizer state."""

    def __init__(self, parts: Parts, how: Literal["rank0", "mean"], ledger: Ledger) -> None:
        """`rank0`: the copy of the group's first rank; `mean`: the mean over ranks, rounded to the tensor's dtype."""
        self._parts = parts
        self._mean = how == "mean"
        self._ledger = ledger
        self._alike = Alike(parts, ledger.guard)

    def mend(self, step: int, apart: Sequence[int], findings: Sequence[Finding]) -> None:
        """Make those replicas equal that are `apart` (rows of the plan) and of which there is a finding.

        Collectives over the group: every rank calls it with the same rows. A tensor that some rank does not have is
        left alone on all. What was done is logged and noted.
        """
        names, replicas = {finding.parameter for finding in findings}, self._parts.plan.replicas
        rows = [row for row in apart if replicas[row].name in names]
        if not rows:
            return
        ready = self._ledger.guard.attempt("preparing a resync", self._prepare, rows).value
        tensors, room = ready or ([None] * (len(rows) * len(LABELS)), torch.empty(0))
        for tensor, everywhere in zip(tensors, self._everywhere(tensors), strict=True):
            if tensor is not None and everywhere:
                self._level(tensor.detach(), room)
        self._ledger.note(step, self._say([replicas[row].name for row in rows]))

    def _say(self, names: Sequence[str]) -> str:
        """Log and return what became of the parameters `names`."""
        left = self._alike.differing()
        failed = [name for name in names if left is None or name in left]
        how = "the mean over ranks" if self._mean else f"the copy of rank {self._parts.plan.ranks[0]}"
        text = f"resync, which changes training: {len(names)} parameters set to {how}: {', '.join(names[:_NAMED])}"
        text += f"; still not equal: {', '.join(failed[:_NAMED])}" if failed else "; equal by hash"
        if self._parts.group_rank == 0:
            logger.log(logging.ERROR if failed else logging.WARNING, "tpwatch: %s", text)
        return text

    def _prepare(self, rows: Sequence[int]) -> tuple[list[torch.Tensor | None], torch.Tensor]:
        """The tensors of the replicas `rows`, and memory for a piece of each rank: taken before anyone relies on it."""
        values, states = self._parts.source.values(), self._parts.source.states()
        tensors = [tensor for row in rows for tensor in (values[row], *states[row])]
        piece = min(PIECE, max(_nbytes(tensor) for tensor in tensors))
        return tensors, torch.empty(self._parts.exchange.size * piece, dtype=torch.uint8, device=self._parts.device)

    def _everywhere(self, tensors: Sequence[torch.Tensor | None]) -> list[bool]:
        """Which tensors every rank has, with the same number of bytes: nothing else may be gathered."""
        sizes = [_nbytes(tensor) for tensor in tensors]
        both = torch.tensor([sizes, [-size for size in sizes]], dtype=torch.float64, device=self._parts.device)
        self._parts.exchange.reduce_max(both)
        high, low = both.tolist()
        return [most > 0 and most == -least for most, least in zip(high, low, strict=True)]

    @torch.no_grad()
    def _level(self, tensor: torch.Tensor, room: torch.Tensor) -> None:
        flat = tensor if tensor.is_contiguous() else tensor.contiguous()
        for piece in flat.view(-1).view(torch.uint8).split(PIECE):
            ranks = self._parts.exchange.size
            copies = self._parts.exchange.gather(piece, room[: ranks * piece.numel()].view(ranks, -1))
            # What fails here fails on this rank alone, and is seen by hash: the others go on with the next piece.
            self._ledger.guard.attempt("a resync", self._set, piece, copies.view(tensor.dtype))
        if flat is not tensor:
            tensor.copy_(flat)

    def _set(self, piece: torch.Tensor, copies: torch.Tensor) -> None:
        result = copies.double().mean(0).to(copies.dtype) if self._mean else copies[0]
        piece.copy_(result.view(torch.uint8))


def _nbytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()
