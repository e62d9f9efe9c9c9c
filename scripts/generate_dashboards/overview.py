"""The first dashboard: is my run healthy, which kind of fault does it have, since when, what does watching cost?"""

from __future__ import annotations

from typing import Any

from panels import (
    BAD,
    CALM,
    OK,
    ONE_GROUP,
    UNKNOWN,
    WARN,
    Query,
    Sections,
    column,
    curves,
    limits,
    named,
    number,
    rows,
)
from queries import FAULTY_EVER, FAULTY_NOW, IN_CHECKS, PER_CHECK, RANGE, holding, known, latest, of, rate

from tpwatch.export import catalog

SILENT, BUDGET = 900, 0.01
"""Seconds without a check, and share of time, from which the alerts about them fire."""


def is_it_healthy() -> list[Any]:
    """What one has to know at three in the morning."""
    healthy = number(
        "Healthy?",
        "FAULTY while a confirmed fault holds in any replica group; of a run that has ended, as it stood last. Of one "
        "that has started again only the latest start counts.",
        "none",
        Query(f"max({latest(catalog.DRIFT_ACTIVE)})", now=True),
    )
    faulty = number(
        "Faulty parameters",
        "By kind of fault, in the replica group that has the most. What a kind means: `tpwatch explain KIND`.",
        "none",
        Query(f"max by (kind) (sum by (group, kind) ({FAULTY_NOW}))", "{{kind}}", now=True),
    )
    since = number(
        "First faulty step",
        "By kind of fault that holds. A checkpoint from before that step is not affected, if tpwatch watched from the "
        "start.",
        "none",
        Query(f"min by (kind) ({holding(catalog.FIRST_STEP)})", "{{kind}}", now=True),
    )
    last = f"({of(catalog.LAST_TIME)} or {of(catalog.START_TIME)})"
    silent = number(
        "Time since last check",
        "Of the group that is silent longest. Long: training hangs or pauses, or tpwatch is off. Not running: the run "
        "has ended, or its exporters do not answer.",
        "s",
        Query(f"max(time() - {last} and {of(catalog.WATCHING)} == 1)", now=True),
    )
    share = number(
        "Overhead",
        "Share of its time that the leader of the slowest group spends in checks, waiting for its peers included.",
        "percentunit",
        Query(f"max(sum by (group) ({IN_CHECKS}))"),
    )
    duration = number(
        "Time per check", "Host time of one check, in the slowest replica group.", "s", Query(f"max({PER_CHECK})")
    )
    healthy.mappings(named({"0": ("healthy", OK), "1": ("FAULTY", BAD)})).thresholds(limits(below=UNKNOWN))
    faulty.no_value("none").thresholds(limits((1, BAD), below=UNKNOWN))
    since.no_value("none").thresholds(limits((0, BAD), below=UNKNOWN))
    silent.no_value("not running").thresholds(limits((0, OK), (SILENT / 3, WARN), (SILENT, BAD), below=UNKNOWN))
    share.thresholds(limits((0, OK), (BUDGET, WARN), (10 * BUDGET, BAD), below=UNKNOWN))
    duration.thresholds(limits((0, CALM), below=UNKNOWN))
    return [panel.height(5).span(4) for panel in (healthy, faulty, since, silent, share, duration)]


