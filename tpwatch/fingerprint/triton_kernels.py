"""Fingerprints in three small Triton kernels over a pointer table, without atomics.

Knows: the columns of `reference.py`, as one pass over the bytes on a GPU. Must not know: streams,
processes, or who needs the rows.

1. `chunk_kernel`, one program per chunk, one launch per kind of element that occurs (four floats, raw bytes by size),
   however many tensors there are: every byte is read once, 16 bytes per thread and row. A chunk with a non-finite
   element, or with squares near the ends of the float32 range, is read again (from the second-level cache) in float64.
2. `fold_kernel`, one program per `FOLD` chunks of one tensor, one launch.
3. `finish_kernel`, one program per tensor, one launch: writes the row, and its head into the exchange buffer.

Every sum has a fixed order: the result is the same from run to run. Integer columns equal the
reference bit for bit. float32 sums take at most 64 squares or 64 elements in a thread, then a tree
over threads: |l2 - exact| <= 2**-16 exact, and a sketch coordinate is off by at most 2**-17 times
the sum of |x|; measured errors are a hundred times smaller.

Bytes moved: the tensors once; 264 bytes per chunk of 65,536 elements written and read again.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from tpwatch.fingerprint.layout import CHUNK, L2_MAX, ROW

VERSION: Final[str] = triton.__version__
_OLDEST: Final = (3, 3)

if tuple(map(int, VERSION.split(".")[:2])) < _OLDEST:
    # Older ones fail in ways of their own, some at import, some at the first launch.
    old = f"triton {VERSION} is too old: the kernels need {'.'.join(map(str, _OLDEST))}"
    raise ImportError(old)

BYTES: Final = tl.constexpr(0)
FLOAT32: Final = tl.constexpr(1)
BFLOAT16: Final = tl.constexpr(2)
FLOAT16: Final = tl.constexpr(3)
FLOAT64: Final = tl.constexpr(4)
_CHUNK: Final = tl.constexpr(CHUNK)
_L2_MAX: Final = tl.constexpr(L2_MAX)
_ROW: Final = tl.constexpr(ROW)
PARTS: Final = tl.constexpr(32)
"""Columns of a partial row: l2, absmax, nonfinite, zeros, sketch; the rest is padding."""
_SKETCH_AT: Final = tl.constexpr(4)
FOLD: Final = tl.constexpr(32)
"""Chunks that one program of `fold_kernel` adds up."""

UNROLL: Final = 2
"""Rows per iteration of the main loop."""

OPTIONS: Final = {"num_warps": 8, "enable_fp_fusion": True}
"""Compiler options of `chunk_kernel`, pinned because they decide rounding and speed."""

SUM_OPTIONS: Final = {"num_warps": 4, "enable_fp_fusion": True}
"""Compiler options of the kernels behind it."""


@triton.jit
def _hash(w: tl.tensor, keys: tl.tuple, digest: tl.tensor) -> tl.tensor:
    """Add one row of 32-bit words (256, 4) to the hash of each thread (256,)."""
    v0, v1, u = keys
    low, high = tl.split(tl.reshape(w, (256, 2, 2)))
    low = low.to(tl.uint32, bitcast=True).to(tl.uint64)
    high = (high ^ -2147483648).to(tl.uint32, bitcast=True).to(tl.uint64)
    return digest + tl.sum(low * v0.to(tl.uint64) + high * v1.to(tl.uint64), axis=1) * u


@triton.jit
def _add(x: tl.tensor, norms: tl.tuple) -> tl.tuple:
    """Add float32 elements to squares, largest magnitude and number of nonzeros."""
    l2, absmax, nonzero = norms
    return l2 + x * x, tl.maximum(absmax, tl.abs(x)), nonzero + (x != 0.0).to(tl.int32)


@triton.jit
def _halves(w: tl.tensor, KIND: tl.constexpr) -> tl.tuple:
    """The two 16-bit elements of 32-bit words, as float32: even ones, odd ones."""
    if KIND == BFLOAT16:
        even = (w << 16).to(tl.float32, bitcast=True)
        odd = (w & -65536).to(tl.float32, bitcast=True)
    else:
        even = w.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        odd = (w >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return even, odd


@triton.jit
def _row(w: tl.tensor, flips: tl.tensor, keys: tl.tuple, state: tl.tuple, KIND: tl.constexpr) -> tl.tuple:
    """Add one row to every running value. Only the sketch sums care about the flipped signs."""
    digest, norms, even, odd = state
    digest = _hash(w, keys, digest)
    if KIND == FLOAT32:
        x = (w ^ (flips & -2147483648)).to(tl.float32, bitcast=True)
        norms = _add(x, norms)
        even += x
    elif KIND == BFLOAT16 or KIND == FLOAT16:
        x, y = _halves(w ^ (flips & -2147450880), KIND)
        norms = _add(y, _add(x, norms))
        even += x
        odd += y
    return digest, norms, even, odd


@triton.jit
def _sketch(slots: tl.tensor, words: tl.tensor) -> tl.tensor:
    """Fold signed sums by element position modulo 1024 into the 16 coordinates of one chunk."""
    first = tl.sum(tl.reshape(slots, (16, 64)), axis=0)
    second = tl.sum(tl.reshape(slots, (64, 16)), axis=1)
    b = tl.arange(0, 16)[:, None]
    m = tl.arange(0, 64)[None, :]
    fine = tl.where(b < 8, first[None, :], second[None, :])
    negative = (words[:, None] >> m.to(tl.int64)) & 1
    return tl.sum(tl.where(negative != 0, -fine, fine), axis=1).to(tl.float64)


@triton.jit
def _elements(address: tl.tensor, e: tl.tensor, inside: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Elements `e` of a chunk as float64; zero where not `inside`."""
    if KIND == FLOAT32:
        bits = tl.load(address.to(tl.pointer_type(tl.int32)) + e, mask=inside, other=0)
        x = bits.to(tl.float32, bitcast=True)
    elif KIND == FLOAT64:
        bits = tl.load(address.to(tl.pointer_type(tl.int64)) + e, mask=inside, other=0)
        x = bits.to(tl.float64, bitcast=True)
    else:
        bits = tl.load(address.to(tl.pointer_type(tl.int16)) + e, mask=inside, other=0)
        if KIND == BFLOAT16:
            x = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        else:
            x = bits.to(tl.float16, bitcast=True).to(tl.float32)
    return x.to(tl.float64)


