"""The run directory as written: form of the lines, crash safety, files replaced whole."""

from __future__ import annotations

import json
import os
import resource
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit._samples import finding, plan, step_report
from tpwatch.config import Config
from tpwatch.export.jsonl import RunLog, event_file, write_abort, write_meta, write_summary
from tpwatch.records import SCHEMA, Finding, Summary
from tpwatch.report.events import read_events
from tpwatch.report.summary import summarize


def lines(directory: Path, group: str = "tp-0") -> list[dict[str, Any]]:
    """Every line of an event file, strictly parsed."""

    def refuse(token: str) -> None:
        pytest.fail(f"{token} is no JSON")

    text = event_file(directory, group).read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines() if line]


def test_every_line_stands_alone(tmp_path: Path) -> None:
    """Schema version, event, time, incarnation and step are in each line."""
    log = RunLog(tmp_path, "tp-0", "first")
    log.start(plan("a"), 0, Config(), fingerprint={"name": "reference", "reason": "no compiler"})
    log.check(step_report(1))
    log.finding(1, finding())
    log.status(1, ["a"], ["b"])
    log.note(1, "text")
    log.abort(1)
    log.end(1)
    log.close()
    written = lines(tmp_path)
    assert [line["event"] for line in written] == [
        "start", "check", "finding", "status", "note", "abort", "end",
    ]  # fmt: skip
    for line in written:
        assert line["schema"] == SCHEMA
        assert line["incarnation"] == "first"
        assert line["time"] > 1e9
        assert isinstance(line["step"], int)


def test_a_start_says_what_is_watched_and_how(tmp_path: Path) -> None:
    """Group, ranks, names, what was left out, configuration, and the facts the caller adds."""
    config = Config(interval=4)
    watched = plan("a", "b", first_rank=2, not_watched=(("c", "excluded"),))
    RunLog(tmp_path, "tp-2", "x").start(watched, 7, config, versions={"torch": "2.13.0"})
    (start,) = lines(tmp_path, "tp-2")
    assert (start["group"], start["axis"], start["ranks"]) == ("tp-2", "tp", [2, 3])
    assert (start["replicas"], start["names"]) == (2, ["a", "b"])
    assert start["not_watched"] == [["c", "excluded"]]
    assert start["config"]["interval"] == 4
    assert start["config_digest"] == config.digest()
    assert start["versions"] == {"torch": "2.13.0"}


def test_a_finding_survives_the_file(tmp_path: Path) -> None:
    """What was written is what is read back."""
    seen = finding(odd_ranks=(3,), evidence={"zero_ranks": [1]})
    RunLog(tmp_path, "tp-0", "x").finding(4, seen)
    assert Finding.from_json(lines(tmp_path)[0]["finding"]) == seen


def test_a_line_is_in_the_file_before_the_call_returns(tmp_path: Path) -> None:
    """Nothing waits in a buffer that a kill -9 would take along."""
    log = RunLog(tmp_path, "tp-0", "x")
    log.check(step_report(1))
    assert len(lines(tmp_path)) == 1
    log.check(step_report(2))
    assert len(lines(tmp_path)) == 2


def test_what_must_survive_a_crash_is_forced_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Findings, an abort and the end are synchronised; a checked step is not worth it."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    log = RunLog(tmp_path, "tp-0", "x")
    log.check(step_report(1))
    log.note(1, "text")
    assert synced == []
    log.finding(1, finding())
    log.abort(1)
    log.end(1)
    assert len(synced) == 3


def test_a_restart_appends(tmp_path: Path) -> None:
    """A second start of the job keeps what the first one found."""
    for incarnation in ("first", "second"):
        log = RunLog(tmp_path, "tp-0", incarnation)
        log.check(step_report(1))
        log.close()
    assert [line["incarnation"] for line in lines(tmp_path)] == ["first", "second"]


