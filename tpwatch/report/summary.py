"""What a run comes to, recomputed from its event files alone (also after a kill -9).

Knows records and events; decides nothing that was not decided in the run: it merges what several
replica groups said of the same parameter, and counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

from tpwatch.export.rotation import THINNED, steps_thinned
from tpwatch.records import SEVERITIES, Finding, Severity, Summary, worst
from tpwatch.report.events import Event, RunEvents, parse_finding, read_events

UNMEASURED = "values differ, and how far was not measured at this check"
"""What it means that a row has no `max_abs`, for people."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """One checked step over all replica groups: the worst of each."""

    step: int
    differing: Mapping[str, int]
    """Replicas that are not bit-identical, per observation point."""
    max_abs: float | None
    max_rel: float | None
    """Largest difference between the copies of a value; None if values differ and none of them was gathered."""


def summarize(directory: str | os.PathLike[str]) -> Summary:
    """The summary of a run directory.

    Raises:
        RunDirectoryError: there is no such directory, or a newer tpwatch wrote it.
    """
    return summarize_events(read_events(directory))


def summarize_events(run: RunEvents) -> Summary:
    """The summary of events that were read already."""
    starts = [_last(events, "start") for events in run.groups.values()]
    statuses = [_last(events, "status") for events in run.groups.values()]
    findings = merged_findings(run)
    steps = max((_count(events, _steps(events)) for events in run.groups.values()), default=0)
    return Summary(
        verdict=_verdict(findings, steps),
        steps_checked=steps,
        replicas=len(_union(start.get("names", ()) for start in starts)),
        findings=findings,
        not_exercised=_union(status.get("not_exercised", ()) for status in statuses),
        overhead=overhead([event for _, event in run.of("check")]),
        unverified=_union(status.get("unverified", ()) for status in statuses),
        not_watched=_not_watched(starts),
        notes=_notes(run),
        groups=tuple(run.groups),
        aborted_at=_aborted_at(run),
    )


def equal_copies(finding: Finding) -> bool:
    """True for a double reduction of copies that agree: the one fault that no comparison can see.

    A `max_abs` of 0 alone does not say so: copies that differ may be too large to be measured, but have camps.
    """
    said = (finding.evidence, *finding.evidence.get("by_group", {}).values())
    parted = any(f"camps_{point}" in facts for facts in said for point in ("param", "grad_post"))
    return finding.kind == "double-reduce" and finding.max_abs == 0.0 and not parted


def fails(summary: Summary, level: Severity) -> bool:
    """True if a cause is at least as severe as `level`."""
    limit = SEVERITIES.index(level)
    causes = (f for f in summary.findings if f.role == "cause")
    return any(SEVERITIES.index(f.severity) >= limit for f in causes)


def timeline(run: RunEvents) -> tuple[StepRow, ...]:
    """One row per checked step, in order of steps."""
    rows: dict[int, StepRow] = {}
    for _, event in run.of("check"):
        step, seen = event["step"], event.get("differing", {})
        old = rows.get(step, StepRow(step, {}, 0.0, 0.0))
        points = {**old.differing, **seen}
        max_abs, max_rel = _measured(event)
        rows[step] = StepRow(
            step,
            {point: max(seen.get(point, 0), old.differing.get(point, 0)) for point in points},
            largest((old.max_abs, max_abs)),
            largest((old.max_rel, max_rel)),
        )
    return tuple(rows[step] for step in sorted(rows))


def _measured(check: Event) -> tuple[float | None, float | None]:
    """`max_abs` and `max_rel` of a check, or None for both.

    A check writes 0 where values are equal and where they differ and it gathered none of them.
    """
    measures = _number(check.get("max_abs", 0.0)), _number(check.get("max_rel", 0.0))
    return measures if any(measures) or not check.get("differing", {}).get("param") else (None, None)


def largest(measures: Iterable[float | None]) -> float | None:
    """The largest of several measures; None if one was not taken and the others are 0, which says nothing about it."""
    several = list(measures)
    return max(filter(None, several), default=None if None in several else 0.0)


# ------------------------------------------------------------------------------------ findings


def merged_findings(run: RunEvents) -> tuple[Finding, ...]:
    """One finding per kind and parameter; causes first, then by severity, first step and name."""
    # Within one start of a group the last line about a finding replaces the earlier ones.
    latest: dict[tuple[str, str], dict[tuple[str, str], Finding]] = {}
    for group, event in run.of("finding"):
        finding = parse_finding(event)
        if finding is not None:
            latest.setdefault(finding.key, {})[(group, str(event.get("incarnation")))] = finding
    return tuple(sorted((_merge(said) for said in latest.values()), key=_rank))


def _rank(finding: Finding) -> tuple[bool, int, int, str]:
    return (
        finding.role != "cause",
        -SEVERITIES.index(finding.severity),
        finding.first_step,
        finding.parameter,
    )


def _merge(by_source: Mapping[tuple[str, str], Finding]) -> Finding:
    """What several groups, or several starts of the job, said of the same fault, as one finding."""
    said = tuple(by_source.values())
    best = max(said, key=lambda f: (f.role == "cause", SEVERITIES.index(f.severity), f.confidence))
    return replace(
        best,
        group=",".join(sorted({f.group for f in said})),
        ranks=_ranks(f.ranks for f in said),
        first_step=min(f.first_step for f in said),
        last_step=max(f.last_step for f in said),
        count=max(f.count for f in said),
        severity=worst([f.severity for f in said]),
        confidence=max(f.confidence for f in said),
        max_abs=max(f.max_abs for f in said),
        max_rel=max(f.max_rel for f in said),
        odd_ranks=_ranks(f.odd_ranks for f in said),
        evidence=_evidence(best, {group: f for (group, _), f in by_source.items()}),
    )


def _evidence(best: Finding, by_group: Mapping[str, Finding]) -> Mapping[str, Any]:
    """Evidence of the best finding, rank lists united, and each group's own under `by_group`."""
    if len(by_group) == 1:
        return best.evidence
    facts = dict(best.evidence)
    for key in {key for f in by_group.values() for key in f.evidence if key.endswith("_ranks")}:
        facts[key] = list(_ranks(f.evidence.get(key, ()) for f in by_group.values()))
    facts["by_group"] = {group: dict(f.evidence) for group, f in by_group.items()}
    return facts


