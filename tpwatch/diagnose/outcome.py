"""What a check is called, and what it changed. Pure and torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from tpwatch.records import Finding


@dataclass(frozen=True, slots=True)
class When:
    """Where in the run one check stands."""

    step: int
    call: int = 1
    """Number of the finalizer call within the step; 0 for a comparison of values alone."""
    update: int = 0
    """The update that produced the values seen; 0 for the initial values."""
    pristine: bool = False
    """True if the optimizer has not stepped since attach."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one check changed."""

    new: tuple[Finding, ...] = ()
    """Findings confirmed, or worse than before, at this check."""
    grown: tuple[Finding, ...] = ()
    """Findings worth writing down again: their count or spread has doubled since they were last written."""
    skipped: bool = False
    judged: int = 0
    """Rows that were looked at."""
