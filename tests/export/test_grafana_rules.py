"""The rules of Grafana's dashboard linter, and some of our own, held against the dashboards."""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.export._grafana import DASHBOARDS, Dashboard, filled_in, panels, questions
from tpwatch.export.catalog import METRICS, Metric

OVERVIEW = DASHBOARDS["tpwatch-overview"]

each_dashboard = pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)

UNITS = {"none", "short", "sci", "s", "percentunit", "cps"}
"""Of the units that Grafana knows, those in use here."""

SELECTOR = re.compile(r"\b([a-zA-Z_:][\w:]*)\{([^}]*)\}(\[[^\]]*\])?")
"""Metric, matchers, range."""

LABEL_VALUES = r"label_values\((\w+)(\{.*\})?, (\w+)\)"

SAMPLES: dict[str, Metric] = {
    metric.name + suffix: metric
    for metric in METRICS
    for suffix in (("_bucket", "_sum", "_count") if metric.type == "histogram" else ("",))
}
"""Names as they are scraped."""


def variables(dashboard: Dashboard, kind: str) -> list[Any]:
    """Variables of one type."""
    return [variable for variable in dashboard["templating"]["list"] if variable["type"] == kind]


def expressions(dashboard: Dashboard) -> list[str]:
    """All queries."""
    return [question.expr for question in questions(dashboard)]


def selectors(dashboard: Dashboard) -> Iterator[tuple[str, re.Match[str]]]:
    """Every choice of series, with the query that it is in."""
    for expr in expressions(dashboard):
        yield from ((expr, match) for match in SELECTOR.finditer(expr))


def template_datasource(dashboard: Dashboard) -> bool:
    """The data source is a variable, of Prometheus, under the name that the linter asks for."""
    found = [(v["name"], v["label"], v["query"]) for v in variables(dashboard, "datasource")]
    return found == [("datasource", "Data source", "prometheus")]


def panel_datasource(dashboard: Dashboard) -> bool:
    """Everything that asks uses that variable: no data source of one installation."""
    asking = [panel for panel in panels(dashboard) if panel["type"] != "text"]
    targets = [target for panel in asking for target in panel["targets"]]
    others = [*variables(dashboard, "query"), *dashboard["annotations"]["list"]]
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    return all(item["datasource"] == chosen for item in (*asking, *targets, *others))


def panel_title_description(dashboard: Dashboard) -> bool:
    """Every panel has a title of its own and says what it means."""
    titles = [panel["title"] for panel in panels(dashboard)]
    described = all(panel["description"] for panel in panels(dashboard))
    return described and all(titles) and len(set(titles)) == len(titles)


def panel_units(dashboard: Dashboard) -> bool:
    """Every panel with numbers has a unit that Grafana knows."""
    numeric = [panel for panel in panels(dashboard) if panel["type"] != "text"]
    return all(panel["fieldConfig"]["defaults"].get("unit") in UNITS for panel in numeric)


def panel_no_targets(dashboard: Dashboard) -> bool:
    """Every panel but a text asks something."""
    return all(panel.get("targets") or panel["type"] == "text" for panel in panels(dashboard))


def target_rate_interval(dashboard: Dashboard) -> bool:
    """Rates are taken over the window that fits scrape interval and zoom."""
    windows = [re.findall(r"\bi?rate\([^\[]*\[([^\]]*)\]", expr) for expr in expressions(dashboard)]
    return set(itertools.chain(*windows)) == {"$__rate_interval"}


def target_counter_agg(dashboard: Dashboard) -> bool:
    """What only counts up is shown as a rate or an increase."""
    counting = [(e, m) for e, m in selectors(dashboard) if SAMPLES[m[1]].type in {"counter", "histogram"}]
    return all(re.search(r"\b(i?rate|increase)\($", expr[: match.start()]) and match[3] for expr, match in counting)


def target_histogram(dashboard: Dashboard) -> bool:
    """Buckets are only the material of a quantile, which needs `le`."""
    return all(
        re.match(r"histogram_quantile\([\d.]+, sum by \(le\b", expr)
        for expr, match in selectors(dashboard)
        if match[1].endswith("_bucket")
    )


def target_required_matchers(dashboard: Dashboard) -> bool:
    """Every choice of series is of the run, every query of the groups, that were chosen (the linter: job, instance)."""
    of_the_run = all('run="$run"' in match[2] for _, match in selectors(dashboard))
    return of_the_run and all('group=~"$group"' in expr for expr in expressions(dashboard))


def template_on_time_change_reload(dashboard: Dashboard) -> bool:
    """Runs and groups are those of the time range."""
    return all(variable["refresh"] == 2 for variable in variables(dashboard, "query"))