def what_is_covered() -> list[Any]:
    """What `healthy` is worth."""
    compared = number(
        "Parameters compared",
        "Replicated parameters, in the group that has the fewest. At 0, `healthy` means nothing.",
        "none",
        Query(f"min({of(catalog.REPLICAS)})"),
    )
    asleep = number(
        "Not exercised",
        "Parameters whose gradient was never seen non-zero, in the group with the most: nothing is said about them.",
        "none",
        Query(f"max({of(catalog.NOT_EXERCISED)})"),
    )
    unverified = number(
        "Unverified",
        "Parameters whose reduction could not be decided so far, in the group with the most.",
        "none",
        Query(f"max({of(catalog.UNVERIFIED)})"),
    )
    losses = (catalog.EXPORTER_ERRORS, catalog.EXPORTER_DROPPED)
    lost = number(
        "Events lost by sinks",
        "Within the time range: failed or dropped. The event file in the run directory has them all.",
        "none",
        Query(" + ".join(f"sum(increase({of(metric)}[{RANGE}]))" for metric in losses), now=True),
    )
    compared.thresholds(limits((1, CALM), below=BAD))
    for panel in (asleep, unverified, lost):
        panel.thresholds(limits((0, CALM), (1, WARN), below=UNKNOWN))
    return [panel.height(3).span(6) for panel in (compared, asleep, unverified, lost)]


def since_when_and_where() -> list[Any]:
    """The course of it, and where to look next."""
    onset = curves(
        "Faulty replica groups",
        "Groups with a confirmed fault that holds, by kind. One whose parameters are healthy again counts no more.",
        "none",
        Query(f"sum by (kind) ({of(catalog.DRIFT_ACTIVE)}) > 0", "{{kind}}"),
    )
    checks = curves(
        "Checks per second",
        "Of all groups, by result: clean, findings, skipped (a loss scaler skipped the step). At 0 nothing is watched.",
        "cps",
        Query(f"sum by (result) ({rate(catalog.CHECKS)})", "{{result}}"),
    )
    where = rows(
        "Faults by replica group",
        "All of the time range: `faulty now` is empty where a fault is over, or was that of an earlier start. A click "
        "on a group leads to its own dashboard. Parameters, ranks and evidence: `tpwatch report` on the run "
        "directory.",
        ("group", "kind"),
        {
            "faulty now": Query(f"sum by (group, kind) ({FAULTY_NOW})", now=True),
            "at most": Query(f"sum by (group, kind) ({FAULTY_EVER})", now=True),
            "first step": Query(f"min by (group, kind) ({known(catalog.FIRST_STEP, 'min')})", now=True),
            "largest difference": Query(f"max by (group, kind) ({known(catalog.MAX_ABS, 'max')})", now=True),
            "relative": Query(f"max by (group, kind) ({known(catalog.MAX_REL, 'max')})", now=True),
        },
    )
    column(
        column(column(where, "group", "links", [ONE_GROUP]), "largest difference", "unit", "sci"),
        "relative",
        "unit",
        "sci",
    )
    return [
        onset.no_value("no fault").min(0).span(12),
        checks.min(0).span(12),
        where.no_value("no fault").height(7).span(24),
    ]


def what_it_costs() -> list[Any]:
    """Where the time of checks goes."""
    phases = curves(
        "Time in checks",
        "Share of a group leader's time by phase, average of the groups. `exchange` includes waiting for the slowest "
        "rank, for which training would wait anyway.",
        "percentunit",
        Query(f"avg by (phase) ({IN_CHECKS})", "{{phase}}"),
    )
    buckets = rate(catalog.CHECK_DURATION, part="_bucket")
    slowest = curves(
        "Slowest checks",
        "What 99 % of all checks stay below, by phase.",
        "s",
        Query(f"histogram_quantile(0.99, sum by (le, phase) ({buckets}))", "{{phase}}"),
    )
    collectives = curves(
        "Collectives per second",
        "Of all groups: `watch` is two a check, `explain` gathers evidence about what was flagged.",
        "cps",
        Query(f"sum by (purpose) ({rate(catalog.COLLECTIVES)})", "{{purpose}}"),
    )
    return [panel.min(0).span(8) for panel in (phases, slowest, collectives)]


def sections() -> Sections:
    """All of it, from top to bottom."""
    return {
        "": is_it_healthy(),
        "What the verdict covers": what_is_covered(),
        "Since when, and where": since_when_and_where(),
        "What watching costs": what_it_costs(),
    }
