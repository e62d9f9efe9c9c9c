"""`tpwatch run`: command rewritten, environment set, exit code and signals passed on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.commands import REPOSITORY, run_python
from tpwatch.act import ABORT_EXIT_CODE
from tpwatch.cli import main
from tpwatch.cli.launch import rewrite
from tpwatch.errors import ConfigError

# ------------------------------------------------------------------------------------ rewriting


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("torchrun train.py", "torchrun -m tpwatch.run train.py"),
        (
            "torchrun --nproc-per-node 2 --standalone train.py --lr 1 -m x",
            "torchrun --nproc-per-node 2 --standalone -m tpwatch.run train.py --lr 1 -m x",
        ),
        (
            "/opt/bin/torchrun --nproc_per_node=2 -- train.py train.py",
            "/opt/bin/torchrun --nproc_per_node=2 -m tpwatch.run train.py train.py",
        ),
        (
            "torchrun --nproc-per-node 2 -m pkg.train --lr 1",
            "torchrun --nproc-per-node 2 -m -m tpwatch.run -m pkg.train --lr 1",
        ),
        ("torchrun -m tpwatch.run train.py", "torchrun -m tpwatch.run train.py"),
        ("python train.py --lr 1", "python -m tpwatch.run train.py --lr 1"),
        ("/usr/bin/python3.11 -u train.py", "/usr/bin/python3.11 -u -m tpwatch.run train.py"),
        ("python -X dev -W error train.py", "python -X dev -W error -m tpwatch.run train.py"),
        ("python -m pkg.train --lr 1", "python -m tpwatch.run -m pkg.train --lr 1"),
        ("python -m tpwatch.run train.py", "python -m tpwatch.run train.py"),
        (
            "python -u -m torch.distributed.run --nproc-per-node 2 train.py -x",
            "python -u -m torch.distributed.run --nproc-per-node 2 -m tpwatch.run train.py -x",
        ),
    ],
)
def test_the_runner_is_put_in_front_of_the_script(command: str, expected: str) -> None:
    """And nothing else is changed."""
    assert rewrite(command.split()) == expected.split()


@pytest.mark.parametrize(
    "command",
    [
        "",
        "bash train.sh",
        "srun torchrun train.py",
        "python",
        "python -u",
        "python -c pass",
        "python -",
        "python -m",
        "python -m torch.distributed.launch train.py",
        "torchrun --no-python bash train.sh",
    ],
)
def test_another_command_is_an_error_that_says_what_to_do(command: str) -> None:
    """Guessing would leave workers unwatched without a word."""
    with pytest.raises(ConfigError, match=r"put `-m tpwatch\.run` in front of the training script"):
        rewrite(command.split())


# -------------------------------------------------------------------------------------- running


SHOW = """
import json, os, sys
names = ("TPWATCH_OUT", "TPWATCH_CONFIG", "TPWATCH_LAUNCH_ID")
print(json.dumps({"env": {n: os.environ.get(n) for n in names}, "argv": sys.argv}))
"""

STOPPED = """
import os, sys
from tpwatch.export.jsonl import write_abort
write_abort(os.environ["TPWATCH_OUT"], 3, os.environ["TPWATCH_LAUNCH_ID"])
sys.exit(1)
"""


def tpwatch_run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`tpwatch run ARGUMENTS` in a directory of its own."""
    env = {"PYTHONDONTWRITEBYTECODE": "1"}
    return run_python("-m", "tpwatch", "run", *arguments, cwd=cwd, env=env)


def test_directory_configuration_and_launch_reach_the_command(tmp_path: Path) -> None:
    """As absolute paths, with an id of this very launch."""
    (tmp_path / "train.py").write_text(SHOW)
    (tmp_path / "c.yaml").write_text("interval: 2")
    options = ("--out", "runs/a", "--config", "c.yaml", "--", sys.executable, "train.py", "--lr")
    first, second = (tpwatch_run(*options, cwd=tmp_path) for _ in range(2))
    shown, again = json.loads(first.stdout), json.loads(second.stdout)
    assert shown["argv"] == ["train.py", "--lr"]
    assert shown["env"]["TPWATCH_OUT"] == str(tmp_path / "runs" / "a")
    assert shown["env"]["TPWATCH_CONFIG"] == str(tmp_path / "c.yaml")
    assert shown["env"]["TPWATCH_LAUNCH_ID"] != again["env"]["TPWATCH_LAUNCH_ID"]


