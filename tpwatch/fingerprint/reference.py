"""The specification: every fingerprint column in plain torch, written to be read.

Knows: the formulas. Must not know: speed; the other implementations are judged by this one.

**Order of elements.** Logical (row-major) order of the tensor; strides and offsets do not matter.
Complex tensors are viewed as pairs of reals. A *chunk* is `CHUNK` consecutive elements.

**Hash** (multilinear, keys from `tables.py`). The bytes of a chunk, zero-padded to whole rows of
`ROW_BYTES`, are read as little-endian 64-bit words ``w``; word ``j`` of row ``r``:

    h_C = sum_r U[r] * sum_j ( V0[j] * lo32(w) + V1[j] * (hi32(w) ^ 2**31) )        mod 2**64
    H   = sum_C A(C) * h_C + splitmix64(nbytes ^ seed)                              mod 2**64

A sum of integers: independent of the order of evaluation, sensitive to position and length. If
exactly one 32-bit half differs, the difference is (odd * 2**v, v <= 31) times three odd keys, never
0 mod 2**64: always seen. If several differ, they cancel with probability at most about 2**-31.

**l2, absmax, zeros, nonfinite** are taken over the elements in float64, which holds every supported
float exactly. With m finite elements, |l2 - exact| <= m * 2**-53 * exact, and much less in practice
(torch sums pairwise).

**Sketch** ("two-set dense fold"). With element signs sigma(e) and fold signs rho(C, m, b), e
counted inside the chunk:

    f1[C, m] = sum over e % 64 == m        of sigma(e) * x_e
    f2[C, m] = sum over (e // 16) % 64 == m of sigma(e) * x_e
    s[b]     = sum_C sum_m rho(C, m, b) * (f1 if b < 8 else f2)[C, m]

E s[b]**2 = |x|**2 for every b over random signs. Two bucket sets, because two tensors that are each
dominated by one element must not look alike when those elements share a bucket.

**Which dtypes get which columns.** float64, float32, float16 and bfloat16 (and complex pairs of
them): all. Integers and bool: the hash; the other columns are zero. float8 and other packed
formats: the hash only, because a stored code is not a value without its scale, and the scale is a
tensor of its own that can be watched.
"""

from __future__ import annotations

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
from tpwatch.fingerprint.plans import Tensors, copyable, require_memory
from tpwatch.fingerprint.tables import Tables, make_tables

VALUE_DTYPES: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes whose elements get all columns; every other one gets the hash alone."""

_BLOCK: Final = 8 * CHUNK
"""Elements handled at a time: bounds the temporaries (a few tens of MB), not the result."""


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as a contiguous 1-D tensor; a copy only if the strides demand one."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = copyable(tensor).resolve_neg().contiguous()
    return tensor.as_strided((tensor.numel(),), (1,))  # a single element may have any stride, which a view keeps


def hash64(tensor: torch.Tensor, tables: Tables) -> int:
    """Return H of the module docstring as an unsigned 64-bit integer."""
    elements = flat(tensor)
    nbytes = elements.numel() * elements.element_size()
    total = torch.zeros((), dtype=torch.int64, device=elements.device)
    for start in range(0, elements.numel(), _BLOCK):
        total += _hash_block(elements[start : start + _BLOCK], start // CHUNK, tables)
    return (int(total) + tables.length_key(nbytes)) & ((1 << 64) - 1)


def _hash_block(elements: torch.Tensor, first_chunk: int, tables: Tables) -> torch.Tensor:
    """Sum of A(C) * h_C over the chunks of one block of elements: int64 scalar."""
    raw = elements.view(torch.uint8)
    rows = -(-raw.numel() // ROW_BYTES)
    padded = torch.zeros(rows * ROW_BYTES, dtype=torch.uint8, device=raw.device)
    padded[: raw.numel()] = raw
    words = padded.view(torch.int64).view(rows, ROW_WORDS)
    low = words & 0xFFFF_FFFF
    high = ((words >> 32) & 0xFFFF_FFFF) ^ 0x8000_0000
    row_sums = (low * tables.v0).sum(1) + (high * tables.v1).sum(1)
    chunk_rows = CHUNK * elements.element_size() // ROW_BYTES
    row = torch.arange(rows, device=raw.device)
    chunk_keys = tables.chunk_keys(first_chunk, -(-rows // chunk_rows))
    return (row_sums * tables.u[row % chunk_rows] * chunk_keys[row // chunk_rows]).sum()


def statistics(tensor: torch.Tensor, tables: Tables) -> torch.Tensor:
    """Return the columns behind the hash: float64 (ROW - 2,)."""
    elements = flat(tensor)
    columns = torch.zeros(ROW - 2, dtype=torch.float64, device=elements.device)
    if elements.dtype not in VALUE_DTYPES:
        return columns
    l2, absmax, nonfinite, zeros, sketch = columns.split([1, 1, 1, 1, SKETCH])
    for start in range(0, elements.numel(), _BLOCK):
        x = elements[start : start + _BLOCK].to(torch.float64)
        finite = torch.isfinite(x)
        zeros += (x == 0).sum()
        nonfinite += (~finite).sum()
        x = torch.where(finite, x, 0.0)
        l2 += x.square().sum()
        absmax.copy_(torch.maximum(absmax, x.abs().max()))
        sketch += _sketch_block(x, start // CHUNK, tables)
    l2.clamp_(max=L2_MAX)
    sketch.nan_to_num_(nan=0.0).clamp_(-L2_MAX, L2_MAX)
    return columns


def _sketch_block(x: torch.Tensor, first_chunk: int, tables: Tables) -> torch.Tensor:
    """Contribution of one block of finite float64 elements to the sketch: float64 (SKETCH,)."""
    chunks = -(-x.numel() // CHUNK)
    padded = torch.zeros(chunks * CHUNK, dtype=torch.float64, device=x.device)
    padded[: x.numel()] = x
    signed = padded.view(chunks, CHUNK) * tables.signs()
    first_set = signed.view(chunks, CHUNK // FINE, FINE).sum(1)
    second_set = signed.view(chunks, CHUNK // (FINE * GROUP), FINE, GROUP).sum((1, 3))
    rho = tables.fold_signs(first_chunk, chunks)
    half = SKETCH // 2
    return torch.cat(
        (
            torch.einsum("cm,cmb->b", first_set, rho[..., :half]),
            torch.einsum("cm,cmb->b", second_set, rho[..., half:]),
        )
    )


def check() -> tuple[bool, str]:
    """Return (usable, why): plain torch runs wherever torch does."""
    return True, "plain torch, slow"


class ReferenceFingerprinter:
    """The specification as a `Fingerprinter`: any device, no speed."""

    name = "reference"

    def __init__(self, device: torch.device | str, reason: str) -> None:
        """Derive the keys for `device`; `reason` says why this implementation was chosen."""
        self.reason = reason
        self._tables = make_tables(device)

    @torch.no_grad()
    def rows(self, tensors: Tensors, out: torch.Tensor, head: torch.Tensor | None = None) -> None:
        """Write one row per tensor; see `Fingerprinter.rows`."""
        require_memory(tensors, self._tables.device)
        for row, tensor in zip(out, tensors, strict=True):
            if tensor is None:
                row.zero_()
                continue
            digest = hash64(tensor, self._tables)
            row[0] = float(digest & 0xFFFF_FFFF)
            row[1] = float(digest >> 32)
            row[2:] = statistics(tensor, self._tables)
        if head is not None:
            head.copy_(out[:, :HEAD])
