"""The `tpwatch` command: verbs, exit codes, and errors as one line instead of a traceback.

Every verb is one function from parsed arguments to an exit code, in the module named after what
it deals with. Torch is imported by the verbs that need it only.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import tpwatch
from tpwatch._guard import shield
from tpwatch.cli import demo, launch, rules, runs, settings, wandb
from tpwatch.cli.codes import ERRORS, INTERNAL, USAGE
from tpwatch.cli.output import warn
from tpwatch.errors import TpwatchError, printable


def build_parser() -> argparse.ArgumentParser:
    """The parser of all verbs."""
    parser = argparse.ArgumentParser(
        prog="tpwatch",
        description="Runtime gradient-consistency monitor for tensor-parallel training.",
        epilog=ERRORS,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tpwatch {tpwatch.__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for module in (launch, demo, runs, rules, settings, wandb):
        module.add_verbs(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit code."""
    args = build_parser().parse_args(argv)
    if os.environ.get("TPWATCH_DEBUG") == "1":
        return _run(args)
    done, result = shield(_run, args)
    return int(result) if done else _explain(result)


def _run(args: argparse.Namespace) -> int:
    code: int = args.verb(args)
    sys.stdout.flush()
    return code


def _explain(error: Exception) -> int:
    """One line about an error, and the exit code it stands for."""
    if isinstance(error, BrokenPipeError):  # the reader of our output, `head` for one, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERNAL
    if isinstance(error, TpwatchError):
        warn(str(error))
        return USAGE
    warn(printable(f"internal error: {type(error).__name__}: {error} (TPWATCH_DEBUG=1 shows where)"))
    return INTERNAL