def test_a_directory_is_chosen_if_none_is_given(tmp_path: Path) -> None:
    """A new one, so that runs do not mix."""
    (tmp_path / "train.py").write_text(SHOW)
    shown = json.loads(tpwatch_run("--", sys.executable, "train.py", cwd=tmp_path).stdout)
    assert shown["env"]["TPWATCH_OUT"].startswith(str(tmp_path / "tpwatch-runs"))


def test_the_directory_of_the_configuration_file_is_used(tmp_path: Path) -> None:
    """`out:` in YAML is as good as the option."""
    (tmp_path / "train.py").write_text(SHOW)
    (tmp_path / "c.yaml").write_text("out: runs/b")
    options = ("--config", "c.yaml", "--", sys.executable, "train.py")
    shown = json.loads(tpwatch_run(*options, cwd=tmp_path).stdout)
    assert shown["env"]["TPWATCH_OUT"] == str(tmp_path / "runs" / "b")


def test_the_exit_code_of_the_command_survives(tmp_path: Path) -> None:
    """A failure of the command stays its own."""
    (tmp_path / "train.py").write_text("raise SystemExit(5)")
    assert tpwatch_run("--", sys.executable, "train.py", cwd=tmp_path).returncode == 5


def test_a_run_that_tpwatch_stopped_has_the_documented_code(tmp_path: Path) -> None:
    """Whatever the launcher made of it."""
    (tmp_path / "train.py").write_text(STOPPED)
    done = tpwatch_run("--out", "a", "--", sys.executable, "train.py", cwd=tmp_path)
    assert done.returncode == ABORT_EXIT_CODE
    assert f"run directory {tmp_path / 'a'}" in done.stderr


def test_an_abort_of_an_earlier_launch_does_not_count(tmp_path: Path) -> None:
    """The same directory may be used again."""
    (tmp_path / "train.py").write_text(STOPPED)
    tpwatch_run("--out", "a", "--", sys.executable, "train.py", cwd=tmp_path)
    (tmp_path / "train.py").write_text("pass")
    assert tpwatch_run("--out", "a", "--", sys.executable, "train.py", cwd=tmp_path).returncode == 0


def test_a_damaged_abort_file_does_not_count(tmp_path: Path) -> None:
    """Nor does it raise."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "abort.json").write_text("{")
    (tmp_path / "train.py").write_text("pass")
    assert tpwatch_run("--out", "a", "--", sys.executable, "train.py", cwd=tmp_path).returncode == 0


def test_wrong_settings_stop_before_the_launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One message instead of one per worker."""
    (tmp_path / "c.yaml").write_text("intervall: 2")
    (tmp_path / "train.py").write_text("raise SystemExit(7)")
    command = [sys.executable, str(tmp_path / "train.py")]
    assert main(["run", "--config", str(tmp_path / "c.yaml"), "--", *command]) == 2
    assert "Did you mean interval?" in capsys.readouterr().err


def test_a_command_that_does_not_exist_is_a_usage_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With its name."""
    assert main(["run", "--", "/nonexistent/python3", "train.py"]) == 2
    assert "cannot be started" in capsys.readouterr().err


WAIT = """
import signal, sys, time, pathlib
signal.signal(signal.{name}, lambda *_: sys.exit(9))
pathlib.Path("ready").touch()
time.sleep(60)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_reaches_the_command(tmp_path: Path, name: str) -> None:
    """A scheduler stops tpwatch; the training must hear of it, and its exit code counts."""
    (tmp_path / "train.py").write_text(WAIT.format(name=name))
    process = subprocess.Popen(
        [sys.executable, "-m", "tpwatch", "run", "--", sys.executable, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(getattr(signal, name))
    assert process.wait(timeout=30) == 9


def test_a_command_killed_by_a_signal_has_the_shell_s_code(tmp_path: Path) -> None:
    """128 + 9."""
    (tmp_path / "train.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    done = tpwatch_run("--", sys.executable, "train.py", cwd=tmp_path)
    assert done.returncode == 128 + signal.SIGKILL


def test_workers_of_torchrun_go_through_the_runner(tmp_path: Path) -> None:
    """Two real workers: each runs the script, and the job is told once that it is not watched."""
    (tmp_path / "train.py").write_text("import os\nos.write(1, f'rank {os.environ[\"RANK\"]}\\n'.encode())\n")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    done = tpwatch_run("--", *torchrun, "--nproc-per-node", "2", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[-2:] == ["rank 0", "rank 1"]
    assert done.stderr.count("nothing was watched") == 1
