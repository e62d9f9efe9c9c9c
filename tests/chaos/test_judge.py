"""Each judgement accepts a run that keeps its promise, and refuses one that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import _judge as judge
from tests.chaos._runs import Run
from tests.chaos._schedule import Scenario
from tests.unit._report_runs import steps, write_run
from tests.unit._samples import finding, plan
from tpwatch.act import ABORT_EXIT_CODE

LAST = 3
QUIET = Scenario(steps=LAST)
DEADLY = Scenario(steps=LAST, kind="own-error", point="forward", rank=1, step=2)
KILL = replace(DEADLY, kind="killed")
STOPPING = Scenario(steps=LAST, faulty=True, config={"on_fault": "abort"})
SWITCHED_OFF = Scenario(steps=LAST, kind="kill-switch", point="environment")

TRACEBACK = (
    'Traceback (most recent call last):\n  File "/x/tests/chaos/_hosts.py", line 1, in step\n{}RuntimeError: gone\n'
)
GONE = TRACEBACK.format("")
OURS = TRACEBACK.format('  File "/x/site-packages/tpwatch/monitor.py", line 2, in _send\n')


@dataclass
class Sketch:
    """A run of two ranks, to be drawn as it should be or not: by default a quiet one that is all right."""

    directory: Path
    scenario: Scenario = QUIET
    until: dict[int, int] = field(default_factory=lambda: {0: LAST, 1: LAST})
    """Last step that each rank completed."""
    stops: dict[int, int] = field(default_factory=dict)
    """Step at which tpwatch stopped each rank."""
    codes: dict[int, int | None] = field(default_factory=dict)
    outputs: dict[int, str] = field(default_factory=dict)
    fired: bool = False
    on: bool = True
    odd: dict[int, dict[str, Any]] = field(default_factory=dict)
    """What rank 1 notes otherwise, by step."""
    weights: str = "w"
    process: str = "p"
    ending: float = 0.1
    findings: list[Any] = field(default_factory=list)
    checks: int = LAST

    def run(self) -> Run:
        """The run, with a real run directory unless `checks` is negative."""
        if self.checks >= 0:
            found = [(LAST, f) for f in self.findings]
            write_run(self.directory, plan("gain"), findings=found, checks=steps(self.checks))
        return Run(
            scenario=self.scenario,
            codes=[self.codes.get(rank, 0) for rank in (0, 1)],
            diaries=[self._diary(rank) for rank in (0, 1)],
            outputs=[self.outputs.get(rank, "") for rank in (0, 1)],
            directory=self.directory,
        )

    def _diary(self, rank: int) -> list[dict[str, Any]]:
        notes: list[dict[str, Any]] = [{"what": "attached", "on": self.on, "reason": ""}]
        if self.fired and rank == self.scenario.rank:
            notes.append({"what": "fired", "step": self.scenario.step})
        for step in range(1, self.until[rank] + 1):
            seen = {
                "loss": (0.5 * step).hex(),
                "state": f"s{step}",
                "on": self.on,
                "collectives": 2 * step,
                "reported": step * self.on,
            }
            notes.append({"what": "step", "step": step, **seen, **(self.odd.get(step, {}) if rank else {})})
        if rank in self.stops:
            notes.append({"what": "stopped", "step": self.stops[rank], "during": self.stops[rank]})
        elif self.until[rank] == LAST and not (self.fired and self.scenario.traits.deadly):
            found = [[f.kind, f.parameter] for f in self.findings]
            notes.append(
                {
                    "what": "done",
                    "weights": self.weights,
                    "process": self.process,
                    "findings": found,
                    "ending": self.ending,
                }
            )
        return notes


def died(**changes: Any) -> dict[str, Any]:
    """Rank 1 ends by its own error in step 2, and rank 0 by the framework's."""
    said = {0: GONE, 1: "planted: rank 1 at forward in step 2\n"}
    usual = {
        "scenario": DEADLY,
        "fired": True,
        "until": {0: 1, 1: 1},
        "codes": {0: 1, 1: 1},
        "outputs": said,
        "checks": 1,
    }
    return {**usual, **changes}


