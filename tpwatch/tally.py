"""One check, summed up: the `StepReport` that is recorded and that users see.

Knows what a check has spent, seen and found; decides nothing, sends nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tpwatch.diagnose import Outcome
from tpwatch.parts import Check, Parts
from tpwatch.records import Evidence, StepReport
from tpwatch.reduced import Reduced


def tally(
    check: Check, parts: Parts, reduced: Reduced, evidence: Mapping[int, Evidence], outcome: Outcome
) -> StepReport:
    """Sum up a check whose verdict has been made."""
    exchange, holding = parts.exchange, parts.diagnosis.holding
    sent, (ratio_lo, ratio_hi) = exchange.collectives - check.collectives_before, reduced.ratios()
    spreads = [e.param for e in evidence.values() if e.param]
    return StepReport(
        step=check.at.step,
        call=check.at.call,
        new=outcome.new,
        active=len(holding),
        differing=reduced.differing(),
        max_abs=max((s.max_abs for s in spreads), default=0.0),
        max_rel=max((s.max_rel for s in spreads), default=0.0),
        seconds=check.seconds,
        step_seconds=check.step_seconds,
        collectives=sent - check.deep,
        deep_collectives=check.deep,
        bytes_exchanged=exchange.bytes - check.bytes_before,
        skipped=outcome.skipped,
        phases=check.phases,
        ratio_lo=ratio_lo,
        ratio_hi=ratio_hi,
        faults=Counter(f"{f.kind}@{f.point}" for f in holding if f.counts),
    )
