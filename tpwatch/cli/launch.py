"""The verb `run`: launch a training command so that its workers go through `tpwatch.run`.

    tpwatch run [--out DIR] [--config FILE] -- torchrun ... train.py args

Rewrites the command, never the script. The command's own exit code survives, except where
tpwatch stopped the run: a launcher like torchrun returns 1 whatever its workers returned.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tpwatch.act import ABORT_EXIT_CODE
from tpwatch.cli.output import warn
from tpwatch.config import load
from tpwatch.errors import ConfigError

RUNNER = "tpwatch.run"
PYTHON = re.compile(r"python[0-9.]*$")
PYTHON_OPTIONS_WITH_VALUE = frozenset({"-X", "-W", "--check-hash-based-pycs"})
PYTHON_OPTIONS_END = frozenset({"-m", "-c", "-"})
TORCHRUN_MODULE = "torch.distributed.run"


def add_verbs(verbs: Any) -> None:  # noqa: ANN401 - argparse gives its sub-parsers no public type
    """Add `run`."""
    run = verbs.add_parser(
        "run",
        help="run a training command under tpwatch",
        usage="tpwatch run [--out DIR] [--config FILE] -- torchrun ... train.py args",
    )
    run.add_argument("--out", metavar="DIR", help="run directory; by default a new one")
    run.add_argument("--config", metavar="FILE", help="YAML configuration")
    run.add_argument("command", nargs=argparse.REMAINDER, help="the command, after --")
    run.set_defaults(verb=_run)


def _run(args: argparse.Namespace) -> int:
    command = rewrite(args.command[1:] if args.command[:1] == ["--"] else args.command)
    launch_id = uuid.uuid4().hex
    given = {"TPWATCH_OUT": args.out, "TPWATCH_CONFIG": args.config}
    env = {**os.environ, **{key: str(Path(v).absolute()) for key, v in given.items() if v}}
    # Wrong settings are an error here, before the launch, and not on every worker.
    out = Path(load(env=env).out or _new_directory()).absolute()
    env |= {"TPWATCH_OUT": str(out), "TPWATCH_LAUNCH_ID": launch_id}
    code = _supervise(command, env)
    if out.is_dir():
        warn(f"run directory {out} (tpwatch report shows it)")
    return ABORT_EXIT_CODE if _aborted(out, launch_id) else code


def _new_directory() -> str:
    return f"tpwatch-runs/{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}"


def _aborted(out: Path, launch_id: str) -> bool:
    """True if tpwatch stopped this very launch, not an earlier one into the same directory."""
    try:
        record = json.loads((out / "abort.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and record.get("launch_id") == launch_id


def _supervise(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Run a command and pass on what should stop it; its exit code, 128 + n after signal n."""
    try:
        child = subprocess.Popen(command, env=env)  # noqa: S603 - the user's own command
    except OSError as error:
        raise _usage(command, f"cannot be started: {error.strerror}") from None

    def forward(signum: int, _frame: FrameType | None) -> None:
        # Ctrl-C reaches the whole foreground group by itself; a second one would be a hard stop.
        if signum != signal.SIGINT or not _in_foreground():
            child.send_signal(signum)

    old = {s: signal.signal(s, forward) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = child.wait()
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)
    return code if code >= 0 else 128 - code


def _in_foreground() -> bool:
    """True if the terminal, where there is one, delivers Ctrl-C to this process group."""
    try:
        with Path("/dev/tty").open("rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


# --------------------------------------------------------------------------- rewriting


def rewrite(command: Sequence[str]) -> list[str]:
    """The command with `-m tpwatch.run` in front of its training script or module.

    Knows `torchrun ...` and `python [-m] ...`, which includes `python -m torch.distributed.run`.

    Raises:
        ConfigError: it is another command; put the module there by hand.
    """
    if not command:
        raise _usage(command, "is empty")
    program = Path(command[0]).name
    if program == "torchrun":
        return [command[0], *_torchrun(command, command[1:])]
    if PYTHON.match(program):
        return [command[0], *_python(command)]
    raise _usage(command, "is neither torchrun nor python")


def _torchrun(command: Sequence[str], options: Sequence[str]) -> list[str]:
    """Options of torchrun, then the runner, then the script; found by torchrun's own parser."""
    from torch.distributed.run import get_args_parser

    args = get_args_parser().parse_args(list(options))
    if args.no_python:
        raise _usage(command, "runs workers that are not python (--no-python)")
    at = len(options) - len(args.training_script_args) - 1
    if options[at] != args.training_script:
        raise _usage(command, "does not end in a script and its arguments")
    if args.training_script == RUNNER:
        return list(options)
    before = options[: at - 1] if options[at - 1 : at] == ["--"] else options[:at]
    return [*before, "-m", *_runner(options[at:], is_module=args.module)]


def _python(command: Sequence[str]) -> list[str]:
    """Options of python, then the runner, then the script or module."""
    at = 1
    while command[at : at + 1] and command[at].startswith("-"):
        if command[at] in PYTHON_OPTIONS_END:
            break
        at += 2 if command[at] in PYTHON_OPTIONS_WITH_VALUE else 1
    options, rest = command[1:at], command[at:]
    is_module = rest[:1] == ["-m"]
    target = rest[1:] if is_module else rest
    if not target or target[0].startswith("-"):
        raise _usage(command, "names no script or module")
    if is_module and target[0] == TORCHRUN_MODULE:
        return [*options, "-m", TORCHRUN_MODULE, *_torchrun(command, target[1:])]
    if is_module and target[0] == "torch.distributed.launch":
        raise _usage(command, "uses the deprecated launcher torch.distributed.launch")
    if is_module and target[0] == RUNNER:
        return list(command[1:])
    return [*options, "-m", *_runner(target, is_module=is_module)]


def _runner(target: Sequence[str], *, is_module: bool) -> list[str]:
    return [RUNNER, "-m", *target] if is_module else [RUNNER, *target]


def _usage(command: Sequence[str], rule: str) -> ConfigError:
    remedy = (
        "Use `tpwatch run -- torchrun ... train.py`, or put `-m tpwatch.run` in front of the training script yourself."
    )
    return ConfigError("command", " ".join(command), rule, remedy)
