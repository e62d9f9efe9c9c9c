"""What a list of tensors looks like from outside, and a small memory of what was built for it.

Knows: which properties decide whether a plan is still valid, and where elements can be read. Must
not know: what is in a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

import torch

from tpwatch.fingerprint.layout import CHUNK

_Plan = TypeVar("_Plan")

Tensors = Sequence["torch.Tensor | None"]

Signature = tuple[object, ...]
"""Per tensor: whether it is absent; and of those present, what a plan depends on."""

_KEPT: Final = 8


def extents(tensors: Tensors) -> Signature:
    """Size, contiguity and dtype of each tensor: what a plan that reads in place depends on.

    About 0.2 microseconds a tensor, and as much for `addresses`: cheap enough for every call.
    """
    present = [t for t in tensors if t is not None]
    return (
        [t is None for t in tensors],
        list(map(torch.Tensor.numel, present)),
        list(map(torch.Tensor.is_contiguous, present)),
        [t.dtype for t in present],
    )


def addresses(tensors: Tensors) -> list[int]:
    """Address of the first element of each tensor; 0 for an absent one."""
    return [0 if t is None else t.data_ptr() for t in tensors]


def shapes(tensors: Tensors) -> Signature:
    """Shape and dtype of each tensor: what a plan that copies the tensors depends on."""
    present = [t for t in tensors if t is not None]
    return [t is None for t in tensors], [t.shape for t in present], [t.dtype for t in present]


def describe(tensor: torch.Tensor | None) -> tuple[int, torch.dtype]:
    """Number and dtype of the elements as they are hashed: a complex one counts as two reals."""
    if tensor is None:
        return 0, torch.uint8
    if tensor.is_complex():
        return 2 * tensor.numel(), tensor.dtype.to_real()
    return tensor.numel(), tensor.dtype


def chunks(numel: int) -> int:
    """Chunks that `numel` elements make."""
    return -(-numel // CHUNK)


def lies_in_order(tensor: torch.Tensor) -> bool:
    """Whether memory holds the elements in logical order and as they are meant."""
    return tensor.is_contiguous() and not tensor.is_complex() and not tensor.is_neg()


class Staging:
    """Contiguous buffers for the tensors that a kernel cannot read where they are.

    No reference to a tensor is kept: gradients stay free to go.
    """

    def __init__(self, tensors: Tensors, readable: Callable[[torch.Tensor], bool]) -> None:
        self._buffers = [
            (index, torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device))
            for index, tensor in enumerate(tensors)
            if tensor is not None and not readable(tensor)
        ]
        self._seen: list[int] = []

    def refresh(self, tensors: Tensors, found: list[int]) -> list[int] | None:
        """Bring the buffers up to date; return where to read, or None if that is where it was.

        Args:
            tensors: as given to the constructor, or others with the same extents.
            found: their `addresses`.
        """
        if self._buffers:
            self._copy(tensors)
        if found == self._seen:
            return None
        self._seen = found
        places = list(found)
        for index, buffer in self._buffers:
            places[index] = buffer.data_ptr()
        return places

    @torch.no_grad()
    def _copy(self, tensors: Tensors) -> None:
        """Copy what must be copied; autograd must not see it."""
        for index, buffer in self._buffers:
            source = tensors[index]
            if source is not None:
                buffer.copy_(source)


class Plans(Generic[_Plan]):
    """Plans by the address of the rows they fill: each observation point has its own buffer.

    A plan is rebuilt when the signature of its tensors has changed; the oldest of more than a few
    is forgotten.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Signature, _Plan]] = {}

    def get(self, out: torch.Tensor, signature: Signature, build: Callable[[], _Plan]) -> _Plan:
        """Return the plan for the tensors with this signature, built anew if it changed."""
        key = out.data_ptr()
        kept = self._kept.get(key)
        if kept is not None and kept[0] == signature:
            return kept[1]
        self._kept.pop(key, None)
        plan = build()
        self._kept[key] = (signature, plan)
        if len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]
        return plan
