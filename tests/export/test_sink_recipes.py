"""The page about sinks: its recipes run as they are printed, its events look like real ones."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.commands import REPOSITORY
from tests.unit._samples import finding, plan, step_report
from tpwatch.config import Config
from tpwatch.export import Health, Place
from tpwatch.export.fanout import Fanout
from tpwatch.export.jsonl import RunLog
from tpwatch.export.sinks import chosen
from tpwatch.job import JobView

PAGE = (REPOSITORY / "docs" / "sinks.md").read_text()
LONGEST = 20
"""Lines of a recipe."""

Install = Callable[[str], None]


def recipe(name: str) -> str:
    """A file that the page shows."""
    _, _, behind = PAGE.partition(f"```python\n# {name}.py\n")
    return behind.partition("```")[0]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a recipe on the path, as a user would."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    installed: list[str] = []

    def install(name: str) -> None:
        (site / f"{name}.py").write_text(recipe(name))
        installed.append(name)

    yield install
    for name in installed:
        sys.modules.pop(name, None)


def run_with(sink: str, directory: Path) -> Health:
    """A run of two checks and two findings, on a sink's own thread; what was lost."""
    config = Config(sinks=(sink,))
    place = Place(config, directory, "tp-0")
    fanout = Fanout(chosen(config), place)
    log = RunLog(directory, "tp-0", "x", fanout.hand_over)
    log.start(plan("a"), 0, config)
    for step, count in ((1, 0), (2, 3)):
        log.check(step_report(step, differing={"param": 0, "grad_post": count}))
    log.finding(2, finding(parameter="a.weight"))
    log.finding(2, finding(parameter="b.weight", role="consequence", caused_by="a.weight"))
    log.end(2)
    fanout.close(30.0)
    log.close()
    return place.health


@pytest.mark.parametrize("name", re.findall(r"```python\n# (\w+)\.py\n", PAGE))
def test_recipes_are_short(name: str) -> None:
    """A recipe that needs more than a screen is no recipe."""
    assert 8 <= len([line for line in recipe(name).splitlines() if line.strip()]) <= LONGEST


# ----------------------------------------------------------------------------------------- trackers
#
# Each tracker is larger (117, 73 and 167 MB with what it needs) than all that tests of exporters install, so that named
# doubles of the calls that the recipes make stand in here. The recipes were run against mlflow-skinny 3.17.2,
# swanlab 0.10.3 and trackio 0.43.0 when they were written.

CHECKS = [
    ("differing/param", 0, 1), ("differing/grad_post", 0, 1), ("differing/param", 0, 2), ("differing/grad_post", 3, 2),
]  # fmt: skip
"""Name, value and step of what `run_with` makes a tracker show."""


@dataclass
class Tracker:
    """What a tracker was told."""

    opened: list[str] = field(default_factory=list)
    points: list[tuple[str, float, int]] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)
    closed: int = 0

    def log(self, values: dict[str, Any], step: int) -> None:
        """Numbers are points, other things texts, as in SwanLab and trackio."""
        for name, value in values.items():
            if isinstance(value, str):
                self.texts.append((name, value))
            else:
                self.points.append((name.removeprefix("tpwatch/"), value, step))

    def finish(self) -> None:
        """The run is over."""
        self.closed += 1


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make a module of a name with these attributes importable."""

    def stand_in(name: str, **attributes: Any) -> None:
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)

    return stand_in


class MlflowClientDouble:
    """The double of `mlflow.MlflowClient`."""

    def __init__(self, told: Tracker) -> None:
        self.told = told

    def create_run(self, experiment_id: str, *, run_name: str) -> SimpleNamespace:
        """Open a run."""
        assert experiment_id == "0"
        self.told.opened.append(run_name)
        return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

    def log_metric(self, run_id: str, key: str, value: float, *, step: int) -> None:
        """One point."""
        assert run_id == "r1"
        self.told.log({key: value}, step)

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        """One text."""
        assert run_id == "r1"
        assert len(key) <= 250  # more is refused
        self.told.texts.append((key, value))

    def set_terminated(self, run_id: str) -> None:
        """End a run."""
        assert run_id == "r1"
        self.told.finish()


def test_mlflow(install: Install, stand_in: Callable[..., None], tmp_path: Path) -> None:
    """A run of its own, named by run and group; each fault is a tag."""
    told = Tracker()
    stand_in("mlflow", MlflowClient=lambda: MlflowClientDouble(told))
    install("mlflow_sink")
    health = run_with("mlflow_sink:MlflowSink", tmp_path / "run-7")
    assert health.losses["mlflow_sink:MlflowSink"].errors == 0
    assert (told.opened, told.points, told.closed) == (["run-7.tp-0"], CHECKS, 1)
    assert told.texts == [("tpwatch.double-reduce.a.weight", "sum"), ("tpwatch.double-reduce.b.weight", "sum")]


@pytest.mark.parametrize("trainers", [False, True])
def test_swanlab(trainers: bool, install: Install, stand_in: Callable[..., None], tmp_path: Path) -> None:  # noqa: FBT001
    """The trainer's run is used and left open; without one, one of its own is opened and finished."""
    told = Tracker()

    def init(*, project: str, experiment_name: str) -> None:
        assert project == "tpwatch"
        told.opened.append(experiment_name)

    stand_in("swanlab", has_run=lambda: trainers, init=init, log=told.log, Text=str, finish=told.finish)
    install("swanlab_sink")
    health = run_with("swanlab_sink:SwanLabSink", tmp_path / "run-7")
    assert health.losses["swanlab_sink:SwanLabSink"].errors == 0
    assert (told.opened, told.closed) == (([], 0) if trainers else (["run-7.tp-0"], 1))
    assert told.points == CHECKS
    assert told.texts[0] == ("tpwatch/double-reduce/a.weight", "error: sum. Reduce it once.")


