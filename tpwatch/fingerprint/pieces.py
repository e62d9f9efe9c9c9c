"""Tensors cut into pieces, and pieces gathered into batches: the plan of `packed.py`.

Knows: how many rows and blocks a piece takes. Must not know: keys, or what is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from tpwatch.fingerprint.layout import CHUNK, FINE, GROUP, ROW_BYTES
from tpwatch.fingerprint.plans import Tensors

BLOCK: Final = FINE * GROUP
"""Elements after which the fine buckets of the sketch repeat: 1,024."""

_BATCH_BLOCKS: Final = {"cpu": 256}
"""Blocks of 1,024 elements in one batch, by kind of device: 1 MB of float32 stays in the cache of a CPU."""

_MANY_BLOCKS: Final = 1024
"""The same elsewhere, where the number of launches counts."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `start` to `stop` of one tensor, inside one chunk; `whole` if that is all of it."""

    tensor: int
    start: int
    stop: int
    whole: bool


def blocks_of(dtype: torch.dtype, piece: Piece) -> int:
    """Blocks of 1,024 elements that a piece takes; whole rows too."""
    step = max(1, ROW_BYTES // (BLOCK * dtype.itemsize))
    blocks = -(-(piece.stop - piece.start) // BLOCK)
    return -(-blocks // step) * step


def used_bytes(dtype: torch.dtype, pieces: list[Piece]) -> int:
    """Bytes of the buffer that a batch takes."""
    return sum(blocks_of(dtype, piece) for piece in pieces) * BLOCK * dtype.itemsize


def hashed_rows(dtype: torch.dtype, pieces: list[Piece]) -> torch.Tensor:
    """Rows that hold at least one byte of each piece: int64 (pieces,)."""
    return torch.tensor([-(-(p.stop - p.start) * dtype.itemsize // ROW_BYTES) for p in pieces])


def count_up(counts: torch.Tensor) -> torch.Tensor:
    """[2, 3] -> [0, 1, 0, 1, 2]."""
    starts = torch.cumsum(counts, 0) - counts
    return torch.arange(int(counts.sum())) - torch.repeat_interleave(starts, counts)


def batches_of(tensors: Tensors, device: torch.device) -> Iterator[tuple[torch.dtype, list[Piece]]]:
    """Group the pieces of all tensors by dtype into batches of bounded size, pieces of one size together."""
    most = _BATCH_BLOCKS.get(device.type, _MANY_BLOCKS)
    by_dtype: dict[torch.dtype, list[Piece]] = {}
    for index, tensor in enumerate(tensors):
        if tensor is None:
            continue
        pieces = by_dtype.setdefault(tensor.dtype, [])
        numel = tensor.numel()
        for start in range(0, numel, CHUNK):
            stop = min(start + CHUNK, numel)
            pieces.append(Piece(index, start, stop, whole=stop - start == numel))
    for dtype, pieces in by_dtype.items():
        pieces.sort(key=partial(blocks_of, dtype), reverse=True)
        batch: list[Piece] = []
        room = most
        for piece in pieces:
            blocks = blocks_of(dtype, piece)
            if batch and blocks > room:
                yield dtype, batch
                batch, room = [], most
            batch.append(piece)
            room -= blocks
        if batch:
            yield dtype, batch
