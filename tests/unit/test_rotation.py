"""Long runs: an event file is put by in parts, read as one, and stays small; its findings are never lost."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from tests.unit._samples import finding, plan, step_report
from tpwatch.cli import main
from tpwatch.config import Config
from tpwatch.export.jsonl import RunLog, event_file, write_meta
from tpwatch.export.rotation import PARTS_KEPT, THINNED, event_files, part_file, thinned
from tpwatch.records import SCHEMA
from tpwatch.report import events as reader
from tpwatch.report.events import read_events
from tpwatch.report.summary import summarize, timeline
from tpwatch.report.watching import Plain, follow, read_state

SMALL = 4000
"""Bytes of a live file in these tests: a handful of checks."""


def started(directory: Path, incarnation: str = "first", rotate_bytes: int = SMALL) -> RunLog:
    """A run with one replica group whose event file is put by early."""
    watched = plan("a", "b")
    log = RunLog(directory, watched.group, incarnation, rotate_bytes=rotate_bytes)
    log.start(watched, 0, Config())
    return log


def checked(log: RunLog, first: int, last: int) -> None:
    """Checked steps."""
    for step in range(first, last + 1):
        log.check(step_report(step))


def numbers(directory: Path) -> list[int | None]:
    """Numbers of the parts of a run, None for the live file."""
    return [part.number for part in event_files(directory)]


def kinds(path: Path) -> set[str]:
    """Kinds of the events in one file."""
    return {json.loads(line)["event"] for line in path.read_text().splitlines()}


def test_a_file_that_would_grow_too_long_is_put_by(tmp_path: Path) -> None:
    """Parts are numbered in the order of writing; the live file keeps its name; none exceeds the limit."""
    log = started(tmp_path)
    checked(log, 1, 30)
    found = numbers(tmp_path)
    assert found == [*range(1, len(found)), None]
    assert len(found) > 3
    assert log.path == event_file(tmp_path, "tp-0")
    assert all(part.size <= SMALL for part in event_files(tmp_path))


def test_parts_are_read_as_one_stream(tmp_path: Path) -> None:
    """What was written comes back in its order, whatever file it is in; an unrotated run reads the same."""

    def story(log: RunLog) -> None:
        checked(log, 1, 6)
        log.finding(6, finding(parameter="a"))
        checked(log, 7, 24)
        log.note(24, "a word")
        log.end(24)
        log.close()

    story(started(tmp_path / "parts"))
    story(started(tmp_path / "whole", rotate_bytes=10**9))
    parts, whole = read_events(tmp_path / "parts"), read_events(tmp_path / "whole")
    assert len(numbers(tmp_path / "parts")) > 2
    assert [dict(e, time=0) for e in parts.groups["tp-0"]] == [dict(e, time=0) for e in whole.groups["tp-0"]]
    assert timeline(parts) == timeline(whole)
    assert summarize(tmp_path / "parts") == summarize(tmp_path / "whole")


def test_a_long_run_keeps_its_size_and_forgets_no_finding(tmp_path: Path) -> None:
    """Early checks make room; the start, every finding, note and the number of checked steps stay."""
    log = started(tmp_path)
    for step in range(1, 601):
        log.check(step_report(step))
        if step % 100 == 1:
            log.finding(step, finding(parameter=f"p{step}", first_step=step, last_step=step))
    log.note(600, "a word")
    log.end(600)
    log.close()
    files = event_files(tmp_path)
    kept = 6 * 900 + 1500 + 150 * len(files)  # findings, the start, a line for each part without checks
    assert sum(part.size for part in files) < (PARTS_KEPT + 1) * SMALL + kept
    assert sum("check" in kinds(part.path) for part in files) <= PARTS_KEPT + 1
    summary = summarize(tmp_path)
    assert (summary.verdict, summary.steps_checked, summary.replicas) == ("faults", 600, 2)
    assert {f.parameter for f in summary.findings} == {f"p{step}" for step in range(1, 600, 100)}
    assert "a word" in summary.notes
    assert any("early steps are no longer in the event files, only their findings" in note for note in summary.notes)


def test_a_thinned_part_says_what_it_lacks(tmp_path: Path) -> None:
    """One line in place of many, with the number of lines and of the steps about which there was a verdict."""
    log = started(tmp_path)
    log.check(step_report(1))
    log.check(step_report(1, call=2))
    log.check(step_report(2, skipped=True))
    log.status(2, ["a"], [])
    log.status(2, ["b"], [])
    first = part_file(log.path, 1)
    step = 2
    while THINNED not in (kinds(first) if first.exists() else set()):
        step += 1
        log.check(step_report(step))
        assert step < 100
    lines = [json.loads(line) for line in first.read_text().splitlines()]
    mark = lines[0]
    assert (mark["schema"], mark["event"], mark["lines"]) == (SCHEMA, THINNED, mark["step"] + 1)
    assert mark["steps"] == mark["step"] - 1
    assert [line["event"] for line in lines[1:]] == ["start", "status"]
    assert lines[-1]["not_exercised"] == ["b"]


CADENCES = {
    "every": [[step] for step in range(1, 121)],
    "calls": [[step] * 3 for step in range(1, 61)],
    "tenth": [[step] for step in (*range(1, 11), *range(20, 900, 10))],
    "odd": [[step] for step in sorted({step * step % 997 for step in range(1, 200)})],
    "restart": [[step] for step in (*range(1, 80), *range(40, 120))],
    "sparse": [[step] for step in (*range(0, 300, 4), *range(102, 400, 6))],
}
"""Steps of the checks of a run, call by call: at each interval, with several calls, from an earlier step once more."""


@pytest.mark.parametrize("size", range(900, 2400, 250))
@pytest.mark.parametrize("name", CADENCES)
def test_a_step_is_counted_once_wherever_its_checks_are(tmp_path: Path, name: str, size: int) -> None:
    """In two parts, thinned or whole, or told of again by a restart; a file's end falls anywhere in a step."""
    log = RunLog(tmp_path, "tp-0", "x", rotate_bytes=size)
    for steps in CADENCES[name]:
        for call, step in enumerate(steps, 1):
            log.check(step_report(step, call=call))
    log.close()
    assert sum(THINNED in kinds(part.path) for part in event_files(tmp_path)) > 3
    summary = summarize(tmp_path)
    assert summary.steps_checked == len({step for steps in CADENCES[name] for step in steps})
    (note,) = (note for note in summary.notes if "early steps" in note)
    marks = [e for e in read_events(tmp_path).groups["tp-0"] if e["event"] == THINNED]
    gone = [step for mark in marks for first, last, stride in mark["runs"] for step in range(first, last + 1, stride)]
    assert f"the checks of {len(set(gone))} early steps" in note


