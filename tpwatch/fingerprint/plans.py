"""What a list of tensors looks like from outside, and a small memory of what was built for it.

Knows: which properties decide whether a plan is still valid, where elements can be read, and whether
there is anything to read. Must not know: what is in a plan.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Final, Generic, TypeVar

import torch

from tpwatch.errors import UnreadableTensor
from tpwatch.fingerprint.layout import CHUNK

_Plan = TypeVar("_Plan")

Tensors = Sequence["torch.Tensor | None"]

Signature = tuple[object, ...]
"""Which tensors are absent; and of those present, what a plan depends on."""

_KEPT: Final = 8

_WHOLE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_DTYPE: Final = operator.attrgetter("dtype")
_DEVICE: Final = operator.attrgetter("device")
_NBYTES: Final = operator.attrgetter("nbytes")


def extents(tensors: Tensors) -> Signature:
    """Size, order of elements and dtype of each tensor: what a plan that reads in place depends on.

    About 0.3 microseconds a tensor, and 0.1 for `addresses`: cheap enough for every call.
    """
    present = [t for t in tensors if t is not None]
    return (
        [t is None for t in tensors],
        list(map(torch.Tensor.numel, present)),
        list(map(torch.Tensor.is_contiguous, present)),
        list(map(torch.Tensor.is_neg, present)),
        list(map(_DTYPE, present)),
    )


def addresses(tensors: Tensors) -> list[int]:
    """Address of the first element of each tensor; 0 for an absent one."""
    return [0 if t is None else t.data_ptr() for t in tensors]


def shapes(tensors: Tensors) -> Signature:
    """Shape and dtype of each tensor: what a plan that copies the tensors depends on."""
    present = [t for t in tensors if t is not None]
    return [t is None for t in tensors], [t.shape for t in present], list(map(_DTYPE, present))


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


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor; one of raw bytes as integers of their size, because torch cannot copy every packed format."""
    if tensor.is_complex() or (tensor.is_floating_point() and tensor.itemsize > 1):
        return tensor
    return tensor.view(_WHOLE[tensor.itemsize])


def require_memory(tensors: Tensors, device: torch.device) -> None:
    """Make sure that every element of every tensor can be read.

    A trainer frees a storage under the views of it (`storage().resize_(0)`, as when gradient buffers are offloaded), or
    keeps optimizer state on the host: reading there ends the process, in a kernel as well as in torch. About 0.5
    microseconds a tensor: for tensors that have moved, not for every call.

    Raises:
        UnreadableTensor: a storage was freed or is too small, or lies on another device than `device`.
    """
    present = [t for t in tensors if t is not None]
    facts = zip(
        map(_DEVICE, present),
        map(torch.Tensor.is_contiguous, present),
        map(torch.Tensor.data_ptr, present),
        map(torch.Tensor.storage_offset, present),
        map(_NBYTES, present),
        map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, present)),
        strict=True,
    )
    for index, (where, dense, start, offset, size, held) in enumerate(facts):
        # The elements of a dense tensor that fill their storage from its beginning on.
        if dense and start and not offset and size == held and where == device:
            continue
        if size and (reason := _why_unreadable(present[index], device)):
            dtype = str(present[index].dtype).removeprefix("torch.")
            named = f"{dtype} {tuple(present[index].shape)}"
            raise UnreadableTensor(named, reason)


def _why_unreadable(tensor: torch.Tensor, device: torch.device) -> str:
    """What keeps the elements from being read; empty if nothing does."""
    if tensor.device != device:
        return f"it lies on {tensor.device}, not on {device}"
    offset = tensor.storage_offset()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (offset + reach + 1) * tensor.itemsize
    held = tensor.untyped_storage().nbytes()
    if needed > held:
        return f"its storage holds {held} bytes, {needed} are needed"
    return "" if tensor.data_ptr() > offset * tensor.itemsize else "it has no memory of its own"


class Staging:
    """Contiguous buffers for the tensors that a kernel cannot read where they are.

    No reference to a tensor is kept: gradients stay free to go.
    """

    def __init__(self, tensors: Tensors, readable: Callable[[torch.Tensor], bool]) -> None:
        self._buffers = [
            (index, torch.empty(source.numel(), dtype=source.dtype, device=source.device))
            for index, tensor in enumerate(tensors)
            if tensor is not None and not readable(tensor)
            for source in (copyable(tensor),)
        ]

    def places(self, found: list[int]) -> list[int]:
        """Where to read the tensors whose own `addresses` are `found`."""
        places = list(found)
        for index, buffer in self._buffers:
            places[index] = buffer.data_ptr()
        return places

    @torch.no_grad()
    def fill(self, tensors: Tensors) -> None:
        """Copy what must be copied, of tensors with the same extents as at first; autograd must not see it."""
        for index, buffer in self._buffers:
            tensor = tensors[index]
            if tensor is not None:
                buffer.view(tensor.shape).copy_(copyable(tensor))


@dataclass(slots=True)
class _Kept(Generic[_Plan]):
    """A plan, what it is for, and the addresses that it was last pointed at."""

    out: int
    signature: Signature
    plan: _Plan
    seen: list[int] | None = None


class Plans(Generic[_Plan]):
    """Plans by the buffer they fill and by the signature of the tensors.

    Each observation point has its own buffer, and may see one list of tensors at one call and another at the next: the
    chunks of a virtual pipeline, gradients that come and go. The plan not used for longest is forgotten.
    """

    def __init__(
        self,
        device: torch.device,
        build: Callable[[Tensors], _Plan],
        point: Callable[[_Plan, list[int]], None] = lambda _plan, _found: None,
    ) -> None:
        """Start without plans.

        Args:
            device: where all tensors must lie.
            build: makes a plan.
            point: tells a plan where its tensors lie now (their `addresses`).
        """
        self._device = device
        self._build = build
        self._point = point
        self._kept: list[_Kept[_Plan]] = []
        """The one used last is the last."""

    def get(self, out: torch.Tensor, tensors: Tensors, signature: Signature, found: list[int]) -> _Plan:
        """Return the plan for these tensors, pointed at them.

        What lies where it lay when the plan was last used can be read still: a storage that is freed or moved takes its
        address along.

        Args:
            out: the rows to fill.
            tensors: to be read.
            signature: all that a plan depends on but addresses.
            found: their `addresses`.

        Raises:
            UnreadableTensor: as `require_memory`.
        """
        kept = self._recall(out.data_ptr(), signature)
        seen = kept.seen if kept else None
        if kept and seen == found:
            return kept.plan
        moved = tensors if seen is None else list(compress(tensors, map(operator.ne, found, seen)))
        require_memory(moved, self._device)
        kept = kept or self._remember(_Kept(out.data_ptr(), signature, self._build(tensors)))
        kept.seen = None  # should the plan be left half way, it holds nothing to go by
        self._point(kept.plan, found)
        kept.seen = found
        return kept.plan

    def _recall(self, out: int, signature: Signature) -> _Kept[_Plan] | None:
        """Find what was kept, and move it to the end."""
        for index in range(len(self._kept) - 1, -1, -1):
            kept = self._kept[index]
            if kept.out == out and kept.signature == signature:
                self._kept.append(self._kept.pop(index))
                return kept
        return None

    def _remember(self, kept: _Kept[_Plan]) -> _Kept[_Plan]:
        self._kept = [*self._kept[1 - _KEPT :], kept]
        return kept
