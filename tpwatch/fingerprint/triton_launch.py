"""Plans and launches of the Triton kernels: the GPU `Fingerprinter`.

Knows: which program of which kernel works on what, and how to get a pointer table to the device
without making the host wait. Must not know: how a kernel computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from tpwatch.fingerprint import triton_kernels as kernels
from tpwatch.fingerprint.layout import HEAD
from tpwatch.fingerprint.plans import (
    Plans,
    Staging,
    Tensors,
    addresses,
    chunks,
    describe,
    extents,
    lies_in_order,
)
from tpwatch.fingerprint.tables import make_tables

_KINDS: Final = {
    torch.float32: kernels.FLOAT32.value,
    torch.bfloat16: kernels.BFLOAT16.value,
    torch.float16: kernels.FLOAT16.value,
    torch.float64: kernels.FLOAT64.value,
}
_VECTOR_BYTES: Final = 16


def check() -> tuple[bool, str]:
    """Return (usable, why): the kernels are written for NVIDIA devices."""
    if torch.version.cuda is None:
        return False, "needs a torch built for NVIDIA devices"
    return True, f"one-pass GPU kernel, triton {kernels.VERSION}"


@dataclass(frozen=True, slots=True)
class _Launch:
    """One launch of `chunk_kernel`.

    Attributes:
        kind: of element.
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
class _Spans:
    """What a launch of `fold_kernel` or `finish_kernel` adds up: `counts` rows from `starts` on.

    Attributes:
        starts: int32 (programs,).
        counts: int32 (programs,).
        hashes: int64 (rows,).
        partials: float64 (rows, PARTS).
    """

    starts: torch.Tensor
    counts: torch.Tensor
    hashes: torch.Tensor
    partials: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Plan:
    """All launches for one list of tensors, with everything they need on the device.

    Attributes:
        staging: buffers of the tensors that the kernel cannot read in place.
        addresses: int64 (tensors,).
        numels: int64 (tensors,).
        length_keys: int64 (tensors,).
        launches: of `chunk_kernel`.
        groups: chunks that `fold_kernel` adds up, per group.
        tensors: groups that `finish_kernel` adds up, per tensor.
    """

    staging: Staging
    addresses: torch.Tensor
    numels: torch.Tensor
    length_keys: torch.Tensor
    launches: list[_Launch]
    groups: _Spans
    tensors: _Spans