def test_a_regular_run_takes_one_word_to_name_its_steps() -> None:
    """So that the line in place of 30,000 others is a short one."""
    lines = [json.dumps({"event": "check", "step": step}).encode() for step in range(1000, 300_000, 10)]
    (mark,) = map(json.loads, thinned(lines))
    assert (mark["runs"], mark["steps"], mark["lines"]) == ([[1000, 299_990, 10]], 29_900, 29_900)


def test_a_line_of_an_earlier_version_is_counted_as_it_says(tmp_path: Path) -> None:
    """It has the number of steps only."""
    log = started(tmp_path)
    old = {"schema": SCHEMA, "event": THINNED, "step": 40, "steps": 40, "lines": 41}
    part_file(log.path, 1).write_text(json.dumps(old) + "\n")
    checked(log, 41, 43)
    summary = summarize(tmp_path)
    assert summary.steps_checked == 43
    assert any("the checks of 40 early steps" in note for note in summary.notes)


def test_a_restart_goes_on_numbering(tmp_path: Path) -> None:
    """A part is never written over."""
    for incarnation in ("first", "second"):
        log = started(tmp_path, incarnation)
        checked(log, 1, 20)
        log.close()
    found = numbers(tmp_path)
    assert found == [*range(1, len(found)), None]
    assert [e["incarnation"] for e in read_events(tmp_path).groups["tp-0"]][-1] == "second"
    assert summarize(tmp_path).replicas == 2


def test_groups_are_put_by_each_on_its_own(tmp_path: Path) -> None:
    """The parts of tp-0 are none of tp-2's, and both are read in order of their ranks."""
    logs = [RunLog(tmp_path, plan("a", first_rank=rank).group, "x", rotate_bytes=SMALL) for rank in (2, 0)]
    checked(logs[0], 1, 20)
    checked(logs[1], 1, 3)
    assert read_events(tmp_path).groups.keys() == {"tp-0", "tp-2"}
    assert {part.group for part in event_files(tmp_path) if part.number} == {"tp-2"}


