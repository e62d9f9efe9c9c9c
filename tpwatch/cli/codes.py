"""Exit codes of the command line; scripts depend on them: add, never renumber."""

from __future__ import annotations

from tpwatch.act import ABORT_EXIT_CODE

CLEAN, FAULTS, USAGE, NOTHING_CHECKED, INTERNAL = range(5)

ERRORS = f"""exit codes:
  {CLEAN}   clean
  {FAULTS}   faults found
  {USAGE}   usage or configuration
  {NOTHING_CHECKED}   nothing was checked
  {INTERNAL}   internal error
  {ABORT_EXIT_CODE}  `run` only: tpwatch stopped the run (otherwise the command's own code)"""
"""For the help text."""