def template_label_promql(dashboard: Dashboard) -> bool:
    """Choices are values of a label of a metric that is exported; of a choice before it only those that fit."""
    found = {v["name"]: re.fullmatch(LABEL_VALUES, v["query"]) for v in variables(dashboard, "query")}
    if not all(match and match[1] in SAMPLES and match[3] == name for name, match in found.items()):
        return False
    fit = {name: set(re.findall(r"\$(\w+)", match[2] or "")) for name, match in found.items() if match}
    names = list(fit)
    return names[0] == "run" and all(fit[name] == set(names[:place]) for place, name in enumerate(names))


def template_choices_filter(dashboard: Dashboard) -> bool:
    """What can be chosen is used: where there is a choice of stages every panel is of those chosen."""
    chosen = {v["name"] for v in variables(dashboard, "query")}
    asked = [question.expr for question in questions(dashboard, marks=False)]
    return all(f"${name}" in expr for expr in asked for name in chosen)


def template_uneditable(dashboard: Dashboard) -> bool:
    """What is generated is not edited in the browser."""
    return dashboard["editable"] is False


def metrics_of_the_catalogue(dashboard: Dashboard) -> bool:
    """Queries name nothing that is not exported, metric or label."""
    return all(exported(expr) for expr in expressions(dashboard))


def exported(expr: str) -> bool:
    """Whether every metric is in the catalogue, and every label is one of a metric beside it."""
    chosen = {match[1] for match in SELECTOR.finditer(expr)}
    if not set(re.findall(r"\btpwatch_\w+", expr)) == chosen <= set(SAMPLES):
        return False
    return used_labels(expr) <= {"run", "instance", "le"}.union(*(SAMPLES[name].labels for name in chosen))


def used_labels(expr: str) -> set[str]:
    """Labels by which a query chooses, sums or matches."""
    matchers = re.findall(r"(\w+)(?:=|!=|=~|!~)\"", expr)
    lists = re.findall(r"\b(?:by|on|without) \(([^)]*)\)", expr)
    return set(matchers).union(*(names.split(", ") for names in lists))


def legends_name_labels(dashboard: Dashboard) -> bool:
    """What tells lines apart in the legend is what they were summed by."""
    targets = [target for panel in panels(dashboard) for target in panel.get("targets", [])]
    return all(
        set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= used_labels(target["expr"]) - {"run"}
        for target in targets
    )


def panel_ids(dashboard: Dashboard) -> bool:
    """Links to a panel stay valid."""
    ids = [panel["id"] for panel in dashboard["panels"]]
    return len(set(ids)) == len(ids)


def grid_positions(dashboard: Dashboard) -> bool:
    """Panels lie within the width, and none on another."""
    covered: list[tuple[int, int]] = []
    for place in (panel["gridPos"] for panel in dashboard["panels"]):
        covered += itertools.product(
            range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        )
    return len(set(covered)) == len(covered) and all(0 <= x < 24 for x, _ in covered)


def links_to_the_other(dashboard: Dashboard) -> bool:
    """One leads to the other dashboard, and takes along what was chosen."""
    others = set(DASHBOARDS) - {dashboard["uid"]}
    links = dashboard["links"]
    kept = all(link["includeVars"] and link["keepTime"] for link in links)
    return kept and {link["url"] for link in links} == {f"/d/{uid}" for uid in others}


