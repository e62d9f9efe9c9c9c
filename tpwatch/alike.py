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


class Alike:
    """Compares all replicas of one group. Its memory is taken when it is built: none is needed to join the others."""

    def __init__(self, parts: Parts, guard: Guard) -> None:
        """Nothing is compared yet."""
        tensors = len(parts.plan.replicas) * len(LABELS)
        self._parts = parts
        self._guard = guard
        self._rows = torch.zeros(tensors, ROW, dtype=torch.float64, device=parts.device)
        self._buffer = torch.zeros(2, 1 + _HASH * tensors, dtype=torch.float64, device=parts.device)

    def differing(self) -> Differing | None:
        """What differs. A collective over the group; the same answer on every rank.

        None if some rank could not compute its hashes: it joins all the same, and says so.
        """
        packed = self._guard.attempt("comparing optimizer state", self._pack)
        if not packed.ok:
            self._buffer.zero_()
        self._buffer[0, _FAILED] = 0.0 if packed.ok else 1.0
        torch.neg(self._buffer[0], out=self._buffer[1])
        self._parts.exchange.reduce_max(self._buffer)
        high, low = self._buffer.cpu()
        if high[_FAILED] > 0:
            return None
        apart = (high[1:] != -low[1:]).view(-1, len(LABELS), _HASH).any(2).tolist()
        rows = zip(self._parts.plan.replicas, apart, strict=True)
        return {replica.name: _named(marks) for replica, marks in rows if any(marks)}

    def _pack(self) -> None:
        """Hash value and states of every replica. What a rank lacks gives zeros: equal only if all ranks lack it."""
        self._parts.fingerprinter.rows([t for kept in held(self._parts) for t in kept], self._rows)
        self._buffer[0, 1:].view(-1, _HASH).copy_(self._rows[:, :_HASH])


def held(parts: Parts) -> list[tuple[torch.Tensor | None, ...]]:
    """What this rank holds of every replica, each as in `LABELS`.

    State that an optimizer keeps on the host, away from the values, counts as none: it is not compared.
    """

    def near(state: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor | None:
        return state if state is not None and state.device == value.device else None

    replicas = zip(parts.source.values(), parts.source.states(), strict=True)
    return [(value, *(near(state, value) for state in states)) for value, states in replicas]


def _named(marks: list[bool]) -> tuple[str, ...]:
    return tuple(label for label, mark in zip(LABELS, marks, strict=True) if mark)