def test_a_restart_does_not_glue_its_line_to_a_torn_one(tmp_path: Path) -> None:
    """The first line after a kill -9 within a line is readable."""
    path = event_file(tmp_path, "tp-0")
    path.write_text('{"schema": 1, "event": "che')
    log = RunLog(tmp_path, "tp-0", "second")
    log.note(1, "hello")
    torn, line = path.read_text().splitlines()
    assert torn == '{"schema": 1, "event": "che'
    assert json.loads(line)["text"] == "hello"


@pytest.fixture
def room() -> Iterator[Callable[[int | None], None]]:
    """Limit the size of files, by the operating system, to so many bytes; None lifts the limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, before if size is None else (size, before[1]))

    yield limit
    limit(None)


def texts(directory: Path) -> list[str]:
    """Texts of the notes in an event file, whatever else is in it."""
    return [event["text"] for _, event in read_events(directory).of("note")]


def test_a_full_disk_costs_what_nobody_misses(
    tmp_path: Path, room: Callable[[int | None], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A note and a check are lost and counted; a finding is written as soon as there is room; one line in the log."""
    log = RunLog(tmp_path, "tp-0", "x")
    log.note(1, "before")
    room(log.path.stat().st_size + 20)
    log.note(2, "lost")
    log.finding(3, finding(parameter="kept"))
    log.check(step_report(3))
    assert log.lost == 2
    room(None)
    log.note(4, "after")
    log.note(5, "later")
    assert texts(tmp_path) == ["before", "events.tp-0.jsonl: 2 events could not be written", "after", "later"]
    assert [f.parameter for f in summarize(tmp_path).findings] == ["kept"]
    assert [r.getMessage().split(": ", 2)[2] for r in caplog.records] == [
        "File too large. Events are lost until it can be written again."
    ]


def test_each_shortage_is_confessed_with_the_sum(tmp_path: Path, room: Callable[[int | None], None]) -> None:
    """Two shortages, two notes, and the second counts both; the note itself is not lost."""
    log = RunLog(tmp_path, "tp-0", "x")
    for step, number in ((1, 1), (2, 2)):
        room(0)
        for _ in range(number):
            log.note(step, "lost")
        room(None)
        log.note(step, "written")
    lost = [text for text in texts(tmp_path) if "could not be" in text]
    assert lost == [f"events.tp-0.jsonl: {n} events could not be written" for n in (1, 3)]


def test_a_device_that_is_full_is_no_error_of_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """ENOSPC for every line, from the first on: said once, and the reader does not wait for the end of the device."""
    event_file(tmp_path, "tp-0").symlink_to("/dev/full")
    log = RunLog(tmp_path, "tp-0", "x")
    log.start(plan("a"), 0, Config())
    for step in range(1, 20):
        log.check(step_report(step))
    log.finding(19, finding())
    log.end(19)
    log.close()
    assert log.lost == 22
    assert len(caplog.records) == 1
    assert "No space left on device" in caplog.text
    assert summarize(tmp_path).verdict == "nothing-checked"


def test_a_start_that_could_not_be_written_comes_first_later(
    tmp_path: Path, room: Callable[[int | None], None]
) -> None:
    """Without it a reader would not know what was watched."""
    room(0)
    log = RunLog(tmp_path, "tp-0", "x")
    log.start(plan("a", "b"), 0, Config())
    room(None)
    log.check(step_report(1))
    assert [line["event"] for line in lines(tmp_path)] == ["start", "check"]
    assert log.lost == 0


