"""A run that is stopped: what is on disk, and with the sinks, before the error is raised that may end the process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.unit._samples import finding, plan, step_report
from tpwatch.config import Config
from tpwatch.export import Place
from tpwatch.export.fanout import Fanout
from tpwatch.export.jsonl import Events, RunLog, event_file, write_summary
from tpwatch.export.recorder import Leader, Teller
from tpwatch.report.summary import summarize


class Keeps:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.events: list[Mapping[str, Any]] = []

    def write(self, event: Mapping[str, Any]) -> None:
        """Keep one event."""
        self.events.append(event)

    def close(self) -> None:
        """Nothing is left to do."""


@pytest.fixture
def sink() -> Keeps:
    """The sink of the run."""
    return Keeps()


@pytest.fixture
def fanout(tmp_path: Path, sink: Keeps) -> Iterator[Fanout]:
    """A fan-out to it."""
    fanout = Fanout({"keeps": lambda _place: sink}, Place(Config(), tmp_path, "tp-0"))
    yield fanout
    fanout.close()


def leader(directory: Path, fanout: Fanout, summarize: Callable[[], None]) -> Leader:
    """A leader that has told of one step."""
    log = RunLog(directory, "tp-0", "x", fanout.hand_over)
    log.start(plan("a"), 0, Config())
    log.check(step_report(1))
    return Leader(log, fanout, "launch-1", summarize)


def kinds(sink: Keeps) -> list[str]:
    """Kinds of the events that reached the sink."""
    return [event["event"] for event in sink.events]


def test_an_abort_is_everywhere_before_the_error_is_raised(tmp_path: Path, fanout: Fanout, sink: Keeps) -> None:
    """Event file, sinks, `abort.json`, a summary that knows of it: nothing is left for a `close` that never comes."""
    recorder = leader(tmp_path, fanout, lambda: write_summary(tmp_path, summarize(tmp_path)) and None)
    recorder.abort(2, [finding(parameter="a")])
    assert kinds(sink) == ["start", "check", "finding", "abort"]
    assert [json.loads(line)["event"] for line in event_file(tmp_path, "tp-0").read_text().splitlines()] == kinds(sink)
    assert json.loads((tmp_path / "abort.json").read_text())["launch_id"] == "launch-1"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["verdict"], summary["aborted_at"], summary["findings"][0]["parameter"]) == ("faults", 2, "a")


def test_a_rank_that_only_has_sinks_waits_for_them_too(fanout: Fanout, sink: Keeps) -> None:
    """The one on which the trainer logs, say."""
    Teller(Events("x", lambda _event, line: fanout.hand_over(line)), fanout).abort(2, [finding()])
    assert kinds(sink) == ["finding", "abort"]


def test_an_abort_that_cannot_be_written_reaches_the_sinks(
    tmp_path: Path, fanout: Fanout, sink: Keeps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is for the guard to count; the sinks have heard of the abort all the same."""

    def full(*_args: object) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tpwatch.export.recorder.write_abort", full)
    recorder = leader(tmp_path, fanout, lambda: None)
    with pytest.raises(OSError, match="No space left"):
        recorder.abort(2, [finding()])
    assert kinds(sink) == ["start", "check", "finding", "abort"]


def test_a_summary_comes_last(tmp_path: Path, fanout: Fanout, sink: Keeps) -> None:
    """It may take long, and a launcher kills what is left of the job: `abort.json` and the sinks go first."""
    found: list[tuple[bool, list[str]]] = []
    recorder = leader(tmp_path, fanout, lambda: found.append(((tmp_path / "abort.json").exists(), kinds(sink))))
    recorder.abort(2, [])
    assert found == [(True, ["start", "check", "abort"])]


def test_sinks_are_closed_where_the_file_cannot_be(
    tmp_path: Path, fanout: Fanout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may say only then that what was written is lost."""
    recorder = leader(tmp_path, fanout, lambda: None)
    monkeypatch.setattr(recorder._events, "close", lambda: (_ for _ in ()).throw(OSError(122, "Disk quota exceeded")))
    with pytest.raises(OSError, match="quota"):
        recorder.leave()
    assert fanout._lanes == []
