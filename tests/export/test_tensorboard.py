"""The TensorBoard sink as TensorBoard's own reader sees it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.commands import REPOSITORY, run_python
from tests.export.test_session import STEPS, attach, train
from tests.unit._samples import finding, plan, step_report
from tpwatch.config import Config, TensorBoard
from tpwatch.errors import ConfigError
from tpwatch.export import Health, Place
from tpwatch.export.jsonl import RunLog
from tpwatch.export.sinks import Loss
from tpwatch.export.tensorboard import MOST_TEXTS, TensorBoardSink

Ranks = Callable[..., list[Any]]
Points = list[tuple[int, float]]
WHOLE = {"scalars": 0, "tensors": 0}
"""TensorBoard's way to say: read all, thin out nothing."""


class Run:
    """A run log whose events go to a TensorBoard sink, on this thread."""

    def __init__(self, out: Path, group: str = "tp-0", start: int = 0, **knobs: Any) -> None:
        """Start the run after the step `start`."""
        config = Config(tensorboard=TensorBoard(enabled=True, **knobs))
        self.sink = TensorBoardSink(Place(config, out, group, Health({"tensorboard": Loss()})))
        self.log = RunLog(out, group, "x", lambda line: self.sink.write(json.loads(line)))
        self.log.start(plan("a", "b"), start, config, fingerprint={"name": "native"}, versions={"torch": "2"})
        self.open = True

    def checks(self, *steps: int, **changes: Any) -> None:
        """Checks at which the same was seen, that took equally long."""
        for step in steps:
            self.log.check(step_report(step, **{"phases": {"exchange": 0.25}, **changes}))

    def end(self, step: int) -> None:
        """End in order."""
        self.log.end(step)
        self.close()

    def close(self) -> None:
        """Close sink and log; idempotent."""
        if self.open:
            self.open = False
            self.sink.close()
            self.log.close()


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start runs below this test's directory; their files are closed at the end."""
    runs: list[Run] = []

    def start(name: str = "run-1", **options: Any) -> Run:
        runs.append(Run(tmp_path / name, **options))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def read(folder: Path) -> EventAccumulator:
    """What TensorBoard shows of a folder."""
    return EventAccumulator(str(folder), size_guidance=WHOLE).Reload()


def curves(folder: Path) -> dict[str, Points]:
    """Step and value of every point of every curve, by tag without `tpwatch/`."""
    shown = read(folder)
    return {
        tag.removeprefix("tpwatch/"): [(point.step, point.value) for point in shown.Scalars(tag)]
        for tag in shown.Tags()["scalars"]
    }


def texts(folder: Path) -> dict[str, list[tuple[int, str]]]:
    """Step and Markdown of every text, by tag without `tpwatch/`."""
    shown = read(folder)
    return {
        tag.removeprefix("tpwatch/"): [(t.step, t.tensor_proto.string_val[0].decode()) for t in shown.Tensors(tag)]
        for tag in shown.Tags()["tensors"]
    }


def at(points: Points, step: int) -> float:
    """Height of a curve at a step, as drawn: points joined by straight lines."""
    (before, low) = max(point for point in points if point[0] <= step)
    (after, high) = min(point for point in points if point[0] >= step)
    return low if after == before else low + (high - low) * (step - before) / (after - before)


# ------------------------------------------------------------------------------------------- curves


def watched(rank: int, out: str) -> None:
    """Train with the sink on."""
    model, watch = attach(f"{out}/run", tensorboard={"enabled": True})
    train(model, rank)
    watch.detach()


