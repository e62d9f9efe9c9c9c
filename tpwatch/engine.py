"""What a Watch drives on a rank that takes part, and what it asks of an adapter's seams.

Knows the shape of things only; when they are called is in `watch`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tpwatch._guard import Guard, say
from tpwatch.handshake import Assembly
from tpwatch.job import Job
from tpwatch.monitor import Monitor
from tpwatch.parts import Scope


class Seams(Protocol):
    """The places of a host that an adapter has wrapped."""

    def lost(self) -> bool:
        """True if the host has replaced a wrapper of ours since it was installed."""
        ...

    def reinstall(self) -> None:
        """Wrap what the host has put there."""
        ...

    def remove(self) -> Sequence[str]:
        """Put the host's own objects back.

        Return a note for each one that could only be made a pass-through.
        """
        ...

    def iteration(self) -> int | None:
        """The trainer's own number of the step under way, from 1, or None if it cannot be read."""
        ...

    def whole(self) -> Scope:
        """All model chunks."""
        ...


@dataclass(frozen=True, slots=True)
class Engine:
    """What a Watch drives, on a rank that takes part."""

    monitor: Monitor
    job: Job | None
    """The meeting of all ranks, where a policy can stop the run."""
    world: Assembly
    """All ranks of the job."""
    directory: str
    """The run directory."""
    close: Callable[[int], None]
    """Write the last word, given the last step, and close the log."""
    summarize: Callable[[], None]
    """Derive `summary.json` from the event files; does nothing but on rank 0."""

    def meet(self, what: str, guard: Guard, timeout: float, *, everyone: bool = False) -> bool:
        """Agree through the store, with the replica group or with the whole job, to do `what` now."""
        who = self.world if everyone else self.monitor.parts.assembly
        outcome = guard.attempt(f"meeting for {what}", who.agree_to, what, timeout)
        if outcome.value:
            say(logging.INFO, "tpwatch: no %s: %s", what, outcome.value)
        return outcome.value == ""
