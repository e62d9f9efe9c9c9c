"""What is done about findings: log, warn, tell a listener, or stop the run.

Pure: decides and formats, raises nothing itself.

Knows records and configuration, not torch and not where findings came from.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from tpwatch._guard import say
from tpwatch.config import STOPPING, Action, Config
from tpwatch.records import Finding

ABORT_EXIT_CODE = 86
"""Exit code of a run that tpwatch stopped (16 and 17 are Megatron's own; torchrun itself returns
1)."""

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def action(finding: Finding, config: Config) -> Action:
    """What the user wants done about a finding: the last matching policy, else `on_fault`."""
    text = f"{finding.kind}:{finding.severity}@{finding.parameter}"
    matching = [do for pattern, do in config.policies.items() if fnmatchcase(text, pattern)]
    return matching[-1] if matching else config.on_fault


def announce(finding: Finding, config: Config) -> None:
    """Write one log line about a new or worsened finding, as its action says."""
    wanted = action(finding, config)
    if wanted in ("ignore", "callback"):
        return
    level = logging.INFO if wanted == "log" else _LEVELS[finding.severity]
    if finding.role == "consequence":
        level = min(level, logging.INFO)
    say(level, "%s", headline(finding))


def told(findings: Iterable[Finding], config: Config) -> tuple[Finding, ...]:
    """The findings that listeners hear of, in the order given: all but those to be ignored."""
    return tuple(f for f in findings if action(f, config) != "ignore")


def headline(finding: Finding) -> str:
    """One line an on-call person can act on: what, which parameter, since when, where, how sure."""
    measure = f"max abs {finding.max_abs:.3g}; " if finding.max_abs else ""  # 0 where none was measured, too
    if finding.ratio is not None:
        measure = f"ratio {finding.ratio:.4g}; "
    odd = f", odd ranks {list(finding.odd_ranks)}" if finding.odd_ranks else ""
    return (
        f"[{finding.code}] {finding.kind}: {finding.parameter} since step {finding.first_step}"
        f" ({measure}observed {finding.observed}, expected {finding.expected}; ranks"
        f" {list(finding.ranks)}{odd}; confidence {finding.confidence:.2f}). {finding.advice}"
    )


def must_stop(findings: Iterable[Finding], config: Config) -> tuple[Finding, ...]:
    """The findings that ask for the run to be stopped, in the order given.

    A confirmed cause of warning or error whose action stops. Where the user set a threshold on the spread of values,
    drift asks only past that threshold: drift below it is what the user said they can live with.
    """
    limits = config.thresholds
    limited = limits.max_abs is not None or limits.max_rel is not None
    return tuple(
        f
        for f in findings
        if f.counts
        and action(f, config) in STOPPING
        and not (limited and f.kind == "drift" and "threshold" not in f.evidence)
    )


def wants_checkpoint(findings: Iterable[Finding], config: Config) -> bool:
    """True if one of the findings that stop the run asks for a checkpoint first."""
    return any(action(f, config) == "checkpoint_then_abort" for f in findings)


def doubled(count: int) -> bool:
    """True for 1, 2, 4, 8, ...: what goes on and on is said again whenever there is twice as much of it."""
    return not count & (count - 1)


def listed(names: Sequence[str], most: int, between: str = ", ", last: str = " and ") -> str:
    """The first `most` names, and how many there are besides."""
    more = f"{last}{len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more
