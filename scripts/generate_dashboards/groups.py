"""The second dashboard: which replica group, and so which pipeline stage, is at fault, and how it looks there?"""

from __future__ import annotations

from typing import Any

from panels import ONE_GROUP, Query, Sections, column, curves, rows, words
from queries import FAULTY_EVER, FAULTY_NOW, PER_CHECK, STAGE, in_stages, known, latest, of, staged

from tpwatch.export import catalog

REDUCED = 'point!="grad_pre"'

HOW_TO_READ = """\
A **replica group** is the ranks that hold copies of the same parameters. Its name is its axis and its **first global \
rank**: `tp-8` is the tensor-parallel group that begins at rank 8.

Its **pipeline stage**, counted from 0, is what Megatron-core says (`stage`, above and in the table; empty if it is \
not known). In Megatron-core's rank order (tp-cp-ep-dp-pp: tensor-parallel ranks are neighbours, pipeline stages \
farthest apart) the first rank *R* says the rest: the **data-parallel rank** is (R div (TP x CP)) mod DP.

With TP 2, DP 2, PP 2, `tp-0` and `tp-2` are stage 0, `tp-4` and `tp-6` stage 1.

Faulty are **all groups of one stage**: a layer of that stage. **All groups**: what every stage has, or a setting. \
**One group**: a rank, a node, a stray write. Parameters and ranks: `tpwatch report` on the run directory."""


def which_group() -> list[Any]:
    """How a group is called, and all of them at a glance."""
    how = words("Where in the job is that?", "How name and stage of a replica group say where it is.", HOW_TO_READ)
    glance = rows(
        "Replica groups",
        "Also of groups whose process is gone. One in which nothing is faulty now is healthy; `at most` and `largest "
        "difference` are of the whole time range.",
        ("group", "stage"),
        {
            "faulty now": _of_groups("sum", FAULTY_NOW),
            "at most": _of_groups("sum", FAULTY_EVER),
            "last step checked": _of_groups("max", latest(catalog.LAST_STEP)),
            "parameters compared": _of_groups("max", latest(catalog.REPLICAS)),
            "largest difference": _of_groups("max", known(catalog.SPREAD_ABS, "max")),
        },
    )
    column(column(glance, "group", "links", [ONE_GROUP]), "largest difference", "unit", "sci")
    return [how.height(10).span(12), glance.height(10).span(12)]


def _of_groups(how: str, expr: str) -> Query:
    """A column of the table: by group and its stage."""
    return Query(f"{how} by (group, stage) ({staged(expr, latest(catalog.BUILD_INFO, STAGE))})", now=True)


def what_is_wrong_there() -> list[Any]:
    """The evidence, group by group."""
    faulty = curves(
        "Faulty parameters",
        "Parameters with a confirmed fault that holds, by kind and by the observation point that gave it away.",
        "none",
        Query(
            f"sum by (group, stage, kind, point) ({staged(of(catalog.FAULTY))})",
            "{{group}} {{kind}} at {{point}}, stage {{stage}}",
        ),
    )
    differing = curves(
        "Copies that differ",
        "Parameters not bit-identical at the last check. `grad_pre` is left out: partial gradients differ by right.",
        "none",
        Query(f"max by (group, point) {in_stages(of(catalog.DIFFERING, REDUCED))}", "{{group}} {{point}}"),
    )
    spread = curves(
        "Largest difference between copies",
        "Of one element, at the last check that gathered values. Constant: a mishap of the past. Growing: it goes on.",
        "sci",
        Query(f"max by (group, stage) ({staged(of(catalog.SPREAD_ABS))})", "{{group}}, stage {{stage}}"),
    )
    ratio = curves(
        "Gradient norm after / before the reduction",
        "Smallest and largest over all parameters. As large as the group: a complete gradient was summed again. The "
        "inverse of that: partial gradients were averaged.",
        "none",
        Query(f"max by (group) {in_stages(of(catalog.RATIO_MAX))}", "{{group}} largest"),
        Query(f"min by (group) {in_stages(of(catalog.RATIO_MIN))}", "{{group}} smallest"),
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
        Query(f"{front} - max by (group) {in_stages(of(catalog.LAST_STEP))}", "{{group}}"),
    )
    duration = curves(
        "Time per check",
        "Host time of one check, waiting for the group's other ranks included.",
        "s",
        Query(in_stages(PER_CHECK, on="group"), "{{group}}"),
    )
    return [panel.min(0).span(12) for panel in (behind, duration)]


def sections() -> Sections:
    """All of it, from top to bottom."""
    return {
        "": which_group(),
        "What is wrong there": what_is_wrong_there(),
        "Who waits for whom": who_waits_for_whom(),
    }
