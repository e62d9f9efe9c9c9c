"""What the dashboards say once a fault is over, or the run has started again: asked of a real Prometheus."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.export._grafana import DASHBOARDS, filled_in, questions
from tests.export._servers import Stack, stack, wait_until
from tests.unit._samples import finding, plan, step_report
from tpwatch.config import Config, Prometheus
from tpwatch.export import Place
from tpwatch.export.jsonl import RunLog
from tpwatch.export.prometheus import PrometheusSink

pytestmark = [pytest.mark.prom, pytest.mark.timeout(90)]

SECONDS = 60.0
QUESTIONS = {f"{uid}: {question.where}": question for uid, board in DASHBOARDS.items() for question in questions(board)}
HEALTHY, FAULTY, FIRST = (
    f"tpwatch-overview: {title} A" for title in ("Healthy?", "Faulty parameters", "First faulty step")
)
Answer = Mapping[str, float]


class Start:
    """One start of a run: its exporter and what it has to say, on this thread."""

    def __init__(self, place: Place, *, faults: int = 0, first: int = 1, point: str = "param") -> None:
        """Two parameters are watched, `faults` of them drift from step `first` on."""
        directory, group, config = place.directory, place.group, place.config
        self.sink, self.point = PrometheusSink(place), point
        self.log = RunLog(directory, group, "x", lambda line: self.sink.write(json.loads(line)))
        self.log.start(plan("a", "b"), 0, config, versions={"torch": "2"}, stage=str(first))
        for name in "ab"[:faults]:
            self.log.finding(first, finding(parameter=name, kind="drift", point=point, first_step=first))
        self.check(first, faults)

    def check(self, step: int, faults: int) -> None:
        """One checked step at which so many faults hold."""
        held = {f"drift@{self.point}": faults} if faults else {}
        self.log.check(step_report(step, faults=held, phases={"exchange": 0.1}))

    @property
    def port(self) -> int:
        """Where it is scraped."""
        return urlsplit(self.sink.url).port or 0

    def close(self) -> None:
        """The process ends in order."""
        self.sink.close()
        self.log.close()


@dataclass(frozen=True)
class Asked:
    """The server, after everything has happened, and what was answered before."""

    stack: Stack
    before: Mapping[str, Answer]
    """To the first panel, by run: while the faults held."""
    running: Mapping[str, tuple[Answer, ...]]
    """To the first three panels, by run: before the later starts ended."""


def ask(servers: Stack, name: str, run: str, label: str = "kind", **chosen: str) -> Answer:
    """The numbers of a panel by a label."""
    question = QUESTIONS[name]
    assert question.now
    found = servers.query(filled_in(question.expr, run=run, window="4s", **chosen))
    return {one["metric"].get(label, ""): float(one["value"][1]) for one in found}


def first_row(servers: Stack, run: str) -> tuple[Answer, ...]:
    """What the panels say that one looks at first."""
    return tuple(ask(servers, name, run) for name in (HEALTHY, FAULTY, FIRST))


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    """Runs with a fault that is fixed, is found again (there or at another address), is over, or stays to the end."""
    directory = tmp_path_factory.mktemp("restart")
    deadline = time.monotonic() + SECONDS
    with stack(directory) as servers, ExitStack() as cleanup:

        def start(run: str, group: str = "tp-0", port: int = 0, **story: Any) -> Start:
            config = Config(prometheus=Prometheus(enabled=True, port=port, file_sd=str(servers.targets)))
            made = Start(Place(config, directory / run, group), **story)
            cleanup.callback(made.close)
            return made

        def seen(expression: str) -> None:
            wait_until(lambda: servers.query(expression), expression, deadline)

        runs = ("fixed", "there", "moved", "over", "ended")
        first = {run: start(run, faults=2, first=3) for run in runs}
        healthy = start("ended", "tp-2")
        seen("count(tpwatch_last_check_step) == 6")
        before = {run: ask(servers, HEALTHY, run) for run in runs}
        first["over"].check(9, 0)
        for run in ("fixed", "there", "moved", "ended"):
            first[run].close()
        found = {"faults": 1, "first": 9, "point": "grad_post"}
        later = [start("there", port=first["there"].port, **found), start("moved", **found), start("fixed", first=9)]
        assert later[0].port == first["there"].port
        assert later[1].port != first["moved"].port
        seen("count(tpwatch_last_check_step == 9) == 4")
        seen('count(tpwatch_last_check_step{run="ended"}) == 1')  # the faulty group went first
        before["alone"] = ask(servers, HEALTHY, "ended")
        running = {run: first_row(servers, run) for run in runs}
        for run in (healthy, first["over"], *later):
            run.close()
        seen("absent(tpwatch_last_check_step)")
        yield Asked(servers, before, running)


def test_a_fault_that_holds_shows(asked: Asked) -> None:
    """Of each run, while it had one."""
    assert {run: max(answer.values()) for run, answer in asked.before.items()} == dict.fromkeys(asked.before, 1.0)


@pytest.mark.parametrize("run", ["fixed", "over"])
def test_a_fault_that_is_over_is_shown_no_more(asked: Asked, run: str) -> None:
    """The run has started again with the fix, or all parameters are healthy again; neither once the run is gone."""
    assert asked.running[run] == first_row(asked.stack, run) == ({"": 0.0}, {}, {})
    assert ask(asked.stack, "tpwatch-overview: Faults by replica group A", run) == {}
    assert ask(asked.stack, "tpwatch-groups: Replica groups A", run) == {}


@pytest.mark.parametrize("run", ["fixed", "over"])
def test_the_tables_remember_it(asked: Asked, run: str) -> None:
    """Within the time range, under names that say so."""
    assert ask(asked.stack, "tpwatch-overview: Faults by replica group B", run) == {"drift": 2}
    assert ask(asked.stack, "tpwatch-groups: Replica groups B", run, "group") == {"tp-0": 2}


@pytest.mark.parametrize("run", ["there", "moved"])
def test_only_the_latest_start_counts(asked: Asked, run: str) -> None:
    """It found the same kind again, later, in fewer parameters and at another point; at the same address or another."""
    assert asked.running[run] == ({"": 1.0}, {"drift": 1}, {"drift": 9})


def test_only_the_latest_start_counts_of_a_run_that_is_gone(asked: Asked) -> None:
    """Its earlier start was scraped at another address."""
    assert first_row(asked.stack, "moved") == ({"": 1.0}, {"drift": 1}, {"drift": 9})


def test_a_run_that_ended_with_a_fault_stays_faulty(asked: Asked) -> None:
    """Though its faulty group was the first to go, and a healthy one was scraped last."""
    assert asked.running["ended"] == first_row(asked.stack, "ended") == ({"": 1.0}, {"drift": 2}, {"drift": 3})


def test_the_stage_is_that_of_the_latest_start(asked: Asked) -> None:
    """A run may start again in another layout: one row, not two, and the stage can be chosen."""
    table = "tpwatch-groups: Replica groups C"
    assert ask(asked.stack, table, "fixed", "stage") == {"9": 9}
    assert ask(asked.stack, table, "ended", "group", stage="3") == {"tp-0": 3}
    assert ask(asked.stack, table, "ended", "group", stage="1|3") == {"tp-0": 3, "tp-2": 1}
