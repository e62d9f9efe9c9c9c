"""A file system that does not answer holds up neither training nor the end of the process, and costs little."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.commands import run_python
from tests.unit._samples import finding, step_report
from tpwatch.config import Config
from tpwatch.export import Place, jsonl, scribe
from tpwatch.export.eventfile import EventFile
from tpwatch.export.fanout import Fanout
from tpwatch.export.jsonl import RunLog, event_file, write_abort, write_meta
from tpwatch.export.recorder import Leader
from tpwatch.report.events import read_events
from tpwatch.report.summary import summarize

SHORT = 0.2
"""Patience in these tests: long against a write, short against `GRACE`."""

GRACE = 5.0
"""Seconds in which anything bounded is over, on a busy machine."""


class Storage:
    """Holds every call of some functions of `os` while it does not answer."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self._answers = threading.Event()
        self._answers.set()
        self.callers: set[threading.Thread] = set()

    def hold(self, *names: str) -> None:
        """Go through this for calls of these names."""
        for name in names:
            self._patch.setattr(os, name, self._held(getattr(os, name)))

    def _held(self, real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            self.callers.add(threading.current_thread())
            self._answers.wait()
            return real(*args, **kwargs)

        return call

    def hang(self) -> None:
        """Answer nothing."""
        self._answers.clear()

    def recover(self) -> None:
        """Answer again."""
        self._answers.set()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little patience."""
    monkeypatch.setattr(scribe, "PATIENCE", SHORT)
    monkeypatch.setattr(jsonl, "LEISURE", SHORT)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    """One that answers again at the end of the test, so that no thread outlives it."""
    storage = Storage(monkeypatch)
    yield storage
    storage.recover()


def took(act: Callable[[], object]) -> float:
    """Seconds of one call, whatever it raises of the file system's."""
    began = time.monotonic()
    with suppress(OSError):
        act()
    return time.monotonic() - began


def said(directory: Path) -> list[str]:
    """Texts of notes, parameters of findings, and other kinds, in the order of the file."""
    events = read_events(directory).groups["tp-0"]
    return [e.get("text") or e.get("finding", {}).get("parameter") or e["event"] for e in events]


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + GRACE
    while not condition():
        assert time.monotonic() < deadline, "condition never held"
        time.sleep(0.005)


def test_a_pipe_that_nobody_reads_holds_up_one_step_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first line that does not fit waits, the others do not; all are there, in order, once somebody reads."""
    os.mkfifo(event_file(tmp_path, "tp-0"))
    log = RunLog(tmp_path, "tp-0", "x")
    times = [took(lambda step=step: log.note(step, "x" * 1000)) for step in range(1, 201)]
    assert sum(seconds >= SHORT for seconds in times) == 1
    assert sum(times) < GRACE
    assert [r.getMessage().split(": ", 2)[2] for r in caplog.records] == [
        f"no answer from the file system for {SHORT:g} s. Training goes on; events wait for it."
    ]
    read, pipe = b"", os.open(log.path, os.O_RDONLY)
    while read.count(b"\n") < 200:
        read += os.read(pipe, 65536)
    assert [json.loads(line)["step"] for line in read.splitlines()] == list(range(1, 201))
    os.close(pipe)
    log.close()
    assert log.lost == 0


@pytest.mark.parametrize("name", ["write", "fsync", "fstat"])
def test_whatever_does_not_answer_training_goes_on(tmp_path: Path, storage: Storage, name: str) -> None:
    """Writing, forcing to disk, looking at the size: the finding is there afterwards, once."""
    log = RunLog(tmp_path, "tp-0", "x")
    storage.hold(name)
    storage.hang()
    assert SHORT <= took(lambda: log.finding(1, finding(parameter="a"))) < GRACE
    assert took(lambda: log.note(1, "behind it")) < SHORT
    storage.recover()
    log.close()
    assert said(tmp_path) == ["a", "behind it"]


def test_once_it_has_caught_up_a_line_is_waited_for_again(
    tmp_path: Path, storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    """A second hiccup is as the first: one step waits, and one line in the log says so."""
    log = RunLog(tmp_path, "tp-0", "x")
    storage.hold("write")
    for hiccup in (1, 2):
        storage.hang()
        assert SHORT <= took(lambda: log.note(1, "waits")) < GRACE
        assert took(lambda: log.note(2, "does not")) < SHORT
        assert len(caplog.records) == hiccup
        storage.recover()
        wait_for(log._scribe._last.done)
    assert said(tmp_path) == ["waits", "does not"] * 2


def test_an_abort_waits_for_its_lines_once_more(tmp_path: Path, storage: Storage) -> None:
    """Also where no line has been waited for lately: what is still in memory ends with the process."""
    log = RunLog(tmp_path, "tp-0", "x")
    storage.hold("fstat")
    storage.hang()
    log.note(1, "stuck")
    recovery = threading.Timer(SHORT / 2, storage.recover)
    recovery.start()
    found: list[list[str]] = []
    recorder = Leader(log, Fanout({}, Place(Config(), tmp_path, "tp-0")), "x", lambda: found.append(said(tmp_path)))
    recorder.abort(2, [finding(parameter="a")])
    assert found == [["stuck", "a", "abort"]]
    recovery.join()


def test_what_nobody_misses_is_dropped_first_and_confessed(
    tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue is bounded: notes and checks go, findings stay, and the file says how many are gone and where."""
    monkeypatch.setattr(scribe, "MOST_WAITING", 5)
    log = RunLog(tmp_path, "tp-0", "x")
    storage.hold("write")
    storage.hang()
    for step in range(1, 21):
        log.note(step, f"note {step}")  # the first is being written, five wait
    log.finding(20, finding(parameter="a"))
    log.check(step_report(21))
    log.finding(21, finding(parameter="b"))
    storage.recover()
    log.close()
    assert log.lost == 15
    confessions = [f"events.tp-0.jsonl: {lost} events could not be written" for lost in (14, 15)]
    assert said(tmp_path) == [*(f"note {step}" for step in range(1, 7)), confessions[0], "a", confessions[1], "b"]


def test_even_findings_have_a_bound(tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is: what is beyond it is lost and counted."""
    monkeypatch.setattr(scribe, "MOST_WAITING", 1)
    monkeypatch.setattr(scribe, "MOST_OWED", 2)
    log = RunLog(tmp_path, "tp-0", "x")
    storage.hold("write")
    storage.hang()
    for step in range(1, 8):
        log.finding(step, finding(parameter=f"p{step}"))
    storage.recover()
    log.close()
    assert said(tmp_path) == ["p1", "p2", "p3", "p4"]
    assert log.lost == 3


def test_the_calling_thread_touches_no_file(tmp_path: Path, storage: Storage) -> None:
    """Neither for a line nor when a part is put by and an old one thinned, nor for the small files."""
    storage.hold("write", "fsync", "fstat", "open", "close", "rename", "replace", "pread")
    log = RunLog(tmp_path, "tp-0", "x", rotate_bytes=2000)
    for step in range(40):
        log.check(step_report(step))
        log.finding(step, finding())
    write_abort(tmp_path, 1, "x")
    write_meta(tmp_path, {})
    log.close()
    assert len(list(tmp_path.glob("events.tp-0.*.jsonl"))) > 4
    assert storage.callers
    assert threading.current_thread() not in storage.callers


def test_the_end_does_not_wait_for_ever(tmp_path: Path, storage: Storage, caplog: pytest.LogCaptureFixture) -> None:
    """What is left behind is said, and written after all if the file system answers again; then the file is closed."""
    log = RunLog(tmp_path, "tp-0", "x")
    storage.hold("write")
    storage.hang()
    log.note(1, "stuck")
    log.end(1)
    assert SHORT <= took(log.close) < GRACE
    assert took(log.close) < SHORT
    assert "no answer from the file system; 2 events are left behind" in caplog.text
    with pytest.raises(OSError, match="Bad file descriptor"):
        log.note(2, "late")
    storage.recover()
    wait_for(lambda: log._file._fd < 0)
    assert said(tmp_path) == ["stuck", "end"]


STUCK = """
import os, sys
from tpwatch.export import jsonl, scribe
scribe.PATIENCE = jsonl.LEISURE = 0.2
log = jsonl.RunLog(sys.argv[1], "tp-0", "x")
for step in range(100):
    log.note(step, "x" * 1000)
os.mkfifo(sys.argv[1] + "/draft")
os.replace = lambda *paths: open(sys.argv[1] + "/draft")  # nobody will ever write to it
try:
    jsonl.write_abort(sys.argv[1], 1, "x")
except TimeoutError:
    print("bounded")
if sys.argv[2] == "close":
    log.close()
"""


@pytest.mark.parametrize("end", ["close", "leave"])
def test_a_process_whose_file_system_never_answers_ends(tmp_path: Path, end: str) -> None:
    """Whether or not it closed its files."""
    os.mkfifo(event_file(tmp_path, "tp-0"))
    done = run_python("-c", STUCK, tmp_path, end, timeout=30)
    assert (done.returncode, done.stdout) == (0, "bounded\n"), done.stderr


def test_a_file_that_cannot_be_opened_in_time_is_an_error_of_the_attach(tmp_path: Path, storage: Storage) -> None:
    """All ranks stay off then, instead of waiting."""
    storage.hold("open")
    storage.hang()
    with pytest.raises(TimeoutError, match="no answer from the file system"):
        RunLog(tmp_path, "tp-0", "x")


def test_a_small_file_waits_no_longer_either(tmp_path: Path, storage: Storage) -> None:
    """`abort.json`, in front of an exception that ends the run: late is better than never."""
    storage.hold("fsync")
    storage.hang()
    with pytest.raises(TimeoutError, match="no answer from the file system"):
        write_abort(tmp_path, 7, "launch-1")
    assert list(tmp_path.glob("abort.json")) == []
    storage.recover()
    wait_for((tmp_path / "abort.json").exists)
    assert json.loads((tmp_path / "abort.json").read_text())["step"] == 7


def test_two_writers_of_one_file_do_not_share_a_draft(tmp_path: Path, storage: Storage) -> None:
    """One that was left behind must not spoil what came after it."""
    storage.hold("fsync")
    storage.hang()
    for world in (2, 4):
        with pytest.raises(TimeoutError):
            write_meta(tmp_path, {"world_size": world})
    assert len(list(tmp_path.iterdir())) == 2
    storage.recover()
    wait_for(lambda: [path.name for path in tmp_path.iterdir()] == ["meta.json"])
    assert json.loads((tmp_path / "meta.json").read_text())["world_size"] in (2, 4)


def test_an_error_nobody_thought_of_is_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the caller had written itself; the next line is none the worse."""
    log = RunLog(tmp_path, "tp-0", "x")
    with monkeypatch.context() as patch:
        patch.setattr(EventFile, "_write", lambda *_args, **_kwargs: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            log.note(1, "lost")
    log.note(2, "written")
    assert said(tmp_path) == ["written"]


def test_a_line_costs_microseconds(tmp_path: Path) -> None:
    """Half of the checks take less than a millisecond (measured: about 0.1), while the file system answers."""
    log = RunLog(tmp_path, "tp-0", "x")
    taken = sorted(took(lambda step=step: log.check(step_report(step))) for step in range(301))
    assert taken[150] < 1e-3
    log.close()
    assert summarize(tmp_path).steps_checked == 301
