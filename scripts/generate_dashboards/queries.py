"""How queries choose series: by Grafana's variables, and by metrics of the catalogue."""

from __future__ import annotations

from tpwatch.export.catalog import BUILD_INFO, CHECK_DURATION, CHECKS, DRIFT_ACTIVE, FAULTY, START_TIME, Metric

RUN, GROUP, STAGE = 'run="$run"', 'group=~"$group"', 'stage=~"$stage"'
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


_STARTS = known(START_TIME, "last")
_LATEST_START = f"{_STARTS} == on (run, group) group_left () max by (run, group) ({_STARTS})"


def latest(metric: Metric, more: str = "") -> str:
    """As it stands, or stood last if the process is gone; of each group only the latest start of the run.

    An earlier start may have been scraped at another address: its series are others, and would be seen as well.
    """
    series = of(metric, more)
    stands = f"{series} or on (run, group) last_over_time({series}[{RANGE}])"
    return f"(({stands}) and on (run, group, instance) ({_LATEST_START}))"


def holding(metric: Metric) -> str:
    """Of a metric by kind of fault, what belongs to faults that hold: series of faults that are over stay behind."""
    return f"({latest(metric)} and on (run, group, kind) {latest(DRIFT_ACTIVE)} == 1)"


FAULTY_NOW = f"max by (run, group, kind, point) ({holding(FAULTY)})"
"""Faulty parameters. The largest number, not the sum: a scrape and a textfile are two instances of one group."""

FAULTY_EVER = f"max by (run, group, kind, point) ({known(FAULTY, 'max')})"

IN_CHECKS = rate(CHECK_DURATION, part="_sum")
PER_CHECK = f"sum by (group) ({IN_CHECKS}) / sum by (group) ({rate(CHECKS)})"


def in_stages(expr: str, on: str = "run, group") -> str:
    """Of an expression the groups in the chosen pipeline stages."""
    return f"({expr} and on ({on}) {of(BUILD_INFO, STAGE)})"


def staged(expr: str, facts: str = "") -> str:
    """The same with the pipeline stage as a label; `facts` are the series that say it, by default those of each moment.

    One series of them a group: with two, in a run that has started again, Prometheus would refuse the query.
    """
    stages = f"group by (run, group, stage) ({facts or of(BUILD_INFO, STAGE)})"
    return f"{expr} * on (run, group) group_left (stage) topk by (run, group) (1, {stages})"