def test_a_failed_write_costs_one_line_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk takes half a line; when there is room again the next line stands alone."""
    log = RunLog(tmp_path, "tp-0", "x")
    log.note(1, "before")
    real = os.write

    def half(fd: int, data: bytes) -> int:
        if len(data) > 20:
            return real(fd, data[:20])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        log.note(2, "x" * 10)
    log.note(3, "after")
    first, torn, *rest = event_file(tmp_path, "tp-0").read_text().splitlines()
    assert json.loads(first)["text"] == "before"
    with pytest.raises(json.JSONDecodeError):
        json.loads(torn)
    assert [json.loads(line)["step"] for line in rest] == [3, 3]
    assert json.loads(rest[1])["text"] == "after"


def test_a_short_write_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may take fewer bytes than asked."""
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:7]))
    RunLog(tmp_path, "tp-0", "x").note(1, "a text longer than seven bytes")
    assert lines(tmp_path)[0]["text"] == "a text longer than seven bytes"


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    """JSON has no word for them, and other tools refuse NaN."""
    log = RunLog(tmp_path, "tp-0", "x")
    inf = float("inf")
    log.finding(1, finding(max_abs=inf, ratio=float("nan"), evidence={"n": [inf]}))
    (line,) = lines(tmp_path)
    assert line["finding"]["max_abs"] is None
    assert line["finding"]["ratio"] is None
    assert line["finding"]["evidence"] == {"n": [None]}


def test_names_with_line_breaks_stay_on_one_line(tmp_path: Path) -> None:
    """A parameter may be called anything."""
    RunLog(tmp_path, "tp-0", "x").finding(1, finding(parameter="a\nb\u2028c"))
    (line,) = lines(tmp_path)
    assert line["finding"]["parameter"] == "a\nb\u2028c"


def test_the_directory_is_created_and_closed_to_others(tmp_path: Path) -> None:
    """Parameter names are nobody else's business."""
    RunLog(tmp_path / "a" / "b", "tp-0", "x").close()
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) & 0o007 == 0
    assert stat.S_IMODE(event_file(tmp_path / "a" / "b", "tp-0").stat().st_mode) & 0o007 == 0


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    """Detach and the end of the process may both do it."""
    log = RunLog(tmp_path, "tp-0", "x")
    log.close()
    log.close()


def test_a_closed_log_refuses_to_write(tmp_path: Path) -> None:
    """It must not write into a file that has meanwhile got the same descriptor."""
    log = RunLog(tmp_path, "tp-0", "x")
    log.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        log.note(1, "late")


def test_small_files_are_replaced_whole(tmp_path: Path) -> None:
    """A reader sees the old file or the new one, and no draft is left behind."""
    write_meta(tmp_path, {"world_size": 2})
    write_meta(tmp_path, {"world_size": 4, "groups": ["tp-0"]})
    assert json.loads((tmp_path / "meta.json").read_text()) == {
        "schema": SCHEMA,
        "world_size": 4,
        "groups": ["tp-0"],
    }
    assert [p.name for p in tmp_path.iterdir()] == ["meta.json"]


def test_a_replacement_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk costs the new version, not the old one."""
    write_meta(tmp_path, {"world_size": 2})

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_meta(tmp_path, {"world_size": 4})
    assert json.loads((tmp_path / "meta.json").read_text())["world_size"] == 2


def test_an_abort_names_its_launch(tmp_path: Path) -> None:
    """`tpwatch run` must know its own abort from that of an earlier launch."""
    write_abort(tmp_path, 7, "launch-1")
    record = json.loads((tmp_path / "abort.json").read_text())
    assert (record["step"], record["launch_id"]) == (7, "launch-1")


def test_a_summary_has_the_keys_of_the_contract(tmp_path: Path) -> None:
    """Other tools read these names."""
    summary = Summary("faults", 6, 2, (finding(),), (), {"collectives_per_check": 2})
    write_summary(tmp_path, summary)
    data = json.loads((tmp_path / "summary.json").read_text())
    assert list(data)[:5] == ["schema", "verdict", "steps_checked", "replicas", "findings"]
    assert {"not_exercised", "overhead"} <= set(data)
    assert set(data["findings"][0]) >= {
        "kind", "code", "parameter", "point", "group", "ranks", "first_step", "last_step", "count",
        "severity", "role", "caused_by", "confidence", "observed", "expected", "ratio", "max_abs",
        "max_rel", "odd_ranks", "advice",
    }  # fmt: skip
