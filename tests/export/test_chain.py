"""The whole way on one machine: training, exporter, Prometheus, Alertmanager, pager."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.export._servers import Stack, stack, wait_until
from tpwatch.lab.launch import Job, pools, workers
from tpwatch.report.events import read_events

pytestmark = [pytest.mark.prom, pytest.mark.megatron, pytest.mark.timeout(120)]

FAULT, KIND, ALERT = "ple-double-sum", "double-reduce", "TpwatchDoubleReduce"
SECONDS = 55.0
"""All of it, start to finish, takes less; both trainings are ended long before their last step."""


@dataclass(frozen=True)
class Chain:
    """The servers, after the faulty run has been heard of and the fixed one has done as many steps."""

    stack: Stack
    out: Path


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    """Train with a fault and, beside it, with the upstream fix, until the pager has heard of the first."""
    directory = tmp_path_factory.mktemp("chain")
    deadline = time.monotonic() + SECONDS
    with ExitStack() as cleanup:
        servers = cleanup.enter_context(stack(directory))
        settings = {"prometheus": {"enabled": True, "port": 0, "file_sd": str(servers.targets)}, "interval": 1}
        (directory / "tpwatch.yaml").write_text(yaml.safe_dump(settings))
        log = cleanup.enter_context((directory / "training.log").open("wb"))
        for name, fixed in (("faulty", False), ("fixed", True)):
            job = Job(
                faults=(FAULT,), out=directory / name, steps=100_000, fixed=fixed, config=directory / "tpwatch.yaml"
            )
            cleanup.enter_context(workers(job, pools(job)[0], log))
        wait_until(servers.hook.alerts, f"a notification; see {directory}", deadline)
        # The fixed run had as many steps as it took to find the fault, and two evaluations of the rules behind them.
        (found,) = servers.query('tpwatch_last_check_step{run="faulty"}')
        enough = float(found["value"][1])
        expression = f'min_over_time(tpwatch_last_check_step{{run="fixed"}}[2s]) >= {enough}'
        wait_until(lambda: servers.query(expression), "as many steps of the fixed run", deadline)
        yield Chain(servers, directory)


def test_the_pager_gets_the_right_alert(chain: Chain) -> None:
    """Kind, group, run and severity; sent where critical alerts are sent."""
    faults = [alert for alert in chain.stack.hook.alerts() if alert["labels"]["severity"] == "critical"]
    assert {
        (alert["path"], *(alert["labels"][key] for key in ("alertname", "kind", "group", "run", "job")))
        for alert in faults
    } == {("/page", ALERT, KIND, "tp-0", "faulty", "tpwatch")}
    assert {alert["status"] for alert in faults} == {"firing"}
    assert faults[0]["annotations"]["runbook_url"].startswith("docs/rules.md#")


def test_the_fixed_run_alerts_nobody(chain: Chain) -> None:
    """It was scraped, it was checked, and nothing about it is pending or firing or was sent."""
    (up,) = chain.stack.query('up{run="fixed"}')
    assert up["value"][1] == "1"
    assert chain.stack.query('tpwatch_drift_active{run="fixed"} > 0') == []
    assert chain.stack.query('ALERTS{run="fixed"}') == []
    assert {alert["labels"]["run"] for alert in chain.stack.hook.alerts()} == {"faulty"}


def test_every_rule_evaluates(chain: Chain) -> None:
    """On real data no expression fails."""
    rules = chain.stack.rules()
    assert {rule["health"] for rule in rules} == {"ok"}
    assert {rule["name"] for rule in rules if rule.get("state") == "firing"} == {ALERT}


def test_exemplars_lead_to_the_parameter(chain: Chain) -> None:
    """Prometheus stored step and parameter of a finding beside the count; the event file has the whole of it."""
    series = chain.stack.exemplars('tpwatch_findings_total{run="faulty"}')
    stored = [exemplar["labels"] for found in series for exemplar in found["exemplars"]]
    findings = [event["finding"] for _, event in read_events(chain.out / "faulty").of("finding")]
    assert stored
    assert all(
        any((label["step"], label["parameter"]) == (str(f["first_step"]), f["parameter"]) for f in findings)
        for label in stored
    )