def expected(events: list[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """The curves that a run's events make, worked out from them alone: value by step."""
    curves: dict[str, dict[int, float]] = {}
    sent = collectives = 0
    for check in (event for event in events if event["event"] == "check"):
        step = check["step"]
        sent += check["bytes_exchanged"]
        collectives += check["collectives"]
        values = {"exchanged_bytes_total": sent, "collectives_total/watch": collectives}
        values |= {f"differing_replicas/{point}": count for point, count in check["differing"].items()}
        values |= {f"check_duration_seconds/{phase}": seconds for phase, seconds in check["phases"].items()}
        values |= {"grad_norm_min_ratio": check["ratio_lo"], "grad_norm_max_ratio": check["ratio_hi"]}
        for tag, value in values.items():
            curves.setdefault(tag, {})[step] = value
    return curves


def test_curves_are_those_of_the_event_file(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """A real run: at every check each curve has the height that the event says, and the finding is told."""
    gloo_ranks(2, watched, str(tmp_path), timeout=60)
    lines = (tmp_path / "run" / "events.tp-0.jsonl").read_text().splitlines()
    folder = tmp_path / "run" / "tensorboard" / "tp-0"
    shown = curves(folder)
    wanted = expected([json.loads(line) for line in lines])
    assert len(wanted["exchanged_bytes_total"]) == STEPS
    for tag, values in wanted.items():
        assert {step: at(shown[tag], step) for step in values} == pytest.approx(values, rel=1e-6), tag
    assert at(shown["drift_active/missing-reduce"], STEPS) == 1
    assert [path.name for path in folder.parent.iterdir()] == ["tp-0"]
    assert "finding/missing-reduce/first" in texts(folder)


def test_a_curve_has_points_only_where_it_bends(start: Start, tmp_path: Path) -> None:
    """Unchanged values are not repeated, yet the line stays flat until the step of the change."""
    run = start()
    run.checks(*range(1, 11), differing={"grad_post": 0})
    run.checks(11, 12, differing={"grad_post": 2})
    run.end(12)
    shown = curves(tmp_path / "run-1" / "tensorboard" / "tp-0")
    assert shown["differing_replicas/grad_post"] == [(1, 0), (10, 0), (11, 2), (12, 2)]
    assert shown["check_duration_seconds/exchange"] == [(1, 0.25), (12, 0.25)]
    assert shown["exchanged_bytes_total"] == [(step, 1000 * step) for step in range(1, 13)]


def test_what_changed_after_the_last_check_is_shown_at_the_end(start: Start, tmp_path: Path) -> None:
    """A status comes last, and the end of the watch."""
    run = start()
    run.checks(1, 2)
    run.log.status(2, ["b"], [])
    run.end(2)
    shown = curves(tmp_path / "run-1" / "tensorboard" / "tp-0")
    assert shown["not_exercised_replicas"] == [(2, 1)]
    assert shown["watching"] == [(1, 1), (2, 0)]


def test_steps_and_times_are_no_curves(start: Start, tmp_path: Path) -> None:
    """They are the axes; in 32 bits Unix time would be wrong by minutes. Facts are a text."""
    run = start()
    run.checks(1)
    run.end(1)
    folder = tmp_path / "run-1" / "tensorboard" / "tp-0"
    assert [tag for tag in curves(folder) if "timestamp" in tag or "step" in tag or "info" in tag] == []
    ((step, facts),) = texts(folder)["run"]
    assert step == 0
    assert "| torch | 2 |" in facts


def test_points_have_the_time_of_their_event(start: Start, tmp_path: Path) -> None:
    """Not of when they were written: a sink may be behind."""
    run = start()
    run.checks(1)
    run.end(1)
    (check,) = (
        event
        for event in map(json.loads, (tmp_path / "run-1" / "events.tp-0.jsonl").read_text().splitlines())
        if event["event"] == "check"
    )
    points = read(tmp_path / "run-1" / "tensorboard" / "tp-0").Scalars("tpwatch/exchanged_bytes_total")
    assert [point.wall_time for point in points] == [check["time"]]


def test_files_stay_small(start: Start, tmp_path: Path) -> None:
    """A check at which all that usually changes has changed takes less than 700 bytes."""
    run = start()
    folder = tmp_path / "run-1" / "tensorboard" / "tp-0"

    def check(step: int) -> None:
        phases = dict.fromkeys(("fingerprint", "exchange", "diagnose"), 0.001 * step)
        run.log.check(step_report(step, phases=phases, ratio_lo=1.0 / step, ratio_hi=1.0 + step))

    check(1)
    (path,) = folder.iterdir()
    before = path.stat().st_size
    for step in range(2, 102):
        check(step)
    assert 100 * 100 < path.stat().st_size - before < 100 * 700


# ----------------------------------------------------------------------------------------- findings


def test_a_finding_is_a_text_at_its_first_step(start: Start, tmp_path: Path) -> None:
    """Readable at once, before the file is closed; however often it is written, it is told once."""
    run = start()
    run.checks(1, 2, 3)
    for _ in range(3):
        run.log.finding(3, finding(first_step=2, parameter="a.weight", max_abs=0.125))
    ((step, text),) = texts(tmp_path / "run-1" / "tensorboard" / "tp-0")["finding/double-reduce/a.weight"]
    assert step == 2
    for fact in ("double-reduce", "a.weight", "TPW104", "error", "observed: sum", "0.125", "Reduce it once."):
        assert fact in text


def test_a_finding_that_gets_worse_is_told_again(start: Start, tmp_path: Path) -> None:
    """Once for each severity."""
    run = start()
    for severity in ("info", "info", "error", "error"):
        run.log.finding(1, finding(severity=severity, parameter="a"))
    told = texts(tmp_path / "run-1" / "tensorboard" / "tp-0")["finding/double-reduce/a"]
    assert [("info" in text, "error" in text) for _, text in told] == [(True, False), (False, True)]


def test_a_finding_says_what_it_follows_from(start: Start, tmp_path: Path) -> None:
    """And that a difference is not finite, which JSON has no number for."""
    run = start()
    run.log.finding(1, finding(parameter="a", role="consequence", caused_by="b", max_abs=float("inf")))
    ((_, text),) = texts(tmp_path / "run-1" / "tensorboard" / "tp-0")["finding/double-reduce/a"]
    assert "follows from `b`" in text
    assert "not finite" in text


def test_texts_are_bounded(start: Start, tmp_path: Path) -> None:
    """Of very many findings the rest is counted."""
    run = start()
    for number in range(MOST_TEXTS + 3):
        run.log.finding(1, finding(parameter=f"p{number}"))
    run.end(1)
    shown = texts(tmp_path / "run-1" / "tensorboard" / "tp-0")
    told = [tag for tag in shown if tag.startswith("finding/double-reduce/")]
    assert len(told) == MOST_TEXTS
    ((_, more),) = shown["finding/more"]
    assert more.startswith("3 more")


# ------------------------------------------------------------------------------------ files, folders


def test_each_group_has_a_folder(start: Start, tmp_path: Path) -> None:
    """In the run directory, or, side by side with other runs, in a directory of the user's."""
    start(group="tp-0")
    start(group="tp-2")
    start("run-2", directory=str(tmp_path / "board"))
    start("run-3", directory=str(tmp_path / "board"))
    assert {path.name for path in (tmp_path / "run-1" / "tensorboard").iterdir()} == {"tp-0", "tp-2"}
    assert {path.name for path in (tmp_path / "board").iterdir()} == {"run-2.tp-0", "run-3.tp-0"}
    assert not (tmp_path / "run-2" / "tensorboard").exists()


def test_a_restart_replaces_the_steps_that_are_trained_again(start: Start, tmp_path: Path) -> None:
    """From a checkpoint at step 2: what was shown of later steps is forgotten, steps 1 and 2 stay."""
    first = start()
    first.checks(1, 2, 3, 4, bytes_exchanged=100)
    first.close()
    second = start(start=2)
    second.checks(3, bytes_exchanged=7)
    second.end(3)
    shown = curves(tmp_path / "run-1" / "tensorboard" / "tp-0")
    assert shown["exchanged_bytes_total"] == [(1, 100), (2, 200), (3, 7)]


def test_what_was_written_is_whole_although_the_process_was_killed(start: Start, tmp_path: Path) -> None:
    """Every event is in the file at once; a torn record at its end hides nothing before."""
    run = start()
    run.log.finding(1, finding(parameter="a"))
    run.checks(1)
    folder = tmp_path / "run-1" / "tensorboard" / "tp-0"
    (path,) = folder.iterdir()
    with path.open("ab") as file:
        file.write(b"\x30\x00\x00")
    assert curves(folder)["exchanged_bytes_total"] == [(1, 1000)]
    assert "finding/double-reduce/a" in texts(folder)


def test_without_tensorboard_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, start: Start) -> None:
    """What to install, not where the import broke."""
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    with pytest.raises(ConfigError, match=r"tpwatch\[tensorboard\]"):
        start()


USE = """
import sys
from pathlib import Path
from tpwatch.config import Config
from tpwatch.export import Place
from tpwatch.export.tensorboard import TensorBoardSink
sink = TensorBoardSink(Place(Config(), Path(sys.argv[1]), "tp-0"))
sink.close()
sys.exit("tensorflow" in sys.modules or "torch" in sys.modules)
"""


def test_neither_tensorflow_nor_torch_is_imported(tmp_path: Path) -> None:
    """Where TensorFlow is installed, TensorBoard's own file layer would load it into the trainer."""
    package = tmp_path / "site" / "tensorflow"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    done = run_python(
        "-c", USE, tmp_path / "run", env={"PYTHONPATH": os.pathsep.join(map(str, (tmp_path / "site", REPOSITORY)))}
    )
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "run" / "tensorboard" / "tp-0").iterdir())
