"""`tpwatch watch`: a running job in a terminal, until it ends or the user has seen enough."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.commands import REPOSITORY
from tests.unit._report_runs import steps, write_run
from tests.unit._samples import finding, plan, step_report
from tpwatch.cli import main
from tpwatch.config import Config
from tpwatch.export.jsonl import RunLog, write_meta
from tpwatch.report.live import ROWS_SHOWN
from tpwatch.report.watching import FINDINGS_SHOWN, Plain, follow, open_watch, read_state, step_line


def started(directory: Path, group_of: int = 0) -> RunLog:
    """A run that goes on: one checked step, no end."""
    watched = plan("a", first_rank=group_of)
    log = RunLog(directory, watched.group, "first")
    log.start(watched, 0, Config())
    log.check(step_report(1))
    return log


def test_a_finished_run_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its last steps, what was found, and the verdict; a fault is no failure of watching."""
    write_run(tmp_path, plan("a"), findings=[(6, finding(parameter="a"))], checks=steps(6))
    assert main(["watch", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if "step 6" in line] != []
    assert out.count("found double-reduce: a") == 1
    assert out.splitlines()[-1].startswith("ended: faults: 1 fault (double-reduce); 6 steps checked")


def test_a_long_run_is_not_told_from_the_start(tmp_path: Path) -> None:
    """Of the steps before the first look only the last ones; of later ones none is left out."""
    said: list[str] = []
    screen = Plain(said.append)
    screen.show(read_state(write_run(tmp_path, plan("a"), checks=steps(200))))
    assert len(said) <= ROWS_SHOWN + 1
    assert said[-1].startswith("  step 200,")
    before = len(said)
    screen.show(read_state(write_run(tmp_path, plan("a"), checks=steps(250)[200:])))
    assert [line.split(",")[0] for line in said[before:]] == [f"  step {step}" for step in range(201, 251)]


def test_a_running_job_is_followed_until_it_ends(tmp_path: Path) -> None:
    """New steps and findings appear as they are written, each once."""
    log = started(tmp_path)
    said: list[str] = []
    watcher = threading.Thread(target=follow, args=(tmp_path, Plain(said.append), 0.02))
    watcher.start()
    wait_for(lambda: len(said) == 1)
    log.check(step_report(2))
    log.finding(2, finding(parameter="a"))
    wait_for(lambda: len(said) == 3)
    assert watcher.is_alive()
    log.end(2)
    log.close()
    watcher.join(10)
    assert not watcher.is_alive()
    assert [line.split(",")[0] for line in said[:2]] == ["  step 1", "  step 2"]
    assert said[2:] == ["  found double-reduce: a"]


def test_a_run_has_ended_when_all_its_groups_have(tmp_path: Path) -> None:
    """Also those that have not written yet."""
    first = started(tmp_path)
    first.end(1)
    first.close()
    assert read_state(tmp_path).ended
    second = started(tmp_path, group_of=2)
    assert not read_state(tmp_path).ended
    second.abort(1)
    second.close()
    assert read_state(tmp_path).ended
    write_meta(tmp_path, {"groups": ["tp-0", "tp-2", "tp-4"]})
    assert not read_state(tmp_path).ended


def test_a_job_that_falls_silent_is_seen_to(tmp_path: Path) -> None:
    """One that was killed writes no end; how long ago it wrote anything tells."""
    started(tmp_path).close()
    state = read_state(tmp_path)
    assert state.last_event is not None
    assert step_line(state, state.last_event + 90).endswith("; last event 90 s ago")


def test_a_directory_that_is_still_empty_is_waited_for(tmp_path: Path) -> None:
    """The job may be starting."""
    state = read_state(tmp_path)
    assert not state.ended
    assert step_line(state, 0.0) == "no step was checked yet"


def test_a_directory_that_does_not_exist_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    """A typo is not waited for."""
    assert main(["watch", "/nonexistent"]) == 2
    assert capsys.readouterr().err == "tpwatch: /nonexistent: no such run directory\n"


@pytest.mark.parametrize("interval", ["0", "-1", "inf", "nan", "soon"])
def test_an_interval_is_a_time_above_zero(tmp_path: Path, interval: str) -> None:
    """Usage error otherwise."""
    with pytest.raises(SystemExit) as stop:
        main(["watch", str(tmp_path), "--interval", interval])
    assert stop.value.code == 2


def test_a_terminal_gets_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of causes, most severe first; more than fit are counted; names cannot inject markup."""
    pytest.importorskip("rich")
    causes = [finding(parameter=f"p{i:02}[red]") for i in range(FINDINGS_SHOWN + 3)]
    write_run(tmp_path, plan("a"), findings=[(6, f) for f in causes], checks=steps(6))
    with open_watch("title", print, live=True) as screen:
        screen.show(read_state(tmp_path))
    out = capsys.readouterr().out
    assert "p00[red]" in out
    assert f"p{FINDINGS_SHOWN:02}" not in out
    assert "and 3 more" in out
    assert "step 6: 0 values and 0 reduced gradients differ" in out


def test_a_terminal_is_told_when_nothing_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty table would look like a failure."""
    pytest.importorskip("rich")
    with open_watch("title", print, live=True) as screen:
        screen.show(read_state(write_run(tmp_path, plan("a"), checks=steps(1))))
    assert "nothing was found so far" in capsys.readouterr().out


def test_ctrl_c_is_an_orderly_end(tmp_path: Path) -> None:
    """Exit code 0 and no traceback: the job goes on, only the watching is over."""
    started(tmp_path).close()
    command = [sys.executable, "-m", "tpwatch", "watch", str(tmp_path), "--interval", "30"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("tpwatch: ")
        assert "step 1" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")


def wait_for(condition: object, seconds: float = 10.0) -> None:
    """Wait until a condition holds; fail if it does not in time."""
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