def killed(**changes: Any) -> dict[str, Any]:
    """Rank 1 is killed in step 2."""
    return died(scenario=KILL, codes={0: 1, 1: -9}, outputs={0: GONE}, **changes)


def stopped(**changes: Any) -> dict[str, Any]:
    """Both ranks are stopped by tpwatch in step 3, by the fault of the model."""
    usual = {
        "scenario": STOPPING,
        "until": {0: 2, 1: 2},
        "stops": {0: 3, 1: 3},
        "codes": dict.fromkeys((0, 1), ABORT_EXIT_CODE),
        "findings": [finding(kind="missing-reduce", parameter="gain")],
    }
    return {**usual, **changes}


def off(**changes: Any) -> dict[str, Any]:
    """One rank is switched off, and so are all."""
    return {"scenario": SWITCHED_OFF, "on": False, "checks": -1, **changes}


@pytest.mark.parametrize(
    "drawn", [{}, died(), killed(), stopped(), off()], ids=("quiet", "died", "killed", "stopped", "off")
)
def test_nothing_is_wrong_with_a_run_that_keeps_its_promises(drawn: dict[str, Any], tmp_path: Path) -> None:
    """Whole, with an error of its own, killed, stopped, switched off."""
    plain = Sketch(tmp_path / "plain", replace(drawn.get("scenario", QUIET).unwatched(), steps=LAST), on=False).run()
    assert judge.broken(Sketch(tmp_path / "run", **drawn).run(), plain) == []


OTHER = finding(kind="drift", parameter="head.weight")

BREACHES: list[tuple[Callable[[Run], judge.Wrong], dict[str, Any], str]] = [
    (judge.no_hang, {"codes": {1: None}}, "rank 1 had not ended"),
    (judge.no_hang, {"ending": 20.0}, "rank 0 took 20 s to finish"),
    (judge.own_end, {"codes": {1: 1}, "outputs": {1: GONE}}, "rank 1 ended with 1 instead of 0"),
    (judge.own_end, died(codes={0: 1, 1: 0}), "rank 1 ended with 0 instead of 1"),
    (judge.own_end, died(outputs={0: GONE, 1: "another error"}), "rank 1 did not say"),
    (judge.own_end, died(codes={0: 0, 1: 1}), "rank 0 ended with 0 instead of 1"),
    (judge.own_end, died(scenario=replace(DEADLY, exit_code=37)), "rank 1 ended with 1 instead of 37"),
    (judge.own_end, died(outputs={0: OURS, 1: "planted: rank 1 at forward"}), "an error in tpwatch/monitor.py"),
    (
        judge.own_end,
        died(outputs={0: OURS.replace("\n", "\n[rank0]:"), 1: "planted: rank 1 at forward"}),
        "tpwatch/monitor.py",
    ),
    (judge.own_end, stopped(codes={0: ABORT_EXIT_CODE, 1: 1}), "instead of 86"),
    (judge.goes_on, {"until": {0: LAST, 1: 2}}, "rank 1 did not train to its end"),
    (judge.together, stopped(stops={0: 3, 1: 2}), "different steps"),
    (judge.together, stopped(stops={0: 3}), "different steps"),
    (judge.together, stopped(scenario=QUIET), "nothing may stop this run"),
    (judge.together, stopped(scenario=replace(STOPPING, config={})), "nothing may stop this run"),
    (judge.together, {"odd": {2: {"on": False}}}, "after step 2, on differs"),
    (judge.together, {"odd": {2: {"collectives": 5}}}, "after step 2, collectives differs"),
    (judge.together, {"until": {0: LAST, 1: 2}}, "living ranks trained to different steps"),
    (judge.on_or_off, {"on": False}, "is off after attach"),
    (judge.on_or_off, off(on=True), "is on after attach"),
    (judge.on_or_off, off(checks=0), "though nothing was to be watched"),
    (judge.readable, {"checks": 2}, "checks of steps [3] are missing"),
    (judge.readable, {"checks": -1}, "no such run directory"),
    (judge.nothing_invented, {"findings": [OTHER]}, "invented: drift on head.weight"),
    (judge.nothing_invented, stopped(findings=[OTHER]), "invented: drift on head.weight"),
    (judge.nothing_invented, stopped(findings=[], checks=judge.SURE), "was not found in 5 checks"),
    (judge.quiet, {"outputs": {1: f"{judge.INTERNAL} in entry"}}, "rank 1: tpwatch internal error"),
]


