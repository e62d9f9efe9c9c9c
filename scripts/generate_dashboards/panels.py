"""How the dashboards' panels look: a small vocabulary on top of grafana-foundation-sdk, for this program.

Knows Grafana, not what is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, text, timeseries
from grafana_foundation_sdk.models import common as shown
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.text import TextMode

SOURCE = shown.DataSourceRef(type_val="prometheus", uid="${datasource}")
OK, WARN, BAD, CALM, UNKNOWN = "green", "orange", "red", "blue", "#808080"
LETTERS = "ABCDEFGH"

Sections = Mapping[str, list[Any]]
"""Panels of a dashboard under the names of their rows; without a name there is no row."""

OVERVIEW, GROUPS = "tpwatch-overview", "tpwatch-groups"
"""Names of the files, and uids, which links and bookmarks hold on to."""

ONE_GROUP = {
    "title": "This group over time",
    "url": f"/d/{GROUPS}?${{datasource:queryparam}}&${{run:queryparam}}"
    "&var-group=${__value.raw}&${__url_time_range}",
}
"""A link from a group in a table to the dashboard of it alone."""


@dataclass(frozen=True)
class Query:
    """One query of a panel."""

    expr: str
    legend: str = ""
    now: bool = False
    """Asked for the end of the time range only, instead of all of it."""


def number(title: str, meaning: str, unit: str, query: Query) -> stat.Panel:
    """One number per series, the last one known in the time range, on a coloured ground."""
    mode = shown.BigValueTextMode.VALUE_AND_NAME if query.legend else shown.BigValueTextMode.VALUE
    panel: stat.Panel = _dressed(stat.Panel(), title, meaning, unit, [query])
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(values=False))
    return panel.graph_mode(shown.BigValueGraphMode.NONE).color_mode(shown.BigValueColorMode.BACKGROUND).text_mode(mode)


def curves(title: str, meaning: str, unit: str, *queries: Query) -> timeseries.Panel:
    """Lines over time, with a legend that says the last value."""
    legend = common.VizLegendOptions().display_mode(shown.LegendDisplayMode.TABLE).calcs(["lastNotNull"])
    legend.placement(shown.LegendPlacement.BOTTOM).show_legend(show_legend=True)
    tooltip = common.VizTooltipOptions().mode(shown.TooltipDisplayMode.MULTI).sort(shown.SortOrder.DESCENDING)
    panel: timeseries.Panel = _dressed(timeseries.Panel(), title, meaning, unit, queries)
    return panel.legend(legend).tooltip(tooltip).fill_opacity(0).height(8)


def rows(title: str, meaning: str, keys: Sequence[str], columns: Mapping[str, Query]) -> table.Panel:
    """A table: one row per value of the labels `keys`, one column per query."""
    panel: table.Panel = _dressed(table.Panel(), title, meaning, "none", list(columns.values()))
    for target in panel.build().targets:
        target.format_val = PromQueryFormat.TABLE
    names = {f"Value #{letter}": column for letter, column in zip(LETTERS, columns, strict=False)}
    order = {name: place for place, name in enumerate((*keys, *names))}
    arranged = {"excludeByName": {"Time": True}, "indexByName": order, "renameByName": names}
    panel.with_transformation(model.DataTransformerConfig(id_val="merge", options={}))
    return panel.with_transformation(model.DataTransformerConfig(id_val="organize", options=arranged))


def column(panel: table.Panel, name: str, setting: str, value: object) -> table.Panel:
    """Set something for one column of a table."""
    return panel.override_by_name(name, [model.DynamicConfigValue(id_val=setting, value=value)])


def words(title: str, meaning: str, markdown: str) -> text.Panel:
    """A text."""
    return text.Panel().title(title).description(meaning).mode(TextMode.MARKDOWN).content(markdown)


def limits(*steps: tuple[float, str], below: str) -> dashboard.ThresholdsConfig:
    """Colours from given values on, and the one below them, which `no value` has too."""
    found = [model.Threshold(value=None, color=below), *(model.Threshold(value=at, color=color) for at, color in steps)]
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(found)


def named(values: Mapping[str, tuple[str, str]]) -> list[model.ValueMap]:
    """Text and colour of single values."""
    results = [model.ValueMappingResult(text=word, color=color) for word, color in values.values()]
    return [model.ValueMap(options=dict(zip(values, results, strict=True)))]


def mark(name: str, expr: str, color: str, title: str) -> dashboard.AnnotationQuery:
    """A line through all curves wherever `expr` is above 0."""
    made = dashboard.AnnotationQuery().name(name).datasource(SOURCE).enable(enable=True).icon_color(color)
    return made.expr(expr).title_format(title).tag_keys("run,group,kind").step("15s")


def link_to(uid: str, title: str) -> dashboard.DashboardLink:
    """A link to another dashboard that keeps what was chosen."""
    made = dashboard.DashboardLink(title).type(model.DashboardLinkType.LINK).url(f"/d/{uid}").icon("dashboard")
    return made.include_vars(include_vars=True).keep_time(keep_time=True)


def _dressed(panel: Any, title: str, meaning: str, unit: str, queries: Sequence[Query]) -> Any:  # noqa: ANN401 - builders of panels share methods, not a type
    """What every panel with queries has."""
    panel.title(title).description(meaning).unit(unit).datasource(SOURCE)
    for letter, query in zip(LETTERS, queries, strict=False):
        target = prometheus.Dataquery().ref_id(letter).expr(query.expr).legend_format(query.legend).datasource(SOURCE)
        panel.with_target(target.instant() if query.now else target.range())
    return panel
