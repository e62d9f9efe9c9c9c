"""Write the Grafana dashboards: `python scripts/generate_dashboards [DIRECTORY]`, by default dashboards/grafana.

Needs grafana-foundation-sdk (extra dev; Python 3.11 or later).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import groups
import overview
from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as model
from panels import BAD, GROUPS, OVERVIEW, SOURCE, WARN, Sections, link_to, mark
from queries import RUN, STAGE, WINDOW, of

from tpwatch.export import catalog

ROOT = Path(__file__).resolve().parents[2]

TITLES = {OVERVIEW: "tpwatch: overview", GROUPS: "tpwatch: replica groups"}


def marks() -> list[Any]:
    """What is marked on every curve."""
    faulty = f"{of(catalog.DRIFT_ACTIVE)} == 1"
    before = f"{of(catalog.DRIFT_ACTIVE)} offset {WINDOW} == 1"
    confirmed = f"{faulty} unless on (run, group, kind) {before}"
    stopped = f"increase({of(catalog.ABORTS)}[{WINDOW}])"
    return [
        mark("Fault confirmed", confirmed, BAD, "{{kind}} in {{group}}"),
        mark("Stopped by tpwatch", stopped, WARN, "tpwatch stopped {{group}}"),
    ]


def variables(*, stages: bool) -> list[Any]:
    """What is chosen at the top: data source, run, replica groups, with `stages` those of some pipeline stages."""
    facts, reload = catalog.BUILD_INFO.name, model.VariableRefresh.ON_TIME_RANGE_CHANGED
    run = dashboard.QueryVariable("run").label("Run").query(f"label_values({facts}, run)")
    stage = _several("stage", "Pipeline stage", f"{facts}{{{RUN}}}")
    group = _several("group", "Replica group", f"{facts}{{{RUN}, {STAGE}}}" if stages else f"{facts}{{{RUN}}}")
    return [
        dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"),
        run.datasource(SOURCE).refresh(reload).sort(model.VariableSort.ALPHABETICAL_DESC),
        *([stage] if stages else []),
        group,
    ]


def _several(name: str, title: str, facts: str) -> dashboard.QueryVariable:
    """A variable of which several values may be chosen, or all."""
    made = dashboard.QueryVariable(name).label(title).query(f"label_values({facts}, {name})")
    made.multi(multi=True).include_all(include_all=True).all_value(".*")
    made.current(model.VariableOption(selected=True, text=["All"], value=["$__all"]))
    made.datasource(SOURCE).refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
    return made.sort(model.VariableSort.NUMERICAL_ASC)


def assemble(uid: str, purpose: str, other: str, sections: Sections) -> Any:  # noqa: ANN401 - untyped package
    """One dashboard: sections, each under a row unless it has no name, and a link to the other one."""
    made = dashboard.Dashboard(TITLES[uid]).uid(uid).description(purpose).tags(["tpwatch"]).readonly()
    made.time("now-6h", "now").refresh("30s").tooltip(model.DashboardCursorSync.CROSSHAIR)
    made.variables(variables(stages=uid == GROUPS))
    made.annotations(marks()).link(link_to(other, TITLES[other]))
    for name, panels in sections.items():
        if name:
            made.with_row(dashboard.Row(name))
        for panel in panels:
            made.with_panel(panel)
    built = made.build()
    for place, panel in enumerate(built.panels, start=1):
        panel.id_val = place
    for item in (*built.links, *built.annotations.list_val):
        item.placement = None  # at the top, not in the menu that the package chooses
    return built


def dashboards() -> list[Any]:
    """Both of them."""
    asks = "Is my run healthy, which kind of fault does it have, since when, and what does watching it cost?"
    finds = "Which replica group, and so which pipeline stage, is at fault, what is wrong there, who waits for whom?"
    return [
        assemble(OVERVIEW, asks, GROUPS, overview.sections()),
        assemble(GROUPS, finds, OVERVIEW, groups.sections()),
    ]


def main(arguments: list[str]) -> None:
    """Write one file per dashboard."""
    directory = Path(arguments[0]) if arguments else ROOT / "dashboards" / "grafana"
    for built in dashboards():
        path = directory / f"{built.uid}.json"
        path.write_text(json.dumps(built, cls=JSONEncoder, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
