"""The shape of one fingerprint row, and the constants every implementation must agree on.

Knows: column names and order, chunk and row sizes, the clamp that keeps rows finite.
Must not know: torch, how a column is computed (`reference.py` is the specification), or what is
concluded from it.

One fingerprint is `ROW` float64 numbers, all finite by construction:

* ``hash_lo``, ``hash_hi``: low and high 32 bits of a 64-bit hash of the raw bytes, each exact in
  float64. Equal bytes of one dtype give equal hashes on every implementation. Compare both halves.
* ``l2``: *squared* Euclidean norm of the finite elements, at most `L2_MAX`.
* ``absmax``: largest magnitude among the finite elements, exact.
* ``nonfinite``: number of NaN and infinite elements; they count in no other column but the hash.
* ``zeros``: number of elements equal to zero (``-0.0`` counts; the hash tells it from ``0.0``).
* ``sketch_0`` ... ``sketch_15``: a linear map of the finite elements with the same random signs on
  every rank: ``sketch(a) + sketch(b) == sketch(a + b)``. Unscaled: the sum of the squares times
  `SKETCH_NORM` estimates ``l2`` (relative standard deviation about ``sqrt(2 / SKETCH)``, 35 %),
  and the same holds for differences of sketches.
"""

from __future__ import annotations

from typing import Final

CHUNK: Final = 65_536
"""Elements per chunk, whatever the dtype, so that bf16 and fp32 copies have comparable sketches."""

WORD_BYTES: Final = 8
"""Bytes of one hashed word, read little-endian."""

ROW_WORDS: Final = 512
"""Words per hashed row; the last row of a chunk is padded with zero bytes."""

ROW_BYTES: Final = ROW_WORDS * WORD_BYTES
"""Bytes per hashed row."""

FINE: Final = 64
"""Fine buckets in each of the two bucket sets of one chunk, before they are folded."""

GROUP: Final = 16
"""Neighbouring elements that share a fine bucket of the second set."""

SKETCH: Final = 16
"""Sketch coordinates; the first half folds the first bucket set, the second half the second."""

SKETCH_NORM: Final = 1.0 / SKETCH
"""Factor from the sum of squared sketch coordinates to an estimate of ``l2``."""

L2_MAX: Final = 1e300
"""Clamp of ``l2`` and of the sketch magnitudes: a row never holds an infinity."""

SEED: Final = 0x7470_7761_7463_6801
"""Default key seed. Every rank of a replica group must use the same."""

COLUMNS: Final[tuple[str, ...]] = (
    "hash_lo",
    "hash_hi",
    "l2",
    "absmax",
    "nonfinite",
    "zeros",
    *(f"sketch_{i}" for i in range(SKETCH)),
)
"""Names of the float64 columns of one row, in order."""

ROW: Final = len(COLUMNS)
"""Columns per row."""

HEAD: Final = 5
"""Leading columns that travel in the MAX exchange: hash_lo, hash_hi, l2, absmax, nonfinite."""
