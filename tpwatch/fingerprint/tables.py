"""Hash keys and sketch signs, all derived from one seed by splitmix64.

Knows: the counters each key family starts from. Must not know: tensors under observation.

Integers live in int64 tensors and wrap modulo 2**64, which is what the hash needs; the sign bit
carries no meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from tpwatch.fingerprint.layout import CHUNK, FINE, ROW_BYTES, ROW_WORDS, SEED, SKETCH

MAX_ROWS: Final = CHUNK * 8 // ROW_BYTES
"""Rows of a chunk of the widest element (8 bytes)."""

_MASK64: Final = (1 << 64) - 1
_GAMMA: Final = 0x9E37_79B9_7F4A_7C15
_MIX_1: Final = 0xBF58_476D_1CE4_E5B9
_MIX_2: Final = 0x94D0_49BB_1331_11EB
_WORD_STREAM: Final = 0xAB_CDEF
CHUNK_STREAM: Final = 0x55AA
_V1_START: Final = 10_000
_U_START: Final = 20_000
_SIGN_START: Final = 30_000


def splitmix64(value: int) -> int:
    """Return the splitmix64 output for state `value` (Steele, Lea, Flood 2014), in [0, 2**64)."""
    z = (value + _GAMMA) & _MASK64
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK64
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK64
    return z ^ (z >> 31)


def as_int64(value: int) -> int:
    """Return the signed number that has the same low 64 bits as `value`."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64 words."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def splitmix64_tensor(x: torch.Tensor) -> torch.Tensor:
    """`splitmix64` of every element of an int64 tensor."""
    z = x + as_int64(_GAMMA)
    z = (z ^ _shift_right(z, 30)) * as_int64(_MIX_1)
    z = (z ^ _shift_right(z, 27)) * as_int64(_MIX_2)
    return z ^ _shift_right(z, 31)


def _stream(base: int, start: int, count: int) -> torch.Tensor:
    """`count` consecutive outputs of the generator at state `base + start`."""
    return splitmix64_tensor(torch.arange(count, dtype=torch.int64) + as_int64(base + start))


@dataclass(frozen=True, slots=True)
class Tables:
    """Keys for one seed on one device.

    Attributes:
        seed: what everything here is derived from.
        v0: int64 (ROW_WORDS,), odd 32-bit keys of the low halves.
        v1: int64 (ROW_WORDS,), odd 31-bit keys of the high halves.
        u: int64 (MAX_ROWS,), odd 64-bit key of each row of a chunk.
        sign_bits: int64 (CHUNK // 64,); bit k of word i set: element 64*i + k is negated.
    """

    seed: int
    v0: torch.Tensor
    v1: torch.Tensor
    u: torch.Tensor
    sign_bits: torch.Tensor

    @property
    def device(self) -> torch.device:
        """Where the keys live."""
        return self.v0.device

    def signs(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Return the element signs as +1 and -1: (CHUNK,) of `dtype`."""
        bits = torch.arange(64, dtype=torch.int64, device=self.device)
        negative = (self.sign_bits[:, None] >> bits) & 1
        return (1 - 2 * negative).reshape(-1).to(dtype)

    def sign_columns(self, elements: int) -> torch.Tensor:
        """Return the signs by column, for code that walks down the rows of a chunk.

        A column is a 32-bit word of a 4,096-byte row: one element of 4 bytes, or two of 2 bytes;
        `elements` says how many. In the whole word, or in each half, the bits run down from the
        highest with the row: a left shift by the row brings its sign to the sign bit.

        Returns:
            int32 (groups of 32 // elements rows, 1024).
        """
        rows, columns = 32 // elements, ROW_BYTES // 4
        negative = (self.signs(torch.int64) < 0).to(torch.int64)
        bits = negative.view(-1, rows, columns, elements)
        top = torch.arange(1, elements + 1, dtype=torch.int64, device=self.device) * rows - 1
        row = torch.arange(rows, dtype=torch.int64, device=self.device)[:, None, None]
        words = (bits << (top - row)).sum((1, 3))
        return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)

    def chunk_words(self, first: int, count: int) -> torch.Tensor:
        """Return the generator word of chunks `first` ... `first + count - 1`: int64 (count,)."""
        base = splitmix64(self.seed ^ CHUNK_STREAM)
        return _stream(base, first, count).to(self.device)

    def chunk_keys(self, first: int, count: int) -> torch.Tensor:
        """Return A(C), the odd 64-bit key of each chunk: int64 (count,)."""
        return self.chunk_words(first, count) | 1

    def fold_words(self, first: int, count: int) -> torch.Tensor:
        """Return one word for each chunk and coordinate: int64 (count, SKETCH).

        Bit m set: fine bucket m is subtracted.
        """
        salts = [as_int64(b * _GAMMA) for b in range(SKETCH)]
        salt = torch.tensor(salts, dtype=torch.int64, device=self.device)
        return splitmix64_tensor(self.chunk_words(first, count)[:, None] ^ salt)

    def fold_signs(self, first: int, count: int) -> torch.Tensor:
        """Return rho(C, m, b) as +1.0 and -1.0: float64 (count, FINE, SKETCH)."""
        bits = torch.arange(FINE, dtype=torch.int64, device=self.device)
        negative = (self.fold_words(first, count)[:, None, :] >> bits[None, :, None]) & 1
        return (1 - 2 * negative).to(torch.float64)

    def length_key(self, nbytes: int) -> int:
        """Return the signed 64-bit term that makes the hash depend on the byte length."""
        return as_int64(splitmix64(nbytes ^ self.seed))


def make_tables(device: torch.device | str = "cpu", seed: int = SEED) -> Tables:
    """Derive all keys from `seed` and place them on `device`."""
    base = splitmix64(seed ^ _WORD_STREAM)
    v0 = (_stream(base, 0, ROW_WORDS) & 0xFFFF_FFFF) | 1
    v1 = (_stream(base, _V1_START, ROW_WORDS) & 0x7FFF_FFFF) | 1
    u = _stream(base, _U_START, MAX_ROWS) | 1
    sign_bits = _stream(base, _SIGN_START, CHUNK // 64)
    keys = (t.to(device) for t in (v0, v1, u, sign_bits))
    return Tables(seed, *keys)