@triton.jit
def _exact(
    address: tl.tensor,
    count: tl.tensor,
    sign_bits: tl.tensor,
    words: tl.tensor,
    parts: tl.tensor,
    KIND: tl.constexpr,
) -> None:
    """Write the partial row of a chunk in float64, with non-finite elements left out."""
    slot = tl.arange(0, 1024)
    l2 = tl.zeros((1024,), tl.float64)
    absmax = tl.zeros((1024,), tl.float64)
    sums = tl.zeros((1024,), tl.float64)
    nonfinite = tl.zeros((1024,), tl.int32)
    zeros = tl.zeros((1024,), tl.int32)
    for start in range(0, count, 1024):
        e = start + slot
        inside = e < count
        x = _elements(address, e, inside, KIND)
        finite = (x - x) == 0.0
        nonfinite += (~finite & inside).to(tl.int32)
        zeros += ((x == 0.0) & inside).to(tl.int32)
        x = tl.where(finite, x, 0.0)
        l2 += x * x
        absmax = tl.maximum(absmax, tl.abs(x))
        negative = (tl.load(sign_bits + e // 64) >> (e % 64).to(tl.int64)) & 1
        sums += tl.where(negative != 0, -x, x)
    tl.store(parts, tl.sum(l2, axis=0))
    tl.store(parts + 1, tl.max(absmax, axis=0))
    tl.store(parts + 2, tl.sum(nonfinite, axis=0).to(tl.float64))
    tl.store(parts + 3, tl.sum(zeros, axis=0).to(tl.float64))
    tl.store(parts + _SKETCH_AT + tl.arange(0, 16), _sketch(sums, words))


@triton.jit
def chunk_kernel(
    addresses: tl.tensor,
    numels: tl.tensor,
    tensor_of: tl.tensor,
    chunk_of: tl.tensor,
    v0_keys: tl.tensor,
    v1_keys: tl.tensor,
    u_keys: tl.tensor,
    a_keys: tl.tensor,
    fold_words: tl.tensor,
    sign_columns: tl.tensor,
    sign_bits: tl.tensor,
    hashes: tl.tensor,
    partials: tl.tensor,
    KIND: tl.constexpr,
    ITEM: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """Hash and partial row of one chunk.

    Args:
        addresses: int64 (tensors,), each a multiple of 16.
        numels: int64 (tensors,).
        tensor_of: int32 (programs,), tensor of each chunk.
        chunk_of: int32 (programs,), number of the chunk in its tensor.
        v0_keys: int32 (512,), low 32 bits matter.
        v1_keys: int32 (512,).
        u_keys: int64 (rows of a chunk,).
        a_keys: int64 (chunks,).
        fold_words: int64 (chunks, 16).
        sign_columns: int32 (row groups, 1024), as `Tables.sign_columns`.
        sign_bits: int64 (1024,).
        hashes: int64 (programs,), written: A(C) h_C.
        partials: float64 (programs, PARTS), written.
        KIND: kind of element.
        ITEM: bytes of an element.
        UNROLL: rows per iteration of the main loop.
    """
    program = tl.program_id(0)
    tensor = tl.load(tensor_of + program)
    chunk = tl.load(chunk_of + program).to(tl.int64)
    count = tl.minimum(tl.load(numels + tensor) - chunk * _CHUNK, _CHUNK).to(tl.int32)
    address = tl.multiple_of(tl.load(addresses + tensor), 16) + chunk * (_CHUNK * ITEM)
    data = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    thread = tl.arange(0, 256)[:, None]
    lane = thread * 4 + tl.arange(0, 4)[None, :]
    word = thread * 2 + tl.arange(0, 2)[None, :]
    v0 = tl.load(v0_keys + word).to(tl.uint32, bitcast=True)
    v1 = tl.load(v1_keys + word).to(tl.uint32, bitcast=True)
    GROUP: tl.constexpr = 32 if KIND == FLOAT32 else 16
    flips = tl.zeros((256, 4), tl.int32)
    zero = tl.zeros((256, 4), tl.float32)
    state = (tl.zeros((256,), tl.uint64), (zero, zero, flips), zero, zero)
    nbytes = count * ITEM
    whole = nbytes // 4096
    for first in range(0, whole, GROUP):
        if KIND != BYTES and KIND != FLOAT64:
            flips = tl.load(sign_columns + (first // GROUP) * 1024 + lane)
        for r in tl.range(first, tl.minimum(first + GROUP, whole), loop_unroll_factor=UNROLL):
            w = tl.load(data + r * 1024 + lane)
            u = tl.load(u_keys + r).to(tl.uint64, bitcast=True)
            state = _row(w, flips, (v0, v1, u), state, KIND)
            flips = flips << 1
    rest = nbytes - whole * 4096
    if rest > 0:
        left = rest - lane * 4
        keep = (1 << (8 * tl.minimum(tl.maximum(left, 0), 3))) - 1
        keep = tl.where(left >= 4, -1, keep)
        w = tl.load(data + whole * 1024 + lane, mask=left > 0, other=0) & keep
        u = tl.load(u_keys + whole).to(tl.uint64, bitcast=True)
        if KIND != BYTES and KIND != FLOAT64:
            flips = tl.load(sign_columns + (whole // GROUP) * 1024 + lane) << (whole % GROUP)
        state = _row(w, flips, (v0, v1, u), state, KIND)
    digest, norms, even, odd = state
    l2, absmax, nonzero = norms
    total = tl.sum(digest.to(tl.int64, bitcast=True), axis=0)
    tl.store(hashes + program, total * tl.load(a_keys + chunk))
    if KIND != BYTES:
        parts = partials + program.to(tl.int64) * PARTS
        words = tl.load(fold_words + chunk * 16 + tl.arange(0, 16))
        squares = tl.sum(tl.sum(l2, axis=1), axis=0)
        largest = tl.max(tl.max(absmax, axis=1), axis=0)
        trusted = (squares < 3.0e38) & ((squares > 1.0e-27) | (largest == 0.0))
        if KIND == FLOAT64:
            trusted = False
        if trusted:
            if KIND == FLOAT32:
                slots = tl.reshape(even, (1024,))
            else:
                slots = tl.sum(tl.reshape(tl.join(even, odd), (2, 1024)), axis=0)
            zeros = count - tl.sum(tl.sum(nonzero, axis=1), axis=0)
            tl.store(parts, squares.to(tl.float64))
            tl.store(parts + 1, largest.to(tl.float64))
            tl.store(parts + 2, 0.0)
            tl.store(parts + 3, zeros.to(tl.float64))
            tl.store(parts + _SKETCH_AT + tl.arange(0, 16), _sketch(slots, words))
        else:
            _exact(address, count, sign_bits, words, parts, KIND)


@triton.jit
def _total(hashes: tl.tensor, partials: tl.tensor, start: tl.tensor, count: tl.tensor) -> tl.tuple:
    """Sum of hashes, and column sums of partial rows (the second column: maximum)."""
    row = tl.arange(0, FOLD)
    column = tl.arange(0, PARTS)
    digest = tl.zeros((FOLD,), tl.int64)
    sums = tl.zeros((PARTS,), tl.float64)
    largest = tl.zeros((PARTS,), tl.float64)
    for at in range(0, count, FOLD):
        inside = at + row < count
        place = (start + at + row).to(tl.int64)
        digest += tl.load(hashes + place, mask=inside, other=0)
        tile = place[:, None] * PARTS + column[None, :]
        rows = tl.load(partials + tile, mask=inside[:, None], other=0.0)
        sums += tl.sum(rows, axis=0)
        largest = tl.maximum(largest, tl.max(rows, axis=0))
    return tl.sum(digest, axis=0), tl.where(column == 1, largest, sums)


@triton.jit
def fold_kernel(
    starts: tl.tensor,
    counts: tl.tensor,
    hashes: tl.tensor,
    partials: tl.tensor,
    group_hashes: tl.tensor,
    group_partials: tl.tensor,
) -> None:
    """Add up the chunks `starts` ... `starts + counts - 1` (at most FOLD) of each group."""
    program = tl.program_id(0)
    digest, parts = _total(hashes, partials, tl.load(starts + program), tl.load(counts + program))
    tl.store(group_hashes + program, digest)
    tl.store(group_partials + program.to(tl.int64) * PARTS + tl.arange(0, PARTS), parts)


@triton.jit
def _bounded(x: tl.tensor) -> tl.tensor:
    """A finite number whatever float64 overflow made of the sum."""
    x = tl.where(x == x, x, 0.0)
    return tl.minimum(tl.maximum(x, -_L2_MAX), _L2_MAX)


@triton.jit(do_not_specialize=["head_stride"], do_not_specialize_on_alignment=["head"])
def finish_kernel(
    starts: tl.tensor,
    counts: tl.tensor,
    length_keys: tl.tensor,
    hashes: tl.tensor,
    partials: tl.tensor,
    out: tl.tensor,
    head: tl.tensor,
    head_stride: tl.tensor,
    HEADS: tl.constexpr,
) -> None:
    """Write the row of one tensor from its groups, and the first HEADS columns to `head` too.

    Columns behind the hash come in the order of `layout.COLUMNS`, as in a partial row.
    """
    program = tl.program_id(0).to(tl.int64)
    digest, parts = _total(hashes, partials, tl.load(starts + program), tl.load(counts + program))
    digest += tl.load(length_keys + program)
    column = tl.arange(0, PARTS)
    parts = tl.where(column == 1, parts, _bounded(parts))
    low = (digest & 0xFFFFFFFF).to(tl.float64)
    high = ((digest >> 32) & 0xFFFFFFFF).to(tl.float64)
    row = out + program * _ROW
    tl.store(row, low)
    tl.store(row + 1, high)
    tl.store(row + 2 + column, parts, mask=column < _ROW - 2)
    if HEADS > 0:
        place = head + program * head_stride
        tl.store(place, low)
        tl.store(place + 1, high)
        tl.store(place + 2 + column, parts, mask=column < HEADS - 2)
