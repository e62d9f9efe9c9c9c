"""Starting lab processes: who shares, where they write, and that none is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.commands import REPOSITORY
from tpwatch.errors import ConfigError
from tpwatch.lab import catalog
from tpwatch.lab.launch import TIMED_OUT, Job, Workers, launch, missing, pools, run_directory

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
SCRIPT = REPOSITORY / "tests" / "scripts" / "train_plain_megatron.py"


def job(*faults: str, **options: object) -> Job:
    """Return a job that is not to be run."""
    return Job(faults=faults, out=Path("out"), **options)  # type: ignore[arg-type]


def alive(pid: int) -> bool:
    """Say whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: list[int], seconds: float = 15.0) -> bool:
    """Wait for processes to end."""
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(alive(pid) for pid in pids)


def test_entries_of_one_layout_share_their_processes() -> None:
    """Importing Megatron-core takes seconds: it is paid once for all of them."""
    assert pools(job("dense-sp", "lora-unsummed")) == [("dense-sp", "lora-unsummed")]


@pytest.mark.parametrize("other", ["dp2tp2", "one-sided-gradient", "gdn-gamma-double-sum-te"])
def test_entries_that_cannot_share_get_their_own(other: str) -> None:
    """Another number of ranks, a fault that may hang its processes, Transformer Engine."""
    assert pools(job("dense-sp", other, "dense-nosp")) == [("dense-sp", "dense-nosp"), (other,)]


def test_fixed_one_sided_gradient_shares() -> None:
    """With the fix there is nothing left to hang on."""
    names = ("dense-sp", "one-sided-gradient")
    assert pools(job(*names, fixed=True)) == [names]


def test_several_entries_write_below_the_run_directory() -> None:
    """OUT for one, OUT/<fault> for several."""
    assert run_directory(job("dense-sp"), "dense-sp") == Path("out")
    assert run_directory(job("dense-sp", "dp2tp2"), "dp2tp2") == Path("out/dp2tp2")


def test_unknown_entry_is_refused_before_anything_starts() -> None:
    """The error suggests the nearest name."""
    with pytest.raises(ConfigError, match="ple-double-sum"):
        launch(job("ple-double-sums"))


def test_sizes_that_do_not_divide_are_refused_before_anything_starts() -> None:
    """Three tensor-parallel ranks do not share four heads."""
    with pytest.raises(ConfigError, match=r"lab\.heads"):
        launch(job("dense-sp", tp=3))


def test_needed_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry says which extra it lacks."""
    installed = {"megatron"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in installed else None)
    assert missing("dense-sp") == ""
    assert "lab-te" in missing("gdn-gamma-double-sum-te")
    installed.clear()
    assert "megatron-core" in missing("dense-sp")


def test_run_past_its_time_is_ended() -> None:
    """The code is that of timeout(1), and the processes are gone."""
    with Workers(SLEEP, 2) as workers:
        pids = [process.pid for process in workers.processes]
        assert workers.wait(timeout=0.2) == TIMED_OUT
    assert wait_until_gone(pids, seconds=0)


def test_one_failing_process_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code is the answer; a peer left in a collective would wait for ever."""
    monkeypatch.setattr("tpwatch.lab.launch.GRACE", 0.2)
    code = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(60)"
    with Workers([sys.executable, "-c", code], 2) as workers:
        pids = [process.pid for process in workers.processes]
        assert workers.wait(timeout=30) == 7
    assert wait_until_gone(pids, seconds=0)


@pytest.mark.megatron
@pytest.mark.timeout(100)
def test_workers_end_with_a_killed_launcher(tmp_path: Path) -> None:
    """SIGKILL leaves the launcher no time to clean up; its workers notice and go."""
    program = (
        "import pathlib, time, tpwatch.lab.launch as launch\n"
        "job = launch.Job(faults=('dense-sp',), out=pathlib.Path('o'), steps=10**6, watch=False)\n"
        "with launch.workers(job, job.faults, -3) as workers:\n"
        "    print(*(p.pid for p in workers.processes), flush=True)\n"
        "    time.sleep(100)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    launcher = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=env, cwd=tmp_path
    )
    try:
        assert launcher.stdout is not None
        pids = [int(pid) for pid in launcher.stdout.readline().split()]
        time.sleep(1.0)
        assert len(pids) == 2
        assert all(alive(pid) for pid in pids)
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.communicate()
    assert wait_until_gone(pids)


@pytest.mark.megatron
def test_plain_script_trains(tmp_path: Path) -> None:
    """The script of the zero-code tests is a training script by itself."""
    losses = tmp_path / "losses.json"
    command = [sys.executable, str(SCRIPT), "--steps=8", f"--losses={losses}", "--distributed-optimizer"]
    with Workers(command, 2, subprocess.DEVNULL) as workers:
        assert workers.wait(timeout=100) == 0
    values = [float.fromhex(loss) for loss in json.loads(losses.read_text())]
    assert values[-1] < values[0]


def test_plain_script_does_not_know_tpwatch() -> None:
    """It stands for a user's own script."""
    assert "tpwatch" not in SCRIPT.read_text()


def test_names_are_unique() -> None:
    """A name on the command line means one entry."""
    names = [entry.name for entry in catalog.ENTRIES]
    assert len(names) == len(set(names))
