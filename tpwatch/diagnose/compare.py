"""What one check shows about one parameter.

How the gradients relate before the reduction, and what was done to them.

Pure and torch-free. States facts with their uncertainty; which of them is a fault is decided in
`judges`.
"""

from __future__ import annotations

from typing import Literal

from tpwatch.records import Evidence, RowObservation

Pattern = Literal[
    "outside", "absent", "uneven", "silent", "woken",
    "copies/kept", "copies/sum", "copies/scaled", "copies/other", "different/kept", "different/changed",
]  # fmt: skip
"""What the two reduced buffers alone show (tier 1).

`outside`: not handled by this finalizer call. `absent`: no gradient on any rank. `uneven`: on some
ranks only.
`silent`: exactly zero everywhere, before and after. `woken`: zero before, not after. `copies/...`:
bit-identical before, then left alone, multiplied by the group size, by another factor, or changed
beyond a factor.
`different/...`: not bit-identical before, then left alone on every rank or not.
"""

Gradients = Literal["copies", "near-copies", "partials", "undecided"]
Reduction = Literal["none", "sum", "avg", "other", "ambiguous", "unknown"]

IDLE: frozenset[str] = frozenset({"outside", "absent", "silent"})
"""Patterns that carry no evidence: such a step neither continues nor breaks a streak."""

NEAR_COPIES = 0.03
PARTIALS = 0.1
"""Deviations below the first are copies up to rounding, above the second different tensors, between
them undecided.

From the simulated quantiles of FINGERPRINTS D: copies with relative noise 1e-2 stay below 0.018 (99
%), independent partials are at 0.7 and more, partials with cosine 0.99 begin at 0.03.
"""

FACTOR_TOLERANCE = 0.02
"""Relative distance of a factor from 1 or N that rounding explains: bf16 sums of N <= 8 copies stay
below 2^-6."""

RESIDUAL_TOLERANCE = 0.05
"""Largest |post - c pre| / |post| that still counts as a multiple (FINGERPRINTS D, operator test)."""


def pattern(seen: RowObservation, group_size: int) -> Pattern:
    """Classify one observation from reduced data alone."""
    if not seen.in_scope:
        return "outside"
    if not seen.present_hi:
        return "absent"
    if not seen.present_lo:
        return "uneven"
    if seen.pre.silent:
        return "silent" if seen.post.silent else "woken"
    if not seen.pre.same:
        return "different/kept" if seen.kept_lo else "different/changed"
    return "copies/kept" if seen.kept_lo else _factor(seen, group_size)


def _factor(seen: RowObservation, group_size: int) -> Pattern:
    if seen.residual_hi > RESIDUAL_TOLERANCE:
        return "copies/other"
    if _near(seen, 1.0):
        return "copies/kept"
    return "copies/sum" if _near(seen, float(group_size)) else "copies/scaled"


def _near(seen: RowObservation, factor: float) -> bool:
    return all(abs(c / factor - 1.0) <= FACTOR_TOLERANCE for c in (seen.scale_lo, seen.scale_hi))


def kinship(deviation: float | None) -> Gradients:
    """Copies up to rounding, partials, or undecided, from the relative deviation over the group."""
    if deviation is None or NEAR_COPIES <= deviation <= PARTIALS:
        return "undecided"
    return "near-copies" if deviation < NEAR_COPIES else "partials"


def reduction(evidence: Evidence) -> Reduction:
    """Which reduction turned the gathered pre tensors into the gathered post tensors."""
    tolerance = max(RESIDUAL_TOLERANCE, evidence.tolerance) if not evidence.exact else evidence.tolerance
    fits_sum = evidence.residual_sum <= tolerance
    fits_avg = evidence.residual_avg <= tolerance
    if fits_sum and fits_avg:
        return "ambiguous"
    if fits_sum:
        return "sum"
    return "avg" if fits_avg else "other"


def outvoted(camps: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Ranks outside a strict majority camp.

    Empty if no camp has one (always so at two ranks that differ).
    """
    total = sum(len(camp) for camp in camps)
    if len(camps) < 2 or 2 * len(camps[0]) <= total:  # noqa: PLR2004 - a vote needs two sides
        return ()
    return tuple(sorted(rank for camp in camps[1:] for rank in camp))


def median(values: list[float]) -> float | None:
    """Lower median, or None of nothing."""
    return sorted(values)[(len(values) - 1) // 2] if values else None
