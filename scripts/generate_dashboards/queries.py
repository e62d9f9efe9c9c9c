"""How queries choose series: by Grafana's variables, and by metrics of the catalogue."""

from __future__ import annotations

from tpwatch.export.catalog import CHECK_DURATION, CHECKS, FAULTY, Metric

RUN, GROUP = 'run="$run"', 'group=~"$group"'
WINDOW, RANGE = "$__rate_interval", "$__range"


def of(metric: Metric, more: str = "", *, part: str = "", group: str = GROUP) -> str:
    """The series of a metric that the variables choose; `part` is the suffix of a series of a histogram."""
    return f"{metric.name}{part}{{{', '.join(filter(None, (RUN, group, more)))}}}"


def rate(metric: Metric, *, part: str = "") -> str:
    """Change per second of a counter."""
    return f"rate({of(metric, part=part)}[{WINDOW}])"


def known(metric: Metric, how: str) -> str:
    """The last, smallest or largest value in the time range, also of a process that is gone."""
    return f"{how}_over_time({of(metric)}[{RANGE}])"


FOUND = f"max by (group, kind, point) ({known(FAULTY, 'max')})"
"""Faulty parameters. The largest number, not the sum: a restart on another node is another instance of the group."""

IN_CHECKS = rate(CHECK_DURATION, part="_sum")
PER_CHECK = f"sum by (group) ({IN_CHECKS}) / sum by (group) ({rate(CHECKS)})"
