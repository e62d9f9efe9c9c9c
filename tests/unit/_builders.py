"""Pictures of a parameter at one check, as vectors of each rank, and a driver that feeds them to a `Diagnosis`.

A `Picture` is turned into what the two tiers would have seen: `observed` works out the reduced
columns and `gathered` the evidence, in plain Python and independent of the order of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tpwatch.config import Config
from tpwatch.diagnose import Diagnosis, Outcome, When
from tpwatch.records import Evidence, Finding, PointSpread, ReplicaSpec, RowObservation, Spread, WatchPlan

Vector = tuple[float, ...]
Vectors = Sequence["Vector | None"]
"""One vector per rank, in group order; None where a rank has no gradient."""

GRADIENT: Vector = (0.5, -1.25, 2.0, 0.75)
VALUE: Vector = (1.0, 2.0, -3.0, 4.0)
ZERO: Vector = (0.0, 0.0, 0.0, 0.0)

ROUNDING = 2.0**-20
"""Relative tolerance of a residual in exact evidence."""


# ------------------------------------------------------------------------- gradients before a reduction


def copies(size: int = 2, vector: Vector = GRADIENT) -> list[Vector]:
    """Bit-identical on every rank."""
    return [vector] * size


def apart(size: int = 2, by: float = 1e-3, vector: Vector = GRADIENT) -> list[Vector]:
    """Copies of which each rank's second element is another multiple of `by` too large."""
    return [(vector[0], vector[1] + rank * by, *vector[2:]) for rank in range(size)]


def partials(size: int = 2) -> list[Vector]:
    """Different tensors: their deviation is that of independent ones."""
    return [tuple(math.sin(1.7 * (rank + 1) * (i + 1)) for i in range(4)) for rank in range(size)]


def akin(deviation: float) -> list[Vector]:
    """Two ranks' tensors of exactly this relative deviation: u + d v and u - d v for orthogonal u, v."""
    # deviation^2 = d^2 / (1 + d^2) for unit u and v
    d = deviation / math.sqrt(1.0 - deviation**2)
    return [(1.0, d, 0.0, 0.0), (1.0, -d, 0.0, 0.0)]


# --------------------------------------------------------------------------------------- one picture


@dataclass(frozen=True)
class Picture:
    """One parameter at one check: what each rank holds at the three observation points."""

    before: Vectors
    after: Vectors
    values: Vectors = ()
    in_scope: bool = True

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return len(self.before)

    @property
    def held(self) -> Vectors:
        """The values, by default copies."""
        return self.values or [VALUE] * self.size


def kept(before: Vectors, **changes: Any) -> Picture:
    """No reduction."""
    return Picture(before, before, **changes)


def times(factor: float, before: Vectors, **changes: Any) -> Picture:
    """Every rank's own gradient, multiplied."""
    return Picture(before, [v and tuple(factor * x for x in v) for v in before], **changes)


def summed(before: Vectors, **changes: Any) -> Picture:
    """The sum over all ranks, on every rank."""
    return Picture(before, [total(before)] * len(before), **changes)


def averaged(before: Vectors, **changes: Any) -> Picture:
    """The mean over all ranks, on every rank."""
    mean = tuple(x / len(before) for x in total(before))
    return Picture(before, [mean] * len(before), **changes)


def in_camps(before: Vectors, camps: Sequence[Sequence[int]], **changes: Any) -> Picture:
    """The sum over each camp of positions, on each rank of it."""
    after = list(before)
    for camp in camps:
        for position in camp:
            after[position] = total([before[p] for p in camp])
    return Picture(before, after, **changes)


def total(vectors: Vectors) -> Vector:
    """Elementwise sum, the same in whatever order the ranks come."""
    return tuple(math.fsum(column) for column in zip(*(v for v in vectors if v is not None), strict=True))


def silent(size: int = 2, **changes: Any) -> Picture:
    """Zero everywhere, before and after."""
    return kept([ZERO] * size, **changes)


def outside(size: int = 2, **changes: Any) -> Picture:
    """Not handled by this finalizer call."""
    return kept([None] * size, in_scope=False, **changes)


# ----------------------------------------------------------------------------- what the tiers make of it


def observed(picture: Picture, index: int = 0, ranks: Sequence[int] = ()) -> RowObservation:
    """Tier 1: the reduced columns of the entry and the exit side."""
    ranks = ranks or range(picture.size)
    present = [picture.in_scope and v is not None for v in picture.before]
    absent = [rank for rank, there in zip(ranks, present, strict=True) if picture.in_scope and not there]
    own = list(zip(picture.before, picture.after, strict=True))
    fits = [_fit(before, after) for before, after in own]
    same = [_bits(before) == _bits(after) for before, after in own]
    return RowObservation(
        index=index, param=_point(picture.held), pre=_point(picture.before), post=_point(picture.after),
        in_scope=picture.in_scope, present_lo=all(present), present_hi=any(present), absent=tuple(absent),
        kept_lo=all(same), kept_hi=any(same),
        scale_lo=min(f[0] for f in fits), scale_hi=max(f[0] for f in fits), residual_hi=max(f[1] for f in fits),
    )  # fmt: skip