def test_a_line_longer_than_the_limit_is_written_all_the_same(tmp_path: Path) -> None:
    """A start of a very large model, for one; no empty part is left behind."""
    log = RunLog(tmp_path, "tp-0", "x", rotate_bytes=100)
    log.note(1, "x" * 500)
    log.note(2, "y" * 500)
    assert numbers(tmp_path) == [1, None]
    assert [e["step"] for e in read_events(tmp_path).groups["tp-0"]] == [1, 2]


def test_a_file_that_cannot_be_put_by_goes_on_growing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events come first: nothing is lost, and nothing raised."""

    def refuse(_path: Path, _target: object) -> None:
        raise OSError(1, "Operation not permitted")

    log = started(tmp_path)
    monkeypatch.setattr(Path, "rename", refuse)
    checked(log, 1, 30)
    assert numbers(tmp_path) == [None]
    assert summarize(tmp_path).steps_checked == 30


def test_a_group_of_which_only_parts_are_left_is_not_missing(tmp_path: Path) -> None:
    """Killed between putting by and beginning anew: the gate sees the group."""
    log = started(tmp_path)
    checked(log, 1, 20)
    log.close()
    log.path.unlink()
    write_meta(tmp_path, {"groups": ["tp-0"]})
    assert read_events(tmp_path).missing == ()
    assert main(["check", str(tmp_path)]) == 0


def test_the_gate_misses_a_group_whatever_parts_others_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parts of one group are no file of another."""
    checked(started(tmp_path), 1, 20)
    write_meta(tmp_path, {"groups": ["tp-0", "tp-2"]})
    assert main(["check", str(tmp_path)]) == 3
    assert "no events of tp-2" in capsys.readouterr().err
    assert main(["check", "--allow-incomplete-ranks", str(tmp_path)]) == 0


def test_a_reader_that_is_overtaken_looks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is put by between listing and reading: without a second look its lines would be missing."""
    log = started(tmp_path)
    checked(log, 1, 4)
    real, overtaken = reader._read, []

    def read(path: Path) -> bytes:
        if not overtaken:
            overtaken.append(path)
            checked(log, 5, 12)
        return real(path)

    monkeypatch.setattr(reader, "_read", read)
    before = numbers(tmp_path)
    assert [row.step for row in timeline(read_events(tmp_path))] == list(range(1, 13))
    assert numbers(tmp_path) != before


def test_a_run_is_followed_across_a_rotation(tmp_path: Path) -> None:
    """`tpwatch watch` shows every step once, in order, while parts are put by and thinned, and sees the end."""
    log = started(tmp_path)
    checked(log, 1, 3)
    said: list[str] = []
    watcher = threading.Thread(target=follow, args=(tmp_path, Plain(said.append), 0.001))
    watcher.start()
    looked = threading.Event()
    for step in range(4, 200):
        log.check(step_report(step))
        looked.wait(0.001)
    log.finding(199, finding(parameter="a"))
    log.end(199)
    log.close()
    watcher.join(20)
    assert not watcher.is_alive()
    shown = [int(line.split(",")[0].removeprefix("  step ")) for line in said if line.startswith("  step")]
    assert shown == sorted(set(shown))
    assert shown[-1] == 199
    assert said[-1] == "  found double-reduce: a"
    assert said.count(said[-1]) == 1
    assert read_state(tmp_path).ended


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """A device or a pipe under the name of an event file has no end."""
    event_file(tmp_path, "tp-0").symlink_to("/dev/zero")
    os.mkfifo(event_file(tmp_path, "tp-2"))
    part_file(event_file(tmp_path, "tp-0"), 1).mkdir()
    assert read_events(tmp_path).groups == {}


def test_a_draft_left_by_a_kill_is_no_event_file(tmp_path: Path) -> None:
    """Killed in the middle of putting by: the name of the draft is not that of a part."""
    log = started(tmp_path)
    (tmp_path / f".{log.path.name}.{os.getpid()}").write_text("torn")
    (tmp_path / f".{part_file(log.path, 1).name}.{os.getpid()}").write_text("torn")
    checked(log, 1, 40)
    assert summarize(tmp_path).steps_checked == 40
    assert not any("unreadable" in note for note in summarize(tmp_path).notes)


def test_sinks_hear_of_no_rotation(tmp_path: Path) -> None:
    """The tee gets each line once, as if the file were one."""
    heard: list[str] = []
    log = RunLog(tmp_path, "tp-0", "x", heard.append, rotate_bytes=SMALL)
    checked(log, 1, 40)
    assert len(numbers(tmp_path)) > 2
    assert [json.loads(line)["step"] for line in heard] == list(range(1, 41))