@pytest.mark.parametrize(("promise", "drawn", "complaint"), BREACHES)
def test_a_broken_promise_is_named(
    promise: Callable[[Run], judge.Wrong], drawn: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    """By the judgement that is about it, with rank or step."""
    wrong = list(promise(Sketch(tmp_path / "run", **drawn).run()))
    assert any(complaint in text for text in wrong), wrong


def test_every_promise_is_seen_broken() -> None:
    """No judgement is without a run that it refuses."""
    assert {promise for promise, _, _ in BREACHES} == set(judge.PROMISES)


def test_findings_that_never_reached_the_disk_are_missed(tmp_path: Path) -> None:
    """What a rank says that it found is in the event file."""
    sketch = Sketch(tmp_path / "run", findings=[finding(kind="missing-reduce", parameter="gain")])
    run = sketch.run()
    path = run.directory / "events.tp-0.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"event": "finding"' not in line))
    assert any("findings of rank 0 are missing" in text for text in judge.readable(run))


def test_damaged_lines_are_seen(tmp_path: Path) -> None:
    """Where nobody died and the disk was not full, every line is whole."""
    run = Sketch(tmp_path / "run").run()
    with (run.directory / "events.tp-0.jsonl").open("a") as file:
        file.write('{"schema": 1, "ev')
    assert any("lines are damaged" in text for text in judge.readable(run))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"odd": {2: {"loss": (1.0000001).hex()}}}, "rank 1: the loss of step 2"),
        ({"odd": {3: {"state": "other"}}}, "rank 1: the state of step 3"),
        ({"odd": {2: {"loss": float("nan").hex()}}}, "rank 1: a loss is not finite"),
        ({"weights": "other"}, "rank 0: the weights at the end"),
        ({"process": "other"}, "rank 0: the process at the end"),
    ],
)
def test_another_bit_is_seen(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    """In a loss, in a weight or in the generators of any rank."""
    plain = Sketch(tmp_path / "plain", on=False).run()
    assert any(complaint in text for text in judge.unchanged(Sketch(tmp_path / "run", **change).run(), plain))


def test_a_failure_of_the_framework_is_its_own(tmp_path: Path) -> None:
    """An abort of gloo is nobody's fault where sizes do not match, unless training succeeds without tpwatch."""
    fails = replace(QUIET, kind="no-gradient", point="summed", rank=1, step=2)
    until, codes = {0: 1, 1: 1}, {0: 1, 1: -6}
    plain = Sketch(tmp_path / "plain", fails.unwatched(), until=until, codes=codes, on=False)
    run = Sketch(tmp_path / "run", fails, until=until, codes=codes, checks=1).run()
    assert judge.broken(run, plain.run()) == []
    whole = Sketch(tmp_path / "whole", fails.unwatched(), on=False)
    assert any("did not without tpwatch" in text for text in judge.unchanged(run, whole.run()))


def test_a_run_can_be_repeated_by_name(tmp_path: Path) -> None:
    """The command that a failed run prints has its name in it, and its story the last words of each rank."""
    run = Sketch(tmp_path / "run", replace(QUIET, number=17), outputs={1: "last words"}).run()
    assert "TPWATCH_TEST_CHAOS=plain-17 python -m pytest" in judge.story(run)
    assert "last words" in judge.story(run)
