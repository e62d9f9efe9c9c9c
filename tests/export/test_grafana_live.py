"""Every query of the dashboards, asked of a real Prometheus that scraped a real faulty run."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import yaml

from tests.export._grafana import DASHBOARDS, Question, filled_in, questions
from tests.export._servers import Stack, stack, wait_until
from tpwatch.lab import catalog
from tpwatch.lab.launch import Job, pools, workers
from tpwatch.report.events import parse_finding, read_events

pytestmark = [pytest.mark.prom, pytest.mark.megatron, pytest.mark.timeout(120)]

RUN, FAULT = "faulty", "ple-double-sum"
SECONDS = 90.0
WINDOW = "4s"
"""What Grafana makes of $__rate_interval where the scrape interval is one second."""

Series = list[Mapping[str, Any]]

QUESTIONS = {f"{uid}: {question.where}": question for uid, board in DASHBOARDS.items() for question in questions(board)}
SILENCE = "tpwatch-overview: Time since last check A"


@dataclass(frozen=True)
class Asked:
    """The server, and what it answered to each query."""

    stack: Stack
    out: Path
    since: float
    running: Mapping[str, Series]
    """While the run was training."""
    gone: Mapping[str, Series]
    """After its processes were ended without a word."""


def ask(servers: Stack, question: Question, since: float, **chosen: str) -> Series:
    """The series that a panel gets; none if the server refuses the query."""
    expr, end = filled_in(question.expr, window=WINDOW, **chosen), time.time()
    try:
        if question.now:
            return list(servers._api("query", query=expr, time=end)["result"])
        return list(servers._api("query_range", query=expr, start=since, end=end, step=1)["result"])
    except HTTPError:
        return []


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    """Train with a fault until it has been scraped for a while, ask everything, end the run, ask again."""
    directory = tmp_path_factory.mktemp("grafana")
    deadline = time.monotonic() + SECONDS
    with stack(directory) as servers, (directory / "training.log").open("wb") as log:
        settings = {"prometheus": {"enabled": True, "port": 0, "file_sd": str(servers.targets)}, "interval": 1}
        config = directory / "tpwatch.yaml"
        config.write_text(yaml.safe_dump(settings))
        job = Job(faults=(FAULT,), out=directory / RUN, steps=100_000, config=config)
        since = time.time()
        with workers(job, pools(job)[0], log):
            scraped = f'count_over_time(tpwatch_faulty_parameters{{run="{RUN}"}}[1m]) > 6'
            wait_until(lambda: servers.query(scraped), f"a fault; see {directory}", deadline)
            running = {name: ask(servers, question, since, run=RUN) for name, question in QUESTIONS.items()}
        recent = f'count_over_time(tpwatch_watching{{run="{RUN}"}}[{WINDOW}])'
        wait_until(lambda: not servers.query(recent), "the end of the series", deadline)
        gone = {name: ask(servers, question, since, run=RUN) for name, question in QUESTIONS.items()}
        yield Asked(servers, directory / RUN, since, running, gone)


def numbers(series: Series) -> list[float]:
    """All values of an answer that are numbers."""
    values = [value for one in series for _, value in one.get("values", [one.get("value")])]
    return [float(value) for value in values if math.isfinite(float(value))]


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_query_has_data(asked: Asked, name: str) -> None:
    """While the run is training."""
    assert numbers(asked.running[name])


@pytest.mark.parametrize("name", [name for name in QUESTIONS if name != SILENCE])
def test_a_run_that_is_gone_can_still_be_looked_at(asked: Asked, name: str) -> None:
    """Whoever is woken by the alert of a run that was stopped finds its series ended."""
    assert numbers(asked.gone[name])


def test_a_run_that_is_gone_is_not_watched(asked: Asked) -> None:
    """No time since its last check: the panel says that nothing runs."""
    assert asked.gone[SILENCE] == []


def last(series: Series, label: str) -> dict[str, float]:
    """What a number panel shows of each series, named by a label."""
    return {one["metric"][label]: float(one["value"][1]) for one in series}


def test_the_first_row_tells_the_truth(asked: Asked) -> None:
    """Kind and first step as the catalogue of the laboratory has them, the count as the event file has it."""
    truth = catalog.get(FAULT)
    findings = [parse_finding(event) for _, event in read_events(asked.out).of("finding")]
    counted = Counter({f.parameter: f.kind for f in findings if f and f.counts}.values())
    assert counted.keys() == {truth.kind}
    assert max(numbers(asked.gone["tpwatch-overview: Healthy? A"])) == 1.0
    assert last(asked.gone["tpwatch-overview: Faulty parameters A"], "kind") == counted
    first = min(parameter.first_step for parameter in truth.faulty)
    assert last(asked.gone["tpwatch-overview: First faulty step A"], "kind") == {truth.kind: first}


def test_the_fault_is_marked_when_it_was_confirmed(asked: Asked) -> None:
    """One mark, that begins with the first value of 1 of its kind and is over before the run is."""
    (mark,) = asked.gone["tpwatch-overview: Fault confirmed"]
    (active,) = asked.gone["tpwatch-overview: Faulty replica groups A"]
    assert mark["metric"]["kind"] == catalog.get(FAULT).kind
    assert mark["values"][0][0] == active["values"][0][0]
    assert mark["values"][-1][0] < active["values"][-1][0]


@pytest.mark.parametrize("chosen", [{"run": "another"}, {"run": RUN, "group": "tp-8"}], ids=["run", "group"])
def test_nothing_else_is_shown(asked: Asked, chosen: dict[str, str]) -> None:
    """With another run or another group chosen no query finds this one."""
    assert [name for name, question in QUESTIONS.items() if ask(asked.stack, question, asked.since, **chosen)] == []


def test_no_other_stage_is_shown(asked: Asked) -> None:
    """With another pipeline stage chosen no panel of the groups' dashboard finds this one."""
    panels = list(questions(DASHBOARDS["tpwatch-groups"], marks=False))
    assert [q.where for q in panels if ask(asked.stack, q, asked.since, run=RUN, stage="1")] == []


@pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)
def test_the_choices_are_there(asked: Asked, dashboard: Mapping[str, Any]) -> None:
    """The variables list this run, its pipeline stage as Megatron-core says it, and its replica group."""
    choices = {}
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            (parts,) = re.findall(r"label_values\((.*), (\w+)\)", variable["query"])
            selector, label = filled_in(parts[0], run=RUN), parts[1]
            found = asked.stack._api("series", **{"match[]": selector, "start": asked.since})
            choices[variable["name"]] = {labels[label] for labels in found}
    stages = {"stage": {"0"}} if dashboard["uid"] == "tpwatch-groups" else {}
    assert choices == {"run": {RUN}, **stages, "group": {"tp-0"}}
