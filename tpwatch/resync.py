"""Making copies equal again that were found apart: an intervention that changes training, off unless asked for.

Each tensor is gathered piece by piece, and every rank computes the same result from the same pieces in the same order:
the copies are bit-identical afterwards whatever the collective library does. Optimizer state goes with the value: from
unequal moments or masters the next update would part the copies again. Knows tensors and one process group; which
replicas are meant is decided by the caller, from reduced data, alike on every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from tpwatch._guard import say
from tpwatch.act import doubled, listed
from tpwatch.alike import LABELS, Alike, held
from tpwatch.config import Config
from tpwatch.handshake import AT_ONCE
from tpwatch.ledger import Ledger
from tpwatch.parts import Parts
from tpwatch.records import Finding

_NAMED = 5
"""Parameters that a line names."""

PIECE = 4 * 2**20
"""Bytes of a tensor that are gathered at a time. There are as many copies as ranks of so much for a moment, and for a
mean of 16-bit numbers four times that."""


class Resync:
    """Makes replicas of one group equal, in value and optimizer state."""

    def __init__(self, parts: Parts, config: Config, ledger: Ledger) -> None:
        """`resync: rank0` takes the copy of the group's first rank, `mean` the mean, rounded to the tensor's dtype."""
        self._parts = parts
        self._mean = config.resync == "mean"
        self._ledger = ledger
        self._alike = Alike(parts, ledger.guard)
        self._sizes = torch.zeros(2, len(parts.plan.replicas) * len(LABELS), dtype=torch.float64, device=parts.device)
        self._times = 0
        self._failed: Sequence[str] = ()

    def mend(self, step: int, apart: Sequence[int], findings: Sequence[Finding]) -> None:
        """Make those replicas equal that are `apart` (rows of the plan) and of which there is a finding.

        Collectives over the group, once every rank has said through the store that it comes to them: one that failed
        on the way here would be waited for. A tensor that some rank does not have is left alone on all, and so is one
        whose result would not be finite. What was done is logged and noted.
        """
        names, replicas = {finding.parameter for finding in findings}, self._parts.plan.replicas
        rows = [row for row in apart if replicas[row].name in names]
        if not rows or self._parts.assembly.agree_to("resync", AT_ONCE):
            return
        ready = self._ledger.guard.attempt("preparing a resync", self._prepare, rows).value
        pairs, room = ready or ([None] * (len(rows) * len(LABELS)), self._sizes)
        for pair, everywhere in zip(pairs, self._everywhere(pairs), strict=True):
            if pair is not None and everywhere:
                self._level(*pair, room)
        self._say(step, [replicas[row].name for row in rows])

    def _say(self, step: int, names: Sequence[str]) -> None:
        """Log and note what became of the parameters `names`: whenever that has doubled, or is not as it was."""
        left = self._alike.differing()
        failed = [name for name in names if left is None or name in left]
        self._times += 1
        if doubled(self._times) or failed != self._failed:
            how = "the mean over ranks" if self._mean else f"the copy of rank {self._parts.plan.ranks[0]}"
            text = f"resync {self._times}, which changes training: {listed(names, _NAMED)} set to {how}"
            text += f"; still not equal: {listed(failed, _NAMED)}" if failed else "; equal by hash"
            self._ledger.note(step, text)
            if self._parts.group_rank == 0:
                say(logging.ERROR if failed else logging.WARNING, "tpwatch: step %d: %s", step, text)
        self._failed = failed

    def _prepare(self, rows: Sequence[int]) -> tuple[list[tuple[torch.Tensor, torch.Tensor] | None], torch.Tensor]:
        """Memory, taken before anyone relies on it: each tensor with its elements in order, and room for a piece."""
        everything = held(self._parts)
        tensors = [tensor for row in rows for tensor in everything[row]]
        pairs = [None if t is None else (t.detach(), t.detach().contiguous()) for t in tensors]
        piece = min(PIECE, max(_nbytes(pair) for pair in pairs))
        return pairs, torch.empty(self._parts.exchange.size * piece, dtype=torch.uint8, device=self._parts.device)

    def _everywhere(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor] | None]) -> list[bool]:
        """Which tensors every rank has, with the same number of bytes: nothing else may be gathered."""
        sizes = [float(_nbytes(pair)) for pair in pairs]
        self._sizes[:, : len(pairs)].copy_(torch.tensor([sizes, [-size for size in sizes]], dtype=torch.float64))
        self._parts.exchange.reduce_max(self._sizes)  # the whole of it: a part would need memory, now that others wait
        high, low = self._sizes[:, : len(pairs)].tolist()
        return [most > 0 and most == -least for most, least in zip(high, low, strict=True)]

    @torch.no_grad()
    def _level(self, tensor: torch.Tensor, flat: torch.Tensor, room: torch.Tensor) -> None:
        ranks = self._parts.exchange.size
        for piece in flat.view(-1).view(torch.uint8).split(PIECE):
            copies = self._parts.exchange.gather(piece, room[: ranks * piece.numel()].view(ranks, -1))
            # What fails here fails on this rank alone, and is seen by hash: the others go on with the next piece.
            self._ledger.guard.attempt("a resync", self._set, piece, copies.view(tensor.dtype))
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat)

    def _set(self, piece: torch.Tensor, copies: torch.Tensor) -> None:
        result = copies.double().mean(0).to(copies.dtype) if self._mean else copies[0]
        if bool(result.double().isfinite().all()):
            piece.copy_(result.view(torch.uint8))


def _nbytes(pair: tuple[torch.Tensor, torch.Tensor] | None) -> int:
    return 0 if pair is None else pair[0].numel() * pair[0].element_size()