def test_trackio(install: Install, stand_in: Callable[..., None], tmp_path: Path) -> None:
    """Causes are alerts; what follows from them is not."""
    told = Tracker()

    def init(*, project: str, name: str) -> Tracker:
        assert project == "tpwatch"
        told.opened.append(name)
        return told

    stand_in("trackio", init=init, alert=lambda title, *, text: told.texts.append((title, text)))
    install("trackio_sink")
    health = run_with("trackio_sink:TrackioSink", tmp_path / "run-7")
    assert health.losses["trackio_sink:TrackioSink"].errors == 0
    assert (told.opened, told.points, told.closed) == (["run-7.tp-0"], CHECKS, 1)
    assert told.texts == [("double-reduce of a.weight", "Reduce it once.")]


# ------------------------------------------------------------------------------------------- events


def documented() -> list[dict[str, Any]]:
    """Every event that the page shows."""
    decoder, found = json.JSONDecoder(), []
    for block in re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL):
        rest = block.strip()
        while rest:
            event, end = decoder.raw_decode(rest)
            found.append(event)
            rest = rest[end:].lstrip()
    return found


def real(directory: Path) -> dict[str, dict[str, Any]]:
    """An event of each kind as a run log writes it."""
    lines: list[str] = []
    log = RunLog(directory, "tp-0", "1-4242", lines.append)
    facts: dict[str, Any] = {"fingerprint": {"name": "native", "reason": "CPU"}, "versions": {"torch": "2"}}
    facts["stage"] = "0"
    log.start(plan("a", "b", not_watched=(("c", "sharded"),)), 0, Config(), **facts)
    phases = {"fingerprint": 1e-3, "exchange": 1e-3, "diagnose": 1e-3}
    log.check(step_report(1, phases=phases, ratio_lo=1.0, ratio_hi=1.5))
    log.finding(3, finding())
    log.status(3, [], [])
    log.note(3, "slow")
    view = JobView(3, stop=False, save=False, now=False, counts={"drift": 2}, ratio=2.0, max_abs=0.03)
    log.job(3, view.to_json())
    log.abort(3)
    log.end(3)
    log.close()
    return {event["event"]: event for event in map(json.loads, lines)}


def form(value: Any) -> Any:
    """What a value looks like: keys and types, lists by their first item; free-form mappings are left open."""
    if isinstance(value, dict):
        return {key: "..." if key in ("config", "versions", "evidence") else form(item) for key, item in value.items()}
    if isinstance(value, list):
        return [form(value[0])] if value else []
    return "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value).__name__


def test_documented_events_look_like_real_ones(tmp_path: Path) -> None:
    """Every kind is shown, with every key and the type of every value."""
    written = real(tmp_path)
    shown = {event["event"]: event for event in documented()}
    assert list(shown) == list(written)
    for kind, event in shown.items():
        assert form(event) == form(written[kind]), kind
