"""Plain torch in batches: the fallback wherever neither Triton nor the compiled kernel runs.

Knows: how to lay many tensors of one dtype side by side in one buffer, so that a fixed number of
torch calls serves a batch. Must not know: the keys' origin, or who needs the rows.

Tensors are cut into chunks; each piece starts at a whole row and a whole block of 1,024 elements
of a zeroed buffer of a MB or a few that every batch shares. Integer columns equal the reference bit for
bit. Squares and sketch sums are taken in float32: |l2 - exact| <= 2**-16 exact. A block whose squares overflow or
vanish, or that holds a non-finite element, is divided by its largest magnitude first; so is every block of float64,
which is summed in float64, and every one on another device than the CPU, where looking first would make the host wait.
Every reduction has a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import torch

from tpwatch.fingerprint.layout import (
    CHUNK,
    FINE,
    GROUP,
    HEAD,
    L2_MAX,
    ROW,
    ROW_BYTES,
    ROW_WORDS,
    SKETCH,
)
from tpwatch.fingerprint.pieces import (
    BLOCK,
    Piece,
    batches_of,
    blocks_of,
    count_up,
    hashed_rows,
    used_bytes,
)
from tpwatch.fingerprint.plans import Plans, Tensors, addresses, copyable, shapes
from tpwatch.fingerprint.reference import VALUE_DTYPES, flat
from tpwatch.fingerprint.tables import make_tables

_LARGEST_NORM: Final = 2.0**63
_SMALLEST_NORM: Final = 2.0**-45
"""Between them the square of a norm, and the squares that matter to it, are ordinary float32 numbers."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Pieces of one dtype that are handled together.

    Attributes:
        dtype: of the pieces.
        pieces: in the order of the buffer.
        first: number of the first piece among the pieces of all batches.
        slots: where each piece goes, shaped like what is copied there.
        used: the bytes of the buffer that hold them.
        row_piece: int64 (rows,): piece of each 4,096-byte row.
        row_keys: int64 (rows,): U[row of chunk] * A(chunk).
        sizes: float64 (pieces,): elements in each piece.
        blocks: int64 (pieces,): blocks of 1,024 elements in each piece.
        block_row: int64 (blocks,): number of each block inside its chunk.
        chunk: int64 (pieces,): chunk of each piece.
        each: blocks of each piece if all have as many, else 0.
    """

    dtype: torch.dtype
    pieces: list[Piece]
    first: int
    slots: list[torch.Tensor]
    used: torch.Tensor
    row_piece: torch.Tensor
    row_keys: torch.Tensor
    sizes: torch.Tensor
    blocks: torch.Tensor
    block_row: torch.Tensor
    chunk: torch.Tensor
    each: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """All batches for one list of tensors, and where the results of the pieces meet.

    Attributes:
        batches: in order.
        hashes: int64 (pieces,): hash of each piece.
        parts: float64 (pieces, ROW - 2): its other columns.
        order: int64 (pieces,): the pieces of one tensor side by side, tensor by tensor.
        counts: int64 (tensors,): pieces of each tensor.
        piece_tensor: int64 (pieces,): tensor of each piece.
        length_keys: int64 (tensors,): what the byte length adds to the hash.
        rho: float64 (chunks, FINE, SKETCH): fold signs of every chunk that occurs.
    """

    batches: list[_Batch]
    hashes: torch.Tensor
    parts: torch.Tensor
    order: torch.Tensor
    counts: torch.Tensor
    piece_tensor: torch.Tensor
    length_keys: torch.Tensor
    rho: torch.Tensor


def check() -> tuple[bool, str]:
    """Return (usable, why): plain torch runs wherever torch does."""
    return True, "batched torch operations"


class PackedFingerprinter:
    """Fingerprints by batched torch operations on any device."""

    name = "packed"

    def __init__(self, device: torch.device | str, reason: str) -> None:
        """Derive the keys for `device`; `reason` says why this implementation was chosen."""
        self.reason = reason
        self._tables = make_tables(device)
        self._signs = self._tables.signs(torch.float32).view(-1, BLOCK)
        self._high_keys = self._tables.v1 - (self._tables.v0 << 32)
        self._row_bias = self._tables.v1.sum() << 31
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._plans: Plans[_Plan] = Plans(self._tables.device, self._make_plan)

    @torch.no_grad()
    def rows(self, tensors: Tensors, out: torch.Tensor, head: torch.Tensor | None = None) -> None:
        """Write one row per tensor; see `Fingerprinter.rows`."""
        plan = self._plans.get(out, tensors, shapes(tensors), addresses(tensors))
        real = [_as_copied(t) for t in tensors]
        for batch in plan.batches:
            self._fill(batch, real)
            pieces = slice(batch.first, batch.first + len(batch.pieces))
            self._hash(batch, plan.hashes[pieces])
            if batch.dtype in VALUE_DTYPES:
                _statistics(batch, self._signs, plan.rho, plan.parts[pieces])
        _combine(plan, out)
        if head is not None:
            head.copy_(out[:, :HEAD])

    def _fill(self, batch: _Batch, tensors: Tensors) -> None:
        """Copy the pieces of a batch to their rows; what lies between them is zero."""
        batch.used.zero_()
        torch._foreach_copy_(batch.slots, list(_sources(batch, tensors)))

    def _hash(self, batch: _Batch, hashes: torch.Tensor) -> None:
        """Hash each piece: sum over its rows of A(C) U[r] (V0 . low + V1 . high).

        With w = low + 2**32 * high as signed, V0 . low = V0 . w - 2**32 V0 . high: two products of
        whole words, and a constant for the bias of the high half.
        """
        words = batch.used.view(torch.int64).view(-1, ROW_WORDS)
        row_sums = _dot(words, self._tables.v0) + _dot(words >> 32, self._high_keys)
        keyed = (row_sums + self._row_bias) * batch.row_keys
        hashes.zero_().index_add_(0, batch.row_piece, keyed)

    def _make_plan(self, tensors: Tensors) -> _Plan:
        """Cut the tensors into pieces, the pieces into batches, and make room for the results."""
        tensors = [_as_copied(t) for t in tensors]
        drafts = list(batches_of(tensors, self._tables.device))
        room = max((used_bytes(dtype, pieces) for dtype, pieces in drafts), default=0)
        if room > self._buffer.numel():
            # Plans made before keep their own views of the smaller buffer alive.
            self._buffer = torch.empty(room, dtype=torch.uint8, device=self._tables.device)
        firsts = accumulate((len(pieces) for _, pieces in drafts), initial=0)
        batches = [
            self._make_batch(dtype, pieces, first, tensors)
            for (dtype, pieces), first in zip(drafts, firsts, strict=False)
        ]
        every = [piece for batch in batches for piece in batch.pieces]
        device = self._tables.device
        chunks = max((piece.start // CHUNK + 1 for piece in every), default=0)
        keys = [0 if t is None else self._tables.length_key(t.nbytes) for t in tensors]
        owner = torch.tensor([piece.tensor for piece in every], dtype=torch.int64)
        return _Plan(
            batches,
            torch.zeros(len(every), dtype=torch.int64, device=device),
            torch.zeros(len(every), ROW - 2, dtype=torch.float64, device=device),
            torch.argsort(owner, stable=True).to(device),
            torch.bincount(owner, minlength=len(tensors)).to(device),
            owner.to(device),
            torch.tensor(keys, dtype=torch.int64, device=device),
            self._tables.fold_signs(0, chunks),
        )

    def _make_batch(
        self,
        dtype: torch.dtype,
        pieces: list[Piece],
        first: int,
        tensors: Tensors,
    ) -> _Batch:
        """Give every piece its place in the buffer and every row its keys."""
        device = self._tables.device
        used = self._buffer[: used_bytes(dtype, pieces)]
        elements = used.view(dtype)
        blocks = torch.tensor([blocks_of(dtype, piece) for piece in pieces])
        starts = (torch.cumsum(blocks, 0) - blocks).tolist()
        slots = [
            _slot(elements[at * BLOCK :], piece, tensors[piece.tensor])
            for piece, at in zip(pieces, starts, strict=True)
        ]
        chunk = torch.tensor([piece.start // CHUNK for piece in pieces])
        rows = blocks * BLOCK * dtype.itemsize // ROW_BYTES
        row_piece = torch.repeat_interleave(rows)
        row = count_up(rows)
        row_keys = (
            self._tables.u[row.to(device)]
            * self._tables.chunk_keys(0, int(chunk.max()) + 1)[chunk[row_piece].to(device)]
        )
        # A piece may end in the middle of its last block: the rows behind its end are not hashed.
        row_keys *= (row < hashed_rows(dtype, pieces)[row_piece]).to(device)
        return _Batch(
            dtype,
            pieces,
            first,
            slots,
            used,
            row_piece.to(device),
            row_keys,
            torch.tensor([p.stop - p.start for p in pieces], dtype=torch.float64).to(device),
            blocks.to(device),
            count_up(blocks).to(device),
            chunk.to(device),
            int(blocks[0]) if bool((blocks == blocks[0]).all()) else 0,
        )


def _as_copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A complex tensor as pairs of reals, raw bytes as integers."""
    if tensor is None:
        return None
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else copyable(tensor)