def _ranks(several: Iterable[Iterable[int]]) -> tuple[int, ...]:
    return tuple(sorted(set(chain.from_iterable(several))))


# -------------------------------------------------------------------------------------- counts


def _verdict(findings: Sequence[Finding], steps: int) -> Literal["clean", "faults", "nothing-checked"]:
    """A fault counts even if no check was completed: it may be what kept the first one from it."""
    if any(f.counts for f in findings):
        return "faults"
    return "clean" if steps else "nothing-checked"


def _steps(events: Iterable[Event]) -> set[int]:
    """Steps about which a verdict was made; a step that a loss scaler skipped is none."""
    return {e["step"] for e in events if e["event"] == "check" and not e.get("skipped")}


def _count(events: Iterable[Event], steps: set[int]) -> int:
    """Distinct steps: `steps`, and those whose checks were taken out of the early parts of a long event file."""
    marks = [e for e in events if e["event"] == THINNED]
    unnamed: int = sum(mark.get("steps", 0) for mark in marks if "runs" not in mark)
    return len(steps.union(*map(steps_thinned, marks))) + unnamed


def overhead(checks: Sequence[Event]) -> dict[str, float]:
    """Mean cost of a check; `step_fraction` is its share of the checked steps' own time.

    A comparison of values alone (call 0, at the end or before a save) is no check of a step.
    """
    checks = [c for c in checks if c.get("call") != 0]
    if not checks:
        return {}
    timed = [c for c in checks if c.get("step_seconds", 0.0) > 0.0]
    whole = sum(c["step_seconds"] for c in timed)
    return {
        "check_seconds_mean": _mean(checks, "seconds"),
        "step_fraction": sum(c.get("seconds", 0.0) for c in timed) / whole if whole else 0.0,
        "collectives_per_check": _mean(checks, "collectives"),
        "deep_collectives_per_check": _mean(checks, "deep_collectives"),
    }


def _mean(checks: Sequence[Event], key: str) -> float:
    mean: float = sum(c.get(key, 0) for c in checks) / len(checks)
    return int(mean) if mean == int(mean) else mean


def _number(value: object) -> float:
    """A measure as read; null stands for a number that was not finite."""
    if value is None:
        return float("inf")
    return float(value) if isinstance(value, (int, float)) else 0.0


def _last(events: Sequence[Event], kind: str) -> Event:
    return next((e for e in reversed(events) if e["event"] == kind), {})


def _union(several: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """Distinct names in the order they were first met, which is the order of the model."""
    return tuple(dict.fromkeys(chain.from_iterable(several)))


def _not_watched(starts: Iterable[Event]) -> tuple[tuple[str, str], ...]:
    pairs = chain.from_iterable(start.get("not_watched", ()) for start in starts)
    return tuple(dict.fromkeys((str(name), str(reason)) for name, reason in pairs))


def _notes(run: RunEvents) -> tuple[str, ...]:
    notes = [str(event.get("text", "")) for _, event in run.of("note")]
    notes += run.notes
    if not run.groups:
        notes.append("the directory holds no event files")
    for group, events in run.groups.items():
        if events and events[-1]["event"] not in ("end", "abort"):
            notes.append(f"{group}: no orderly end (it failed, was killed, or is still running)")
        if thinned := _count(events, set()):
            notes.append(
                f"{group}: the checks of {thinned} early steps are no longer in the event files, only their findings"
            )
        starts = len({e.get("incarnation") for e in events})
        if starts > 1:
            notes.append(f"{group}: the job was started {starts} times into this directory")
    return tuple(dict.fromkeys(notes))


def _aborted_at(run: RunEvents) -> int | None:
    """Step at which the latest start of the job was stopped, if it was."""
    steps = []
    for events in run.groups.values():
        latest = events[-1].get("incarnation") if events else None
        aborts = (e for e in events if e["event"] == "abort")
        steps += [e["step"] for e in aborts if e.get("incarnation") == latest]
    return min(steps, default=None)
