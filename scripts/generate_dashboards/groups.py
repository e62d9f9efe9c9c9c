"""The second dashboard: which replica group, and so which pipeline stage, is at fault, and how it looks there?"""

from __future__ import annotations

from typing import Any

from panels import ONE_GROUP, Query, Sections, column, curves, rows, words
from queries import FOUND, PER_CHECK, known, of

from tpwatch.export import catalog

REDUCED = 'point!="grad_pre"'

HOW_TO_READ = """\
A **replica group** is the ranks that hold copies of the same parameters. Its name is its axis and its **first global \
rank**: `tp-8` is the tensor-parallel group that begins at rank 8.

In Megatron-core's rank order (tp-cp-ep-dp-pp: tensor-parallel ranks are neighbours, pipeline stages farthest apart) \
that rank *R* says where the group is:

- **pipeline stage** = R div (TP x CP x DP)
- **data-parallel rank** = (R div (TP x CP)) mod DP

With TP 2, DP 2, PP 2, `tp-0` and `tp-2` are stage 0, `tp-4` and `tp-6` stage 1. In the list of groups above, those of \
one stage stand together.

Faulty are **all groups of one stage**: a layer of that stage. **All groups**: what every stage has, or a setting. \
**One group**: a rank, a node, a stray write. Parameters and ranks: `tpwatch report` on the run directory."""


def which_group() -> list[Any]:
    """How a group is called, and all of them at a glance."""
    how = words(
        "Which pipeline stage is that?", "How the name of a replica group says where it is in the job.", HOW_TO_READ
    )
    glance = rows(
        "Replica groups",
        "Within the time range, also of groups whose process is gone. One without faulty parameters is healthy.",
        ("group",),
        {
            "faulty parameters": Query(f"sum by (group) ({FOUND})", now=True),
            "last step checked": Query(f"max by (group) ({known(catalog.LAST_STEP, 'last')})", now=True),
            "parameters compared": Query(f"max by (group) ({known(catalog.REPLICAS, 'last')})", now=True),
            "largest difference": Query(f"max by (group) ({known(catalog.SPREAD_ABS, 'max')})", now=True),
        },
    )
    column(column(glance, "group", "links", [ONE_GROUP]), "largest difference", "unit", "sci")
    return [how.height(10).span(12), glance.height(10).span(12)]


def what_is_wrong_there() -> list[Any]:
    """The evidence, group by group."""
    faulty = curves(
        "Faulty parameters",
        "Parameters with a confirmed fault, by kind and by the observation point that gave it away.",
        "none",
        Query(f"sum by (group, kind, point) ({of(catalog.FAULTY)})", "{{group}} {{kind}} at {{point}}"),
    )
    differing = curves(
        "Copies that differ",
        "Parameters not bit-identical at the last check. `grad_pre` is left out: partial gradients differ by right.",
        "none",
        Query(f"max by (group, point) ({of(catalog.DIFFERING, REDUCED)})", "{{group}} {{point}}"),
    )
    spread = curves(
        "Largest difference between copies",
        "Of one element, at the last check that gathered values. Constant: a mishap of the past. Growing: it goes on.",
        "sci",
        Query(f"max by (group) ({of(catalog.SPREAD_ABS)})", "{{group}}"),
    )
    ratio = curves(
        "Gradient norm after / before the reduction",
        "Smallest and largest over all parameters. As large as the group: a complete gradient was summed again. The "
        "inverse of that: partial gradients were averaged.",
        "none",
        Query(f"max by (group) ({of(catalog.RATIO_MAX)})", "{{group}} largest"),
        Query(f"min by (group) ({of(catalog.RATIO_MIN)})", "{{group}} smallest"),
    )
    faulty.no_value("no fault")
    return [panel.min(0).span(12) for panel in (faulty, differing, spread, ratio)]


def who_waits_for_whom() -> list[Any]:
    """Which group holds up the others."""
    front = f"scalar(max({of(catalog.LAST_STEP, group='')}))"
    behind = curves(
        "Steps behind",
        "Behind the group of the run that is farthest. Growing: this group hangs, or its exporter does.",
        "none",
        Query(f"{front} - max by (group) ({of(catalog.LAST_STEP)})", "{{group}}"),
    )
    duration = curves(
        "Time per check",
        "Host time of one check, waiting for the group's other ranks included.",
        "s",
        Query(PER_CHECK, "{{group}}"),
    )
    return [panel.min(0).span(12) for panel in (behind, duration)]


def sections() -> Sections:
    """All of it, from top to bottom."""
    return {
        "": which_group(),
        "What is wrong there": what_is_wrong_there(),
        "Who waits for whom": who_waits_for_whom(),
    }
