"""The Grafana dashboards as tests see them: files, panels, queries."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.export._servers import ALERTS

GRAFANA = ALERTS.parent / "grafana"
Dashboard = Mapping[str, Any]

DASHBOARDS: Mapping[str, Dashboard] = {path.stem: json.loads(path.read_text()) for path in GRAFANA.glob("*.json")}


@dataclass(frozen=True)
class Question:
    """One query and where it stands."""

    where: str
    """Panel and letter of the query, or the annotation."""
    expr: str
    now: bool
    """Asked for one point in time."""


def panels(dashboard: Dashboard) -> list[Mapping[str, Any]]:
    """All panels, without the rows between them."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def questions(dashboard: Dashboard, *, marks: bool = True) -> Iterator[Question]:
    """All queries of panels and, unless without `marks`, of annotations."""
    for panel in panels(dashboard):
        for target in panel.get("targets", []):
            yield Question(f"{panel['title']} {target['refId']}", target["expr"], bool(target.get("instant")))
    for event in dashboard["annotations"]["list"] if marks else ():
        yield Question(event["name"], event["expr"], now=False)


def filled_in(text: str, run: str = "r", group: str = ".*", stage: str = ".*", window: str = "1m") -> str:
    """A query with Grafana's variables replaced, as Grafana does."""
    values = {"$__rate_interval": window, "$__range": "10m", "$run": run, "$group": group, "$stage": stage}
    for name, value in values.items():
        text = text.replace(name, value)
    return text
