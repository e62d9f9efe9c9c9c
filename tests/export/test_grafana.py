"""The Grafana dashboards: generated, answering what they are for, ready to be dropped in."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.commands import REPOSITORY, run_python
from tests.export._grafana import DASHBOARDS, GRAFANA, panels
from tests.export._servers import ALERTS

OVERVIEW, GROUPS = DASHBOARDS["tpwatch-overview"], DASHBOARDS["tpwatch-groups"]


def test_the_files_are_what_the_program_writes(tmp_path: Path) -> None:
    """Nobody edits them by hand, and a renamed metric renames them."""
    pytest.importorskip("grafana_foundation_sdk", reason="needs grafana-foundation-sdk (Python 3.11 or later)")
    done = run_python("scripts/generate_dashboards", tmp_path)
    assert done.returncode == 0, done.stderr
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_text() for path in GRAFANA.glob("*.json")}


# ------------------------------------------------------------------------- what the dashboards are for


def test_the_first_row_answers_what_one_asks_first() -> None:
    """Healthy, which kind, since when, is the monitor silent, and what it costs: side by side, at the top."""
    top = [panel["title"] for panel in OVERVIEW["panels"] if panel["gridPos"]["y"] == 0]
    assert top == [
        "Healthy?", "Faulty parameters", "First faulty step", "Time since last check", "Overhead", "Time per check",
    ]  # fmt: skip


def test_a_click_on_a_group_leads_to_its_dashboard() -> None:
    """With run, data source and time range of where one was."""
    (table,) = (panel for panel in panels(OVERVIEW) if panel["type"] == "table")
    (override,) = (o for o in table["fieldConfig"]["overrides"] if o["matcher"]["options"] == "group")
    ((link,),) = (setting["value"] for setting in override["properties"] if setting["id"] == "links")
    path, _, query = link["url"].partition("?")
    assert path == f"/d/{GROUPS['uid']}"
    assert {"${datasource:queryparam}", "${run:queryparam}", "${__url_time_range}"} < set(query.split("&"))
    assert "var-group=${__value.raw}" in query


@pytest.mark.parametrize(("title", "alert"), [
    ("Time since last check", "TpwatchMonitorSilent"), ("Overhead", "TpwatchOverheadAboveBudget"),
])  # fmt: skip
def test_colours_change_where_alerts_fire(title: str, alert: str) -> None:
    """A number that paged somebody is not green."""
    rules = [
        rule
        for group in yaml.safe_load((ALERTS / "tpwatch.rules.yaml").read_text())["groups"]
        for rule in group["rules"]
    ]
    (expr,) = (rule["expr"] for rule in rules if rule.get("alert") == alert)
    (limit,) = re.findall(r" > ([\d.]+)", expr)
    (panel,) = (panel for panel in panels(OVERVIEW) if panel["title"] == title)
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert float(limit) in [step["value"] for step in steps if step["color"] in {"orange", "red"}]


# --------------------------------------------------------------------------------------- dropping it in


def provisioned(name: str) -> Any:
    """One provisioning file."""
    return yaml.safe_load((GRAFANA / "provisioning" / name).read_text())


def test_grafana_finds_the_dashboards_where_the_instructions_put_them() -> None:
    """The folder that README mounts is the one that the provider reads, and its parent the provisioning directory."""
    (provider,) = provisioned("dashboards/tpwatch.yaml")["providers"]
    mounts = dict(re.findall(r'-v "\$PWD/([^:]+):([^"]+)"', (GRAFANA / "README.md").read_text()))
    assert provider["type"] == "file"
    assert provider["allowUiUpdates"] is False
    assert mounts == {
        "dashboards/grafana": provider["options"]["path"],
        "dashboards/grafana/provisioning": "/etc/grafana/provisioning",
    }
    assert all((REPOSITORY / path).is_dir() for path in mounts)


def test_the_data_source_fits_the_example_for_prometheus() -> None:
    """Type as the dashboards ask for; the interval is that of the scrape, or rates would be empty."""
    (source,) = provisioned("datasources/prometheus.yaml")["datasources"]
    scraped = yaml.safe_load((ALERTS / "prometheus.example.yaml").read_text())["global"]["scrape_interval"]
    assert source["type"] == "prometheus"
    assert source["jsonData"]["timeInterval"] == scraped