class TritonFingerprinter:
    """Fingerprints by the kernels of `triton_kernels.py`, on the current stream."""

    name = "triton"

    def __init__(self, device: torch.device | str, reason: str) -> None:
        """Derive the keys for `device`; `reason` says why this implementation was chosen."""
        self.reason = reason
        self._device = torch.device(device)
        self._tables = make_tables(device)
        self._keys = (self._tables.v0.int(), self._tables.v1.int(), self._tables.u)
        self._sign_columns = (self._tables.sign_columns(1), self._tables.sign_columns(2))
        self._chunk_keys = self._tables.chunk_keys(0, 0)
        self._fold_words = self._tables.fold_words(0, 0)
        self._plans: Plans[_Plan] = Plans(self._tables.device, self._make_plan, self._point)

    def rows(self, tensors: Tensors, out: torch.Tensor, head: torch.Tensor | None = None) -> None:
        """Write one row per tensor; see `Fingerprinter.rows`. Does not wait for the device."""
        if not tensors:
            return
        found = addresses(tensors)
        signature = (*extents(tensors), [a % _VECTOR_BYTES for a in found])
        plan = self._plans.get(out, tensors, signature, found)
        plan.staging.fill(tensors)
        for launch in plan.launches:
            self._hash_chunks(plan, launch)
        self._add_up(plan, out, head)

    def _hash_chunks(self, plan: _Plan, launch: _Launch) -> None:
        """Launch `chunk_kernel` over all chunks of one kind."""
        kernels.chunk_kernel[(launch.tensor_of.numel(),)](
            plan.addresses,
            plan.numels,
            launch.tensor_of,
            launch.chunk_of,
            *self._keys,
            self._chunk_keys,
            self._fold_words,
            self._sign_columns[launch.item == 2],  # noqa: PLR2004 - pairs of 16-bit elements
            self._tables.sign_bits,
            launch.hashes,
            launch.partials,
            KIND=launch.kind,
            ITEM=launch.item,
            UNROLL=kernels.UNROLL,
            **kernels.OPTIONS,
        )

    def _add_up(self, plan: _Plan, out: torch.Tensor, head: torch.Tensor | None) -> None:
        """Launch `fold_kernel` and `finish_kernel`."""
        groups, spans = plan.groups, plan.tensors
        if groups.starts.numel():
            kernels.fold_kernel[(groups.starts.numel(),)](
                groups.starts,
                groups.counts,
                groups.hashes,
                groups.partials,
                spans.hashes,
                spans.partials,
                **kernels.SUM_OPTIONS,
            )
        kernels.finish_kernel[(spans.starts.numel(),)](
            spans.starts,
            spans.counts,
            plan.length_keys,
            spans.hashes,
            spans.partials,
            out,
            out if head is None else head,
            0 if head is None else head.stride(0),
            HEADS=0 if head is None else HEAD,
            **kernels.SUM_OPTIONS,
        )

    def _point(self, plan: _Plan, found: list[int]) -> None:
        """Send the addresses after the launches that still read the old ones."""
        places = self._upload(plan.staging.places(found), torch.int64)
        plan.addresses.copy_(places, non_blocking=True)

    def _make_plan(self, tensors: Tensors) -> _Plan:
        """Number the chunks and groups, and place all tables on the device."""
        sources = [describe(t) for t in tensors]
        counts = [chunks(numel) for numel, _ in sources]
        self._need_chunks(max(counts))
        first_rows, launches, hashes, partials = self._number_chunks(sources, counts)
        group_starts: list[int] = []
        group_counts: list[int] = []
        tensor_starts: list[int] = []
        fold = kernels.FOLD.value
        for first, count in zip(first_rows, counts, strict=True):
            tensor_starts.append(len(group_starts))
            group_starts += range(first, first + count, fold)
            group_counts += [min(fold, count - at) for at in range(0, count, fold)]
        per_tensor = [-(-count // fold) for count in counts]
        keys = [
            0 if t is None else self._tables.length_key(numel * dtype.itemsize)
            for t, (numel, dtype) in zip(tensors, sources, strict=True)
        ]
        return _Plan(
            Staging(tensors, _readable),
            torch.zeros(len(sources), dtype=torch.int64, device=self._device),
            self._upload([numel for numel, _ in sources], torch.int64),
            self._upload(keys, torch.int64),
            launches,
            _Spans(self._upload(group_starts), self._upload(group_counts), hashes, partials),
            _Spans(
                self._upload(tensor_starts),
                self._upload(per_tensor),
                *self._room(len(group_starts)),
            ),
        )

    def _number_chunks(
        self, sources: list[tuple[int, torch.dtype]], counts: list[int]
    ) -> tuple[list[int], list[_Launch], torch.Tensor, torch.Tensor]:
        """Give every chunk its row, kind by kind.

        Returns:
            First row of each tensor, the launches, and the hashes and partial rows of all chunks.
        """
        kinds: dict[tuple[int, int], list[int]] = {}
        for index, (numel, dtype) in enumerate(sources):
            if numel:
                key = (_KINDS.get(dtype, kernels.BYTES.value), dtype.itemsize)
                kinds.setdefault(key, []).append(index)
        first_rows = [0] * len(sources)
        begins: list[tuple[int, int]] = []
        row = 0
        for members in kinds.values():
            row += row % 2  # keeps the hashes of every launch 16-byte aligned
            begin = row
            for index in members:
                first_rows[index] = row
                row += counts[index]
            begins.append((begin, row))
        hashes, partials = self._room(row)
        launches = [
            _Launch(
                kind,
                item,
                self._upload([i for i in members for _ in range(counts[i])]),
                self._upload([c for i in members for c in range(counts[i])]),
                hashes[begin:end],
                partials[begin:end],
            )
            for ((kind, item), members), (begin, end) in zip(kinds.items(), begins, strict=True)
        ]
        return first_rows, launches, hashes, partials

    def _need_chunks(self, count: int) -> None:
        """Make keys for tensors of up to `count` chunks."""
        if count > self._chunk_keys.numel():
            self._chunk_keys = self._tables.chunk_keys(0, count)
            self._fold_words = self._tables.fold_words(0, count)

    def _room(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Hashes and partial rows; those of raw bytes are never written and stay zero."""
        return (
            torch.zeros(rows, dtype=torch.int64, device=self._device),
            torch.zeros(rows, kernels.PARTS.value, dtype=torch.float64, device=self._device),
        )

    def _upload(self, values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Return a table on the device; from pinned memory, so that the host does not wait."""
        table = torch.tensor(values, dtype=dtype)
        if self._device.type == "cpu":
            return table
        return table.pin_memory().to(self._device, non_blocking=True)


def _readable(tensor: torch.Tensor) -> bool:
    """Whether the kernel can read the tensor in place, 16 bytes at a time."""
    return lies_in_order(tensor) and tensor.data_ptr() % _VECTOR_BYTES == 0