def gathered(
    picture: Picture, index: int = 0, ranks: Sequence[int] = (), *, exact: bool = True, values: bool = True
) -> Evidence:
    """Tier 2: what a gather of the rows, and of the elements where `exact`, would show."""
    ranks = tuple(ranks or range(picture.size))
    before, after = [_full(v) for v in picture.before], [_full(v) for v in picture.after]
    summands = total(before)
    mean = tuple(x / len(before) for x in summands)
    length = math.sqrt(math.fsum(_square(v) for v in after) / len(after))
    return Evidence(
        index=index, exact=exact,
        deviation_param=_deviation([_full(v) for v in picture.held]),
        deviation_pre=_deviation(before), deviation_post=_deviation(after),
        residual_sum=_residual(after, summands, length), residual_avg=_residual(after, mean, length),
        tolerance=ROUNDING,
        norms_pre=tuple(math.sqrt(_square(v)) for v in before),
        norms_post=tuple(math.sqrt(_square(v)) for v in after),
        zero_ranks=tuple(r for r, v in zip(ranks, before, strict=True) if not any(v)),
        camps_param=_camps(picture.held, ranks), camps_post=_camps(picture.after, ranks),
        param=_spread(picture.held) if values else None, post=_spread(picture.after),
    )  # fmt: skip


def _full(vector: Vector | None) -> Vector:
    return tuple(x if math.isfinite(x) else 0.0 for x in vector or ZERO)


def _bits(vector: Vector | None) -> tuple[str, ...]:
    return tuple(float(x).hex() for x in vector or ZERO)


def _square(vector: Vector) -> float:
    return math.fsum(x * x for x in vector)


def _distance(a: Vector, b: Vector) -> float:
    return math.sqrt(math.fsum((x - y) ** 2 for x, y in zip(a, b, strict=True)))


def _point(vectors: Vectors) -> PointSpread:
    squares = [_square(_full(v)) for v in vectors]
    largest = [max(abs(x) for x in _full(v)) for v in vectors]
    nonfinite = [sum(not math.isfinite(x) for x in v or ()) for v in vectors]
    same = len({_bits(v) for v in vectors}) == 1
    return PointSpread(same, min(squares), max(squares), min(largest), max(largest), min(nonfinite), max(nonfinite))


def _fit(before: Vector | None, after: Vector | None) -> tuple[float, float]:
    """Least-squares factor of own after = c * own before, and its relative residual."""
    x, y = _full(before), _full(after)
    square = _square(x)
    c = math.fsum(a * b for a, b in zip(x, y, strict=True)) / square if square else 0.0
    left = _distance(y, tuple(c * a for a in x))
    return c, left / math.sqrt(_square(y)) if left else 0.0


def _deviation(vectors: Sequence[Vector]) -> float:
    squares = math.fsum(_square(v) for v in vectors)
    mean = tuple(x / len(vectors) for x in total(vectors))
    return math.sqrt(math.fsum(_distance(v, mean) ** 2 for v in vectors) / squares) if squares else 0.0


def _residual(after: Sequence[Vector], expected: Vector, length: float) -> float:
    worst = max(_distance(v, expected) for v in after)
    return 0.0 if worst == 0.0 else worst / length if length else math.inf


