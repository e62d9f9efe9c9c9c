"""Are the copies of every replica one, in value and in optimizer state? Asked now and then, not every step.

One all-reduce of hashes. Knows the columns of a hash and what an optimizer keeps (`STATES`), not what follows from a
difference.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tpwatch._guard import Guard
from tpwatch.fingerprint.layout import ROW
from tpwatch.parts import STATES, Parts

VALUE = "value"
LABELS = (VALUE, *STATES)

Differing = Mapping[str, tuple[str, ...]]
"""By parameter: which of `LABELS` are not the same, bit for bit, on all ranks of the group."""

_FAILED, _HASH = 0, 2


def differing(parts: Parts, guard: Guard) -> Differing | None:
    """Compare all replicas over the group. A collective; the same answer on every rank.

    None if some rank could not compute its hashes: it joins all the same, and says so.
    """
    tensors = len(parts.plan.replicas) * len(LABELS)
    buffer = torch.zeros(2, 1 + _HASH * tensors, dtype=torch.float64, device=parts.device)
    packed = guard.attempt("comparing optimizer state", _pack, parts, buffer[0, 1:].view(tensors, _HASH))
    buffer[0, _FAILED] = 0.0 if packed.ok else 1.0
    torch.neg(buffer[0], out=buffer[1])
    parts.exchange.reduce_max(buffer)
    high, low = buffer.cpu()
    if high[_FAILED] > 0:
        return None
    apart = (high[1:] != -low[1:]).view(-1, len(LABELS), _HASH).any(2).tolist()
    rows = zip(parts.plan.replicas, apart, strict=True)
    return {replica.name: _named(marks) for replica, marks in rows if any(marks)}


def _pack(parts: Parts, hashes: torch.Tensor) -> None:
    """Hash value and states of every replica. What a rank lacks gives zeros: equal only if all ranks lack it."""
    replicas = zip(parts.source.values(), parts.source.states(), strict=True)
    tensors = [tensor for value, states in replicas for tensor in (value, *states)]
    rows = torch.zeros(len(tensors), ROW, dtype=torch.float64, device=parts.device)
    parts.fingerprinter.rows(tensors, rows)
    hashes.copy_(rows[:, :_HASH])


def _named(marks: list[bool]) -> tuple[str, ...]:
    return tuple(label for label, mark in zip(LABELS, marks, strict=True) if mark)
