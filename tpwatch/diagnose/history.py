"""What earlier checks showed about one parameter: streaks, first times, and how its spread grew.

Pure and torch-free, and independent of the rank it runs on: it is fed reduced or gathered data
only, so that every rank of a group holds the same history and reaches the same verdict.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import combinations

from tpwatch.diagnose import compare
from tpwatch.records import Evidence, RowObservation

GROWTH = 1.25
"""A growing spread has gained at least this factor over the window; below it lies the noise of a
constant one."""

ORDERED = 0.9
"""Share of pairs of the window in rising order (ties count half) from which a series is growing.

Kendall's rank correlation of 0.8. A single element that flips by one ULP and stays (1, 1, 1, 2)
scores 0.75, and four values in random order reach 0.9 once in 24 times, and then rarely gain
`GROWTH` too.
"""

JUMP = 10.0
"""A spread this many times the median of the earlier ones is a jump, not growth."""

TREND = 4
"""Observed spreads needed before a trend is read from them."""


@dataclass(slots=True)
class History:
    """Mutable memory of one replicated parameter. `step` arguments are optimizer steps."""

    suspicion: str = ""
    since: int = 0
    """First exercised step of the current suspicion: the retroactive `first_step` of what it turns
    out to be."""
    since_check: int = 0
    """The check at which the current suspicion began: orders faults whose step labels differ by
    convention."""
    streak: int = 0
    """Consecutive exercised checks that showed the current suspicion."""
    gathers: int = 0
    """Gathers (tier 2) since the current suspicion began."""
    exercised: bool = False
    copies_at: int | None = None
    """First check at which gradient and value were bit-identical copies and the gradient was not
    zero."""
    diverged_at: int | None = None
    """First step whose reduced gradient was not bit-identical though nothing was reduced."""
    values_differ_at: int | None = None
    """First update (0 = initial values) after which values were not bit-identical."""
    born_different: bool = False
    """True if the values already differed before anything that was watched could have moved them
    apart."""
    values_equal_at_onset: bool = True
    deviations: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    reductions: deque[compare.Reduction] = field(default_factory=lambda: deque(maxlen=16))
    spreads: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    """Euclidean norm of the elementwise spread of the values, one per gather.

    Not max_abs: in bf16 that is one ULP of the largest element from the first flip on, however many
    follow."""
    nonfinite_streak: int = 0
    last: RowObservation | None = None
    evidence: Evidence | None = None
    """The latest evidence of the current suspicion."""

    def advance(self, suspicion: str, step: int, check: int, seen: RowObservation) -> None:
        """Continue the current suspicion, or begin another one at `step`."""
        self.last = seen
        self.exercised = True
        if suspicion == self.suspicion:
            self.streak += 1
            return
        self.suspicion, self.since, self.since_check, self.streak, self.gathers = (
            suspicion,
            step,
            check,
            1,
            0,
        )
        self.values_equal_at_onset = seen.param.same
        self.deviations.clear()
        self.reductions.clear()
        self.evidence = None

    def learn(self, evidence: Evidence) -> None:
        """Add what tier 2 gathered.

        Deviation, applied reduction, and the elementwise spread of the values.
        """
        self.evidence = evidence
        self.gathers += 1
        if evidence.deviation_pre > 0.0:
            self.deviations.append(evidence.deviation_pre)
            self.reductions.append(compare.reduction(evidence))
        if evidence.param is not None:
            self.spreads.append(evidence.param.l2)

    @property
    def gradients(self) -> compare.Gradients:
        """Kinship of the gradients before the reduction, by the median deviation gathered so far."""
        if self.last is not None and self.last.pre.same:
            return "copies"
        return compare.kinship(compare.median(list(self.deviations)))

    @property
    def reduction(self) -> compare.Reduction:
        """The applied reduction if all gathers of the current suspicion agree, else ambiguous.

        Unknown without any.
        """
        decided = set(self.reductions)
        if not decided:
            return "unknown"
        return next(iter(decided)) if len(decided) == 1 else "ambiguous"

    @property
    def trend(self) -> str:
        """`constant`, `growing` or `jump`, from the elementwise spread of the values.

        `constant` until it is known.
        """
        if len(self.spreads) < TREND:
            return "constant"
        first, *earlier, last = self.spreads
        typical = compare.median([first, *earlier])
        if typical and last > JUMP * typical:
            return "jump"
        return "growing" if last >= GROWTH * first and rising(list(self.spreads)) >= ORDERED else "constant"


def rising(series: list[float]) -> float:
    """Share of pairs (i < j) of a series of two or more with x_i < x_j; ties count half."""
    pairs = list(combinations(series, 2))
    return sum(1.0 if a < b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)