def _camps(vectors: Vectors, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    camps: dict[tuple[str, ...], list[int]] = {}
    for rank, vector in zip(ranks, vectors, strict=True):
        camps.setdefault(_bits(vector), []).append(rank)
    return tuple(sorted((tuple(c) for c in camps.values()), key=lambda c: (-len(c), c[0])))


def _spread(vectors: Vectors) -> Spread:
    columns = list(zip(*(_full(v) for v in vectors), strict=True))
    gaps = [max(c) - min(c) for c in columns]
    sizes = [max(abs(max(c)), abs(min(c))) for c in columns]
    relative = max((g / s for g, s in zip(gaps, sizes, strict=True) if s > 0), default=0.0)
    return Spread(max(gaps), relative, sum(g > 0 for g in gaps), len(gaps), math.sqrt(math.fsum(g * g for g in gaps)))


# ---------------------------------------------------------------------------------------- plan and driver


def spec(name: str, **changes: Any) -> ReplicaSpec:
    """A replica of four elements whose gradient is marked to be summed, though not by the user."""
    return replace(ReplicaSpec(name, (4,), "float32", 0, 4, "sum"), **changes)


def plan_of(*specs: ReplicaSpec | str, size: int = 2) -> WatchPlan:
    """A plan over ranks 0 to `size` - 1."""
    return WatchPlan("tp", tuple(range(size)), tuple(spec(s) if isinstance(s, str) else s for s in specs))


@dataclass
class Run:
    """One replica group that trains: each step hands pictures to a `Diagnosis`, and evidence where it asked for it."""

    plan: WatchPlan
    config: Config = field(default_factory=Config)
    loss_scaler: bool = False
    exact: bool = True
    """Whether tensors are small enough to be gathered whole; else evidence is sketched."""
    fits: bool = True
    """Whether the elements of values fit the byte budget of a gather."""
    leaves_out_settled: bool = False
    """Hand over only rows that changed, are unsettled or have evidence, as the monitor does."""
    pristine: bool = True
    done: int = 0
    """The last step."""

    def __post_init__(self) -> None:
        self.diagnosis = Diagnosis(self.plan, self.config, loss_scaler=self.loss_scaler)
        self.asked: list[dict[int, tuple[bool, bool]]] = []
        self._signatures: dict[int, dict[int, object]] = {}

    def step(self, *pictures: Picture, call: int = 1, number: int | None = None) -> Outcome:
        """One call of the finalizer; call 1 begins a step."""
        if number is not None or call == 1:
            self.done = self.done + 1 if number is None else number
        at = When(self.done, call, update=self.done - 1, pristine=self.pristine)
        outcome = self._check(at, pictures)
        self.pristine = False
        return outcome

    def steps(self, count: int, *pictures: Picture | Callable[[int], Picture]) -> list[Outcome]:
        """`count` equal steps, or steps of pictures that depend on the step."""
        outcomes = []
        for _ in range(count):
            now = [p(self.done + 1) if callable(p) else p for p in pictures]
            outcomes.append(self.step(*now))
        return outcomes

    def values(self, *pictures: Picture) -> Outcome:
        """A comparison of values alone, after the last step."""
        at = When(self.done, call=0, update=self.done, pristine=self.pristine)
        return self._check(at, [outside(p.size, values=p.held) for p in pictures])

    def _check(self, at: When, pictures: Sequence[Picture]) -> Outcome:
        wanted = self.diagnosis.wanted(at.step, at.call) if at.call else ()
        self.asked.append({t.index: (t.values, t.gradients) for t in wanted})
        evidence = {
            t.index: gathered(
                pictures[t.index], t.index, self.plan.ranks, exact=self.exact, values=t.values and self.fits
            )
            for t in wanted
        }
        rows = [observed(p, i, self.plan.ranks) for i, p in enumerate(pictures)]
        return self.diagnosis.observe(at, self._handed_over(at, rows, evidence), evidence)

    def _handed_over(
        self, at: When, rows: list[RowObservation], evidence: Mapping[int, Evidence]
    ) -> list[RowObservation]:
        if not self.leaves_out_settled:
            return rows
        last = self._signatures.get(at.call, {})
        now: dict[int, object] = {row.index: signature(row) for row in rows}
        self._signatures[at.call] = now
        unsettled = self.diagnosis.unsettled(at.call)
        return [r for r in rows if now[r.index] != last.get(r.index) or r.index in unsettled or r.index in evidence]

    @property
    def findings(self) -> list[Finding]:
        """All findings, causes first."""
        return self.diagnosis.findings

    @property
    def only(self) -> Finding:
        """The one and only finding."""
        (finding,) = self.diagnosis.findings
        return finding

    @property
    def named(self) -> dict[str, str]:
        """Kind of the finding of each parameter that has one."""
        return {f.parameter: f.kind for f in self.diagnosis.findings}


def signature(row: RowObservation) -> object:
    """What the rules branch on: a settled row is left out while this stays as it is."""
    points = (row.param, row.pre, row.post)
    factor = round(row.scale_hi * 16) if row.pre.same else 0
    return (
        [p.same for p in points], [p.absmax_hi == 0.0 for p in points], [p.nonfinite_hi > 0 for p in points],
        row.in_scope, row.present_lo, row.present_hi, row.kept_lo, row.kept_hi, row.residual_hi > 0.05, factor,
    )  # fmt: skip


def watched(*specs: ReplicaSpec | str, size: int = 2, **changes: Any) -> Run:
    """A run of a fresh diagnosis; without `specs`, of one parameter `p`."""
    return Run(plan_of(*(specs or ("p",)), size=size), **changes)
