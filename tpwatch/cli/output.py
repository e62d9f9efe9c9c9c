"""Standard output and error of the command line: the only place that writes to either."""

from __future__ import annotations

import os
import sys


def say(text: str) -> None:
    """Write a line to standard output."""
    sys.stdout.write(f"{text}\n")


def warn(text: str) -> None:
    """Write a line about tpwatch itself to standard error, at once."""
    sys.stderr.write(f"tpwatch: {text}\n")
    sys.stderr.flush()


def wants_color() -> bool:
    """True on a terminal, unless NO_COLOR is set to anything (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
