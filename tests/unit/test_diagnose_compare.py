"""What one check shows of one parameter: the pattern of the reduced data, and what a gather adds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit._builders import (
    GRADIENT,
    ZERO,
    Picture,
    Vector,
    apart,
    averaged,
    copies,
    gathered,
    in_camps,
    kept,
    observed,
    outside,
    partials,
    silent,
    summed,
    times,
)
from tpwatch.diagnose import compare

ONE_ULP = tuple(x * (1 + 2.0**-52) for x in GRADIENT)

PATTERNS: dict[str, list[Picture]] = {
    "outside": [outside(), outside(4)],
    "absent": [kept([None, None])],
    "uneven": [kept([GRADIENT, None]), kept([None, ZERO, ZERO]), summed([GRADIENT, None, GRADIENT])],
    "silent": [silent(), silent(8)],
    "woken": [Picture([ZERO] * 2, copies()), Picture([ZERO] * 2, [ZERO, (1e-300, 0.0, 0.0, 0.0)])],
    "copies/kept": [kept(copies()), averaged(copies(3)), times(1.01, copies())],
    "copies/sum": [summed(copies()), summed(copies(8)), times(4.05, copies(4))],
    "copies/scaled": [times(0.5, copies()), times(2.0, copies(4)), in_camps(copies(4), [[0, 1, 2]])],
    "copies/other": [Picture(copies(), [(2.0, 1.0, -1.0, 0.5)] * 2)],
    "different/kept": [kept(partials()), kept(apart(3)), kept([GRADIENT, ONE_ULP]), kept([ZERO, GRADIENT])],
    "different/changed": [
        summed(partials()),
        averaged(apart()),
        summed([ZERO, GRADIENT]),
        in_camps(partials(4), [[0, 1], [2, 3]]),
        Picture(partials(), [partials()[0], GRADIENT]),
    ],
}


@pytest.mark.parametrize(
    ("pattern", "picture"),
    [
        pytest.param(name, picture, id=f"{name} {i}")
        for name, cases in PATTERNS.items()
        for i, picture in enumerate(cases)
    ],
)
def test_the_pattern_of_a_picture(pattern: str, picture: Picture) -> None:
    """Each picture has the pattern it is listed under."""
    assert compare.pattern(observed(picture), picture.size) == pattern


@pytest.mark.parametrize(
    ("size", "factor", "pattern"),
    [
        (2, 1.019, "copies/kept"),
        (2, 0.981, "copies/kept"),
        (2, 1.021, "copies/scaled"),
        (2, 0.979, "copies/scaled"),
        (2, 1.961, "copies/sum"),
        (2, 2.039, "copies/sum"),
        (2, 1.959, "copies/scaled"),
        (8, 8.1, "copies/sum"),
        (8, 7.8, "copies/scaled"),
    ],
)
def test_a_factor_is_one_or_the_size_within_two_per_cent(size: int, factor: float, pattern: str) -> None:
    """Rounding of a narrow type stays inside, another reduction outside."""
    assert compare.pattern(observed(times(factor, copies(size))), size) == pattern


def test_every_rank_must_show_the_factor() -> None:
    """One rank that was not summed makes it no sum."""
    lopsided = Picture(copies(), [GRADIENT, tuple(2 * x for x in GRADIENT)])
    assert compare.pattern(observed(lopsided), 2) == "copies/scaled"


@pytest.mark.parametrize(("residual", "pattern"), [(0.049, "copies/sum"), (0.051, "copies/other")])
def test_a_multiple_leaves_a_small_residual(residual: float, pattern: str) -> None:
    """Beyond five per cent the result is no multiple of what was there before."""
    seen = replace(observed(summed(copies())), residual_hi=residual)
    assert compare.pattern(seen, 2) == pattern


def test_one_rank_left_alone_is_not_left_alone() -> None:
    """`kept` is said of all ranks."""
    seen = observed(Picture(partials(), [partials()[0], GRADIENT]))
    assert (seen.kept_lo, seen.kept_hi) == (False, True)
    assert compare.pattern(seen, 2) == "different/changed"


def test_idle_patterns_carry_no_evidence() -> None:
    """Those without a gradient in this call; a gradient that exists on some ranks is evidence."""
    idle = {name for name in PATTERNS if name in compare.IDLE}
    assert idle == compare.IDLE == {"outside", "absent", "silent"}


# ---------------------------------------------------------------------------------------------- kinship


@pytest.mark.parametrize(
    ("deviation", "kinship"),
    [
        (0.0, "near-copies"),
        (0.0299, "near-copies"),
        (0.03, "undecided"),
        (0.1, "undecided"),
        (0.1001, "partials"),
        (1.0, "partials"),
        (None, "undecided"),
    ],
)
def test_kinship_has_two_edges(deviation: float | None, kinship: str) -> None:
    """Copies below, different tensors above; between them, and without a gather, nothing is claimed."""
    assert compare.kinship(deviation) == kinship


# -------------------------------------------------------------------------------------------- reductions

REDUCED: dict[str, tuple[Picture, str]] = {
    "sum of partials": (summed(partials(4)), "sum"),
    "mean of partials": (averaged(partials(4)), "avg"),
    "sum of near copies": (summed(apart()), "sum"),
    "mean of near copies": (averaged(apart()), "avg"),
    "left alone": (kept(partials()), "other"),
    "sum over camps": (in_camps(partials(4), [[0, 1], [2, 3]]), "other"),
    "sum of what cancels": (summed([GRADIENT, tuple(-x for x in GRADIENT)]), "ambiguous"),
}


@pytest.mark.parametrize("exact", [True, False], ids=["elements", "sketches"])
@pytest.mark.parametrize(("picture", "reduction"), REDUCED.values(), ids=REDUCED)
def test_the_reduction_is_told_from_gathered_tensors(picture: Picture, reduction: str, *, exact: bool) -> None:
    """What came out is compared with the sum and with the mean of what went in."""
    assert compare.reduction(gathered(picture, exact=exact)) == reduction


@pytest.mark.parametrize(
    ("exact", "tolerance", "residual", "reduction"),
    [
        (True, 0.001, 0.001, "sum"),
        (True, 0.001, 0.0011, "other"),
        (False, 0.001, 0.05, "sum"),
        (False, 0.001, 0.051, "other"),
        (False, 0.2, 0.2, "sum"),
        (False, 0.2, 0.21, "other"),
    ],
)
def test_residuals_have_a_tolerance(*, exact: bool, tolerance: float, residual: float, reduction: str) -> None:
    """Elements may be off by rounding, sketches by five per cent at least."""
    evidence = gathered(summed(partials()), exact=exact)
    assert compare.reduction(replace(evidence, tolerance=tolerance, residual_sum=residual)) == reduction


# ------------------------------------------------------------------------------------------------- votes


@pytest.mark.parametrize(
    ("camps", "odd"),
    [
        ([], ()),
        ([(0, 1, 2, 3)], ()),
        ([(0,), (1,)], ()),
        ([(0, 1), (2,)], (2,)),
        ([(0, 3), (1, 2)], ()),
        ([(1, 2, 3), (0,)], (0,)),
        ([(4, 5, 6, 7, 8), (3,), (1, 2)], (1, 2, 3)),
        ([(4, 5, 6), (3,), (1, 2)], ()),
    ],
)
def test_only_a_strict_majority_outvotes(camps: list[Vector], odd: tuple[int, ...]) -> None:
    """More than half of all ranks; the others come in order."""
    assert compare.outvoted(tuple(camps)) == odd


@pytest.mark.parametrize(
    ("values", "median"), [([], None), ([3.0], 3.0), ([3.0, 1.0], 1.0), ([9.0, 1.0, 2.0], 2.0), ([4, 1, 3, 2], 2)]
)
def test_the_lower_median(values: list[float], median: float | None) -> None:
    """One outlier does not move it, and of two middle ones the lower counts."""
    assert compare.median(values) == median
