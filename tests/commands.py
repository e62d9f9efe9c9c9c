"""Run the project's commands as a user would, and leave no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

REPOSITORY = Path(__file__).parent.parent


def run_command(
    *arguments: str | Path,
    timeout: float = 100.0,
    cwd: Path = REPOSITORY,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command and return its exit code and output; `env` is added to the environment.

    After `timeout` seconds the command and all its descendants (the ranks of a torchrun) are killed
    and `subprocess.TimeoutExpired` is raised with the output so far.
    """
    command = [str(argument) for argument in arguments]
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as expired:
        os.killpg(process.pid, signal.SIGKILL)
        expired.stdout, expired.stderr = process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def run_python(
    *arguments: str | Path,
    timeout: float = 100.0,
    cwd: Path = REPOSITORY,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run this interpreter with arguments; see `run_command`. The repository is importable."""
    search = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    env = {"PYTHONPATH": search, **(env or {})}
    return run_command(sys.executable, *arguments, timeout=timeout, cwd=cwd, env=env)
