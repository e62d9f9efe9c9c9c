"""How often a group checks: the configured schedule, stretched while checks cost more than the user allows.

Whether a step is checked must be the same on every rank. The schedule depends on the step number; the cost is local, so
it only raises a flag in the header of the next buffer, and the ranks that read it there agree to stretch together.
"""

from __future__ import annotations

from collections import deque

from tpwatch.config import Config

WINDOW = 8
"""Checks over which the cost is averaged: one slow check (a page fault, a busy neighbour) is not a trend."""

LONGEST = 4096
"""The interval is not stretched beyond this many steps."""


class Pace:
    """The schedule of one replica group."""

    def __init__(self, config: Config) -> None:
        """Start with the configured schedule."""
        self._config = config
        self.start = config.start_step
        """The last step before the first watched one: in a resumed run not 0, and the same on every rank."""
        self._budget = config.max_overhead
        self._spent: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self.interval = config.interval
        self._stretched = False

    def due(self, step: int) -> bool:
        """True if `step` is to be checked. The same on all ranks; stretching ends the warm-up."""
        if not self._stretched:
            return self._config.checked(step, self.start)
        return step % self.interval == 0

    def spend(self, check_seconds: float, step_seconds: float) -> None:
        """Remember what a check cost on this rank, and how long the step before it took (0 if unknown)."""
        if step_seconds > 0.0:
            self._spent.append((check_seconds, step_seconds * self.interval))

    @property
    def slow(self) -> bool:
        """True if, on this rank, the last checks took more than the budget of all steps they stood for."""
        if self._budget is None or len(self._spent) < WINDOW or self.interval >= LONGEST:
            return False
        checks = sum(check for check, _ in self._spent)
        steps = sum(step for _, step in self._spent)
        return checks > self._budget * steps

    def stretch(self) -> str:
        """Double the interval, because some rank was slow; returns the note to write down."""
        self.interval = min(LONGEST, 2 * self.interval)
        self._stretched = True
        self._spent.clear()
        return f"checks took more than {self._budget:.2%} of step time: every {self.interval} steps from here on"