# Of each rule, what breaks it: where in a dashboard, and what to write there.
PANEL, TARGET, TEMPLATES = ("panels", 0), ("panels", 0, "targets", 0), ("templating", "list")
CHECKS = 'tpwatch_checks_total{run="$run", group=~"$group"}'
BREAKS: list[tuple[Callable[[Dashboard], bool], tuple[str | int, ...], Any]] = [
    (template_datasource, (*TEMPLATES, 0, "name"), "ds"),
    (template_datasource, (*TEMPLATES, 0, "type"), "query"),
    (panel_datasource, (*PANEL, "datasource"), {"type": "prometheus", "uid": "P1809F7CD0C75ACF3"}),
    (panel_datasource, (*TARGET, "datasource"), None),
    (panel_datasource, (*TEMPLATES, 1, "datasource", "uid"), "prometheus"),
    (panel_datasource, ("annotations", "list", 0, "datasource", "uid"), "prometheus"),
    (panel_title_description, (*PANEL, "title"), ""),
    (panel_title_description, (*PANEL, "title"), "Overhead"),
    (panel_title_description, (*PANEL, "description"), ""),
    (panel_units, (*PANEL, "fieldConfig", "defaults", "unit"), None),
    (panel_units, (*PANEL, "fieldConfig", "defaults", "unit"), "seconds"),
    (panel_no_targets, (*PANEL, "targets"), []),
    (target_rate_interval, (*TARGET, "expr"), f"rate({CHECKS}[5m])"),
    (target_counter_agg, (*TARGET, "expr"), CHECKS),
    (target_counter_agg, (*TARGET, "expr"), f"max_over_time({CHECKS}[$__range])"),
    (target_counter_agg, (*TARGET, "expr"), "tpwatch_check_duration_seconds_sum{}"),
    (target_histogram, (*TARGET, "expr"), "sum by (le) (rate(tpwatch_check_duration_seconds_bucket{}[5m]))"),
    (target_required_matchers, (*TARGET, "expr"), 'max(tpwatch_drift_active{group=~"$group"})'),
    (target_required_matchers, (*TARGET, "expr"), 'max(tpwatch_drift_active{run="$run"})'),
    (template_on_time_change_reload, (*TEMPLATES, 1, "refresh"), 1),
    (template_label_promql, (*TEMPLATES, 1, "query"), "label_values(up, run)"),
    (template_label_promql, (*TEMPLATES, 2, "query"), "tpwatch_build_info"),
    (template_label_promql, (*TEMPLATES, 2, "query"), "label_values(tpwatch_build_info, group)"),
    (template_choices_filter, (*TEMPLATES, 2, "name"), "stage"),
    (template_uneditable, ("editable",), True),
    (metrics_of_the_catalogue, (*TARGET, "expr"), 'node_load1{run="$run"}'),
    (metrics_of_the_catalogue, (*TARGET, "expr"), 'tpwatch_drift{run="$run"}'),
    (metrics_of_the_catalogue, (*TARGET, "expr"), "tpwatch_drift_active"),
    (metrics_of_the_catalogue, (*TARGET, "expr"), 'sum by (phase) (tpwatch_drift_active{run="$run"})'),
    (legends_name_labels, (*TARGET, "legendFormat"), "{{kind}}"),
    (panel_ids, (*PANEL, "id"), 2),
    (grid_positions, (*PANEL, "gridPos", "w"), 5),
    (grid_positions, (*PANEL, "gridPos", "x"), 24),
    (links_to_the_other, ("links", 0, "url"), "/d/tpwatch-overview"),
    (links_to_the_other, ("links", 0, "includeVars"), False),
]
RULES = list(dict.fromkeys(rule for rule, _, _ in BREAKS))


@each_dashboard
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_holds(rule: Callable[[Dashboard], bool], dashboard: Dashboard) -> None:
    """Each rule, for each dashboard."""
    assert rule(dashboard), rule.__doc__


@pytest.mark.parametrize(("rule", "place", "value"), BREAKS, ids=lambda part: getattr(part, "__name__", None))
def test_a_rule_notices(rule: Callable[[Dashboard], bool], place: tuple[str | int, ...], value: object) -> None:
    """Each rule fails on a planted violation, so that its holding means something."""
    assert not rule(planted(OVERVIEW, place, value))


def planted(dashboard: Dashboard, place: tuple[str | int, ...], value: object) -> Dashboard:
    """A copy with one thing changed."""
    broken = copy.deepcopy(dashboard)
    *way, last = place
    around: Any = functools.reduce(operator.getitem, way, broken)
    assert last in around or isinstance(last, int)
    around[last] = value
    return broken


@each_dashboard
def test_uids_are_the_names_of_the_files(dashboard: Dashboard) -> None:
    """So they are unique and stay."""
    assert DASHBOARDS[dashboard["uid"]] is dashboard


def parses(dashboard: Dashboard, directory: Path) -> str:
    """What promtool has to say against the queries of a dashboard; empty if it reads them all."""
    rules = [
        {"record": f"query:{place}", "expr": filled_in(question.expr)}
        for place, question in enumerate(questions(dashboard))
    ]
    file = directory / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    command = ["promtool", "check", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else ""


@pytest.mark.prom
@each_dashboard
def test_every_query_parses(dashboard: Dashboard, tmp_path: Path) -> None:
    """By Prometheus's own parser."""
    assert parses(dashboard, tmp_path) == ""


@pytest.mark.prom
def test_a_query_that_does_not_parse_is_noticed(tmp_path: Path) -> None:
    """A parenthesis that is missing."""
    broken = planted(OVERVIEW, (*TARGET, "expr"), 'max(tpwatch_drift_active{run="$run"}')
    assert "unclosed left parenthesis" in parses(broken, tmp_path)