def _slot(elements: torch.Tensor, piece: Piece, tensor: torch.Tensor | None) -> torch.Tensor:
    """The place of a piece, shaped like its source."""
    place = elements[: piece.stop - piece.start]
    return place.view(tensor.shape) if piece.whole and tensor is not None else place


def _sources(batch: _Batch, tensors: Tensors) -> Iterator[torch.Tensor]:
    """What is copied to each slot: a whole small tensor, or a slice of a large one."""
    opened = -1
    elements = torch.empty(0)
    for piece in batch.pieces:
        tensor = tensors[piece.tensor]
        if tensor is None:
            continue
        if piece.whole:
            yield tensor
            continue
        if opened != piece.tensor:
            opened, elements = piece.tensor, flat(tensor)
        yield elements[piece.start : piece.stop]


def _dot(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Row sums of products of int64 words, modulo 2**64; there is no integer `mv` on CUDA."""
    return torch.mv(words, keys) if words.device.type == "cpu" else (words * keys).sum(1)


def _statistics(batch: _Batch, signs: torch.Tensor, rho: torch.Tensor, parts: torch.Tensor) -> None:
    """Write the columns behind the hash of every piece of one batch: `parts` (pieces, ROW - 2)."""
    blocks = _columns(batch, signs)
    sums = _segments("sum", blocks, batch.blocks)
    parts[:, 0], parts[:, 2] = sums[:, 0], sums[:, 2]
    parts[:, 1] = _segments("max", blocks[:, 1:2], batch.blocks)[:, 0]
    parts[:, 3] = batch.sizes - sums[:, 3]
    fine = sums[:, 4:].view(-1, 2, 1, FINE)
    folds = rho[batch.chunk].view(-1, FINE, 2, SKETCH // 2).transpose(1, 2)
    parts[:, 4:] = (fine @ folds).view(-1, SKETCH)


def _columns(batch: _Batch, signs: torch.Tensor) -> torch.Tensor:
    """Per block: l2, absmax, nonfinite, nonzero, and both sets of fine sums: float64 (blocks, 4 + 2 * FINE).

    On a CPU a look at the sums decides whether they can be trusted, block by block, so that a row does not depend on
    what shares its batch; elsewhere the host would have to wait for the answer.
    """
    raw = batch.used.view(batch.dtype).view(-1, BLOCK)
    if raw.device.type != "cpu" or raw.dtype == torch.float64:
        return _scaled(batch, raw, signs)
    blocks, trusted = _unscaled(batch, raw.to(torch.float32), signs)
    if not bool(trusted.all()):
        blocks = torch.where(trusted[:, None], blocks, _scaled(batch, raw, signs))
    return blocks


def _unscaled(batch: _Batch, x: torch.Tensor, signs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns if no square overflows or vanishes and all is finite, and for which blocks that holds."""
    norm = torch.linalg.vector_norm(x, 2, 1)
    absmax = torch.maximum(x.amax(1), -x.amin(1))
    trusted = (norm < _LARGEST_NORM) & ((norm > _SMALLEST_NORM) | (absmax == 0))
    nonzero = torch.ne(x, 0, out=torch.empty_like(x)).sum(1)
    l2 = norm.to(torch.float64).square()
    columns = torch.stack((l2, absmax, torch.zeros_like(l2), nonzero), 1)
    return torch.cat((columns, *_fine_sums(_signed(batch, x, signs))), 1), trusted


def _scaled(batch: _Batch, raw: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """The columns whatever the elements are. Overwrites `raw`."""
    raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
    nonzero = torch.count_nonzero(raw, 1)
    nonfinite = torch.count_nonzero(raw - raw, 1)  # x - x is NaN, which counts, or zero
    x = raw.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    absmax = x.abs().amax(1)
    scale = torch.where(absmax > 0, absmax, 1.0)[:, None]
    x /= scale
    scale = scale.to(torch.float64)
    l2 = x.square().sum(1, dtype=torch.float64) * scale[:, 0].square()
    columns = torch.stack((l2, absmax, nonfinite, nonzero), 1)
    return torch.cat((columns, *(fine * scale for fine in _fine_sums(_signed(batch, x, signs)))), 1)


def _signed(batch: _Batch, x: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Blocks of elements times their signs."""
    if batch.each:
        return (x.view(-1, batch.each, BLOCK) * signs[: batch.each]).view(-1, BLOCK)
    return x * signs[batch.block_row]


def _fine_sums(signed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both bucket sets of each block: (blocks, FINE)."""
    return signed.view(-1, GROUP, FINE).sum(1), signed.view(-1, FINE, GROUP).sum(2)


def _segments(reduce: str, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Reduce runs of rows in a fixed order; an empty run gives zero."""
    return torch.segment_reduce(values, reduce, lengths=lengths, axis=0, unsafe=True, initial=0)


def _combine(plan: _Plan, out: torch.Tensor) -> None:
    """Add the pieces of each tensor up into its row."""
    hashes = plan.length_keys.clone().index_add_(0, plan.piece_tensor, plan.hashes)
    out[:, 0] = hashes & 0xFFFF_FFFF
    out[:, 1] = (hashes >> 32) & 0xFFFF_FFFF
    parts = plan.parts[plan.order]
    out[:, 2:] = _segments("sum", parts, plan.counts)
    out[:, 3] = _segments("max", parts[:, 1:2], plan.counts)[:, 0]
    out[:, 2].clamp_(max=L2_MAX)
    out[:, 6:].nan_to_num_(nan=0.0).clamp_(-L2_MAX, L2_MAX)
