"""The tables of the pages, from the latest run of each benchmark in `results/results.csv`.

    python benchmarks/_pages.py README.md benchmarks/README.md

rewrites what stands between ``<!-- bench: NAME -->`` and ``<!-- end -->``; `goals` is the table of `_goals`. Knows
Markdown and results, and measures nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from _goals import GOALS, Latest, goals_table
from _harness import Result, load, table

MARKED = re.compile(r"(<!-- bench: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def tables(benchmark: str, results: Sequence[Result]) -> str:
    """Return the tables of the latest run of a benchmark, with where and when it ran."""
    chosen = [r for r in results if r.benchmark == benchmark]
    if not chosen:
        return "Not yet run."
    date = max(r.date for r in chosen)
    chosen = [r for r in chosen if r.date == date]
    cases = dict.fromkeys(r.case for r in chosen)
    parts = [f"**{case}**\n\n{table(r for r in chosen if r.case == case)}" for case in cases]
    first = chosen[0]
    note = f" {first.note}" if first.note else ""
    return "\n\n".join([*parts, f"{date[:10]}; {first.machine}; {first.versions}.{note}"])


def rewritten(text: str, results: Sequence[Result]) -> str:
    """Return a page with the tables that these results make."""

    def fresh(mark: re.Match[str]) -> str:
        body = goals_table(GOALS, Latest(results)) if mark[2] == "goals" else tables(mark[2], results)
        return f"{mark[1]}{body}\n{mark[3]}"

    return MARKED.sub(fresh, text)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        page = Path(argument)
        page.write_text(rewritten(page.read_text(), load()))
