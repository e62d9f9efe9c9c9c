"""Plans and launches of the Triton kernels: the GPU `Fingerprinter`.

Knows: which program of which kernel works on what, and how to get a pointer table to the device
without making the host wait. Must not know: how a kernel computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from tpwatch.fingerprint import triton_kernels as kernels
from tpwatch.fingerprint.layout import CHUNK, HEAD, SKETCH
from tpwatch.fingerprint.plans import Plans, placement
from tpwatch.fingerprint.reference import flat
from tpwatch.fingerprint.tables import make_tables

_KINDS: Final = {
    torch.float32: kernels.FLOAT32.value,
    torch.bfloat16: kernels.BFLOAT16.value,
    torch.float16: kernels.FLOAT16.value,
    torch.float64: kernels.FLOAT64.value,
}
_ALIGNMENT: Final = 16
_UNROLL: Final = 2


def check(device: torch.device | str) -> tuple[bool, str]:
    """Return (usable, why): the kernels are written for NVIDIA devices."""
    kind = torch.device(device).type
    if kind != "cuda" or torch.version.cuda is None:
        return False, f"needs an NVIDIA device, not {kind}"
    return True, f"one-pass GPU kernel, triton {kernels.VERSION}"


@dataclass(frozen=True, slots=True)
class _Launch:
    """One launch of `chunk_kernel`.

    Attributes:
        kind: of element; `item` is its size in bytes.
        item: bytes of an element.
        tensor_of: int32 (programs,).
        chunk_of: int32 (programs,).
        hashes: int64 (programs,), where the hashes go.
        partials: float64 (programs, PARTS), where the partial rows go.
    """

    kind: int
    item: int
    tensor_of: torch.Tensor
    chunk_of: torch.Tensor
    hashes: torch.Tensor
    partials: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Sums:
    """What one launch of `fold_kernel` or `finish_kernel` adds up: rows `starts` ... + `counts`."""

    starts: torch.Tensor
    counts: torch.Tensor
    hashes: torch.Tensor
    partials: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Plan:
    """All launches for one list of tensors, with everything they need on the device.

    Attributes:
        addresses: int64 (tensors,).
        numels: int64 (tensors,).
        length_keys: int64 (tensors,).
        copies: (index, buffer) of the tensors the kernel cannot read in place.
        launches: of `chunk_kernel`.
        chunks: rows that `fold_kernel` adds up.
        groups: rows that `finish_kernel` adds up; what `fold_kernel` writes.
    """

    addresses: torch.Tensor
    numels: torch.Tensor
    length_keys: torch.Tensor
    copies: list[tuple[int, torch.Tensor]]
    launches: list[_Launch]
    chunks: _Sums
    groups: _Sums


class TritonFingerprinter:
    """Fingerprints by the kernels of `triton_kernels.py`, on the current stream."""

    name = "triton"

    def __init__(self, device: torch.device | str, reason: str) -> None:
        """Derive the keys for `device`; `reason` says why this implementation was chosen."""
        self.reason = reason
        self._device = torch.device(device)
        self._tables = tables = make_tables(device)
        self._keys = (tables.v0.to(torch.int32), tables.v1.to(torch.int32), tables.u)
        self._chunk_keys = (tables.chunk_keys(0, 0), tables.fold_words(0, 0))
        self._columns = {1: tables.sign_bits.to(torch.int32), 4: tables.sign_columns(1)}
        self._columns[2] = tables.sign_columns(2)
        self._columns[8] = self._columns[1]
        self._plans: Plans[_Plan] = Plans()

    @torch.no_grad()
    def rows(
        self,
        tensors: Sequence[torch.Tensor | None],
        out: torch.Tensor,
        head: torch.Tensor | None = None,
    ) -> None:
        """Write one row per tensor; see `Fingerprinter.rows`. Does not wait for the device."""
        if not tensors:
            return
        plan = self._plans.get(out, placement(tensors), lambda: self._make_plan(tensors))
        for index, buffer in plan.copies:
            source = tensors[index]
            if source is not None:
                buffer.copy_(source)
        for launch in plan.launches:
            self._launch(plan, launch)
        _fold(plan)
        _finish(plan, out, head)

    def _launch(self, plan: _Plan, launch: _Launch) -> None:
        """Launch `chunk_kernel` over all chunks of one kind."""
        kernels.chunk_kernel[(len(launch.tensor_of),)](
            plan.addresses,
            plan.numels,
            launch.tensor_of,
            launch.chunk_of,
            *self._keys,
            *self._chunk_keys,
            self._columns[launch.item],
            self._tables.sign_bits,
            launch.hashes,
            launch.partials,
            KIND=launch.kind,
            ITEM=launch.item,
            UNROLL=_UNROLL,
            **kernels.OPTIONS,
        )

    def _make_plan(self, tensors: Sequence[torch.Tensor | None]) -> _Plan:
        """Number the chunks and place all tables on the device."""
        elements, copies = _readable(tensors)
        chunk_counts = [-(-e.numel() // CHUNK) for e in elements]
        self._need_chunks(max(chunk_counts, default=0))
        first_chunk, launches = self._chunk_launches(elements, chunk_counts)
        room = launches[-1] if launches else None
        del room
        keys = [
            0 if t is None else self._tables.length_key(e.numel() * e.element_size())
            for t, e in zip(tensors, elements, strict=True)
        ]
        raise RuntimeError((first_chunk, keys, copies))


def _readable(
    tensors: Sequence[torch.Tensor | None],
) -> tuple[list[torch.Tensor], list[tuple[int, torch.Tensor]]]:
    return [], []
