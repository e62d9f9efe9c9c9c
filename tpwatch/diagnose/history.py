"""What earlier checks showed about one parameter: streaks, first times, and how its spread grew.

Pure and torch-free, and independent of the rank it runs on: it is fed reduced or gathered data
only, so that every rank of a group holds the same history and reaches the same verdict.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
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

RECENT = 3
"""Gathers that must agree on the applied reduction."""

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
    decisive: int = 0
    """Those of them that saw a gradient: only they can tell which reduction was applied."""
    exercised: bool = False
    copies_at: int | None = None
    """First check at which value and gradient, before and after the reduction, were bit-identical copies and the
    gradient was not zero."""
    diverged_at: int | None = None
    """First step whose reduced gradient was not bit-identical, in whichever finalizer call."""
    parted_since: int = 0
    parted_streak: int = 0
    """First step and number of the exercised checks in a row whose reduced gradient was not bit-identical."""
    values_were_equal: bool = False
    """True once values were seen bit-identical: only then can something have set them apart."""
    values_differ_at: int | None = None
    """First update (0 = initial values) after which values were not bit-identical."""
    born_different: bool = False
    """True if the values already differed before anything that was watched could have moved them
    apart."""
    values_equal_at_onset: bool = True
    deviations: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    reductions: deque[compare.Reduction] = field(default_factory=lambda: deque(maxlen=RECENT))
    """The latest gathers only: a reduction that changes in mid-run is to be named, not outvoted by its past."""
    spreads: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    """Euclidean norm of the elementwise spread of the values, one per gather.

    Not max_abs: in bf16 that is one ULP of the largest element from the first flip on, however many
    follow."""
    deviating: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    """Relative spread of the values by sketch, one per gather that had no room for the elements: the trend of tensors
    above `explain.gather_bytes`."""
    nonfinite_streak: int = 0
    nonfinite_since: int = 0
    nonfinite_point: str = ""
    """Step and observation point at which the current non-finite streak began."""
    last: RowObservation | None = None
    evidence: Evidence | None = None
    """The latest evidence of the current suspicion."""

    def advance(self, suspicion: str, step: int, check: int, seen: RowObservation) -> None:
        """Continue the current suspicion, or begin another one at `step`."""
        self.last = seen
        if suspicion == self.suspicion:
            self.streak += 1
            return
        self.suspicion, self.since, self.since_check = suspicion, step, check
        self.streak, self.gathers, self.decisive = 1, 0, 0
        self.values_equal_at_onset = seen.param.same
        self.deviations.clear()
        self.reductions.clear()
        self.evidence = None

    def learn(self, evidence: Evidence, at: tuple[int, int], *, idle: bool = False) -> None:
        """Add what tier 2 gathered.

        Deviation, applied reduction, and the elementwise spread of the values. `at` is the step and the check. In an
        `idle` step there was no gradient: what is known about it stays.
        """
        self.gathers += 1
        if evidence.param is not None:
            self.spreads.append(evidence.param.l2)
        elif evidence.deviation_param > 0.0:
            self.deviating.append(evidence.deviation_param)
        if idle:
            self._learn_values(evidence)
            return
        self.evidence = evidence
        self.decisive += 1
        if evidence.deviation_pre > 0.0:
            self.deviations.append(evidence.deviation_pre)
            self._learn_reduction(compare.reduction(evidence), at)

    def _learn_reduction(self, applied: compare.Reduction, at: tuple[int, int]) -> None:
        """Another reduction than before is another explanation: it began no earlier than where it was first seen."""
        if self.reductions and self.reductions[-1] != applied:
            self.since, self.since_check = at
            self.streak = 1
        self.reductions.append(applied)

    def _learn_values(self, evidence: Evidence) -> None:
        known = self.evidence or replace(evidence, zero_ranks=())
        self.evidence = replace(
            known,
            deviation_param=evidence.deviation_param,
            camps_param=evidence.camps_param,
            param=evidence.param or known.param,
        )

    def note_parted(self, step: int, *, same: bool) -> None:
        """Continue or end the row of checks whose reduced gradient is not the same on all ranks."""
        if not self.parted_streak:
            self.parted_since = step
        self.parted_streak = 0 if same else self.parted_streak + 1

    def note_nonfinite(self, seen: RowObservation, step: int, update: int) -> None:
        """Continue the streak of non-finite steps, or begin it; a value is dated to the update that made it."""
        self.nonfinite_streak += 1
        if self.nonfinite_streak > 1:
            return
        points = {"param": seen.param, "grad_pre": seen.pre, "grad_post": seen.post}
        self.nonfinite_point = next(name for name, p in points.items() if p.nonfinite_hi > 0)
        self.nonfinite_since = update if self.nonfinite_point == "param" else step

    @property
    def gradients(self) -> compare.Gradients:
        """Kinship of the gradients before the reduction, by the median deviation gathered so far.

        A step without gradients, or one in which they happen to be equal, makes no copies of known partials.
        """
        if not self.deviations and self.last is not None and self.last.pre.same:
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
        series = list(self.spreads or self.deviating)
        if len(series) < TREND:
            return "constant"
        first, *earlier, last = series
        typical = compare.median([first, *earlier])
        if typical and last > JUMP * typical:
            return "jump"
        return "growing" if last >= GROWTH * first and rising(series) >= ORDERED else "constant"


def rising(series: list[float]) -> float:
    """Share of pairs (i < j) of a series of two or more with x_i < x_j; ties count half."""
    pairs = list(combinations(series, 2))
    return sum(1.0 if a < b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)
