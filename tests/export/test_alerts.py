"""The alerting rules and examples, checked by the servers' own tools."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.export._servers import ALERTS

ROOT = ALERTS.parents[1]
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((ALERTS / "tpwatch.rules.yaml").read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
]
DOCUMENT = ROOT / "docs" / "observability.md"

COMMANDS = {
    "rules": ["promtool", "check", "rules", "--lint=all", "--lint-fatal", "tpwatch.rules.yaml"],
    "rule tests": ["promtool", "test", "rules", "tpwatch.rules_test.yaml"],
    "prometheus": ["promtool", "check", "config", "prometheus.example.yaml"],
    "alertmanager": ["amtool", "check-config", "alertmanager.example.yaml"],
}


@pytest.mark.prom
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_the_servers_tools_accept_the_files(command: list[str]) -> None:
    """Rules are valid and behave as their unit tests say; the examples are valid."""
    done = subprocess.run(command, cwd=ALERTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.prom
def test_the_rule_tests_test(tmp_path: Path) -> None:
    """With a threshold changed they fail: their passing means something."""
    for name in ("tpwatch.rules.yaml", "tpwatch.rules_test.yaml"):
        text = (ALERTS / name).read_text()
        (tmp_path / name).write_text(text.replace("> 900", "> 9000"))
    done = subprocess.run(COMMANDS["rule tests"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "TpwatchMonitorSilent" in done.stdout + done.stderr


def test_every_alert_is_tested_both_ways() -> None:
    """Each has a moment at which it fires and one at which it does not."""
    cases = [
        c
        for t in yaml.safe_load((ALERTS / "tpwatch.rules_test.yaml").read_text())["tests"]
        for c in t.get("alert_rule_test", ())
    ]
    names = {rule["alert"] for rule in RULES}
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == names
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == names


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_tells_what_to_do(rule: dict[str, Any]) -> None:
    """Severity, waiting time, texts, and a runbook section that exists."""
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert re.fullmatch(r"\d+[sm]", rule["for"])
    assert {"summary", "description", "runbook_url"} == set(rule["annotations"])
    path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert anchor in anchors(ROOT / path)


def test_runbook_links_can_be_made_absolute(tmp_path: Path) -> None:
    """By the command that the documentation shows, in all rules and in nothing else."""
    (command,) = re.findall(r"^sed .* (?=tpwatch\.rules\.yaml$)", DOCUMENT.read_text(), re.MULTILINE)
    shutil.copy(ALERTS / "tpwatch.rules.yaml", tmp_path)
    subprocess.run([*shlex.split(command), "tpwatch.rules.yaml"], cwd=tmp_path, check=True)
    written = (tmp_path / "tpwatch.rules.yaml").read_text()
    assert len(re.findall(r"runbook_url: https://\S+/docs/\w+\.md#", written)) == len(RULES)
    assert re.sub(r"https://\S+/(?=docs/)", "", written) == (ALERTS / "tpwatch.rules.yaml").read_text()


def anchors(path: Path) -> set[str]:
    """Anchors of the headings of a Markdown file, as forges make them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_documentation_lists_the_alerts() -> None:
    """Name and severity of each, in order."""
    text = DOCUMENT.read_text()
    rows = re.findall(r"^\| `(Tpwatch\w+)` \| (\w+) \|", text, re.MULTILINE)
    assert rows == [(rule["alert"], rule["labels"]["severity"]) for rule in RULES]
