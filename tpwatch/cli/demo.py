"""The verb `demo`: train the lab's faulty models and watch tpwatch name the faults.

The lab runs in processes of its own; what it does is read from the run directory, as for any
other run. Knows the catalogue and files, not torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tpwatch.cli.codes import CLEAN, FAULTS
from tpwatch.cli.demo_verdict import Judged, closing_table, judge
from tpwatch.cli.output import say
from tpwatch.lab import catalog
from tpwatch.lab.catalog import Fault
from tpwatch.report.events import read_events
from tpwatch.report.live import Screen, open_screen
from tpwatch.report.summary import merged_findings, summarize_events, timeline
from tpwatch.report.table import table

SHOWCASE = (
    "slime-gdn-drift",
    "gdn-gamma-double-sum",
    "custom-module-unsynced",
    "one-sided-gradient",
    "ple-double-sum",
    "lora-unsummed",
)
"""What the demo runs if nothing is asked for: each family of field reports once."""

REFRESH_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Play:
    """One entry of the catalogue, as it is to be run."""

    fault: Fault
    steps: int
    out: Path
    fixed: bool


def add_verbs(verbs: Any) -> None:  # noqa: ANN401 - argparse gives its sub-parsers no public type
    """Add `demo`."""
    demo = verbs.add_parser("demo", help="train real faulty models and see the faults named")
    demo.add_argument("--list", action="store_true", help="show the catalogue and exit")
    demo.add_argument("--fault", metavar="NAME[,NAME]", help="entries to run; default: a selection")
    demo.add_argument("--tp", type=_positive, metavar="N", help="tensor-parallel size (default 2)")
    demo.add_argument("--dp", type=_positive, metavar="M", help="data-parallel size (default 1)")
    demo.add_argument("--steps", type=_positive, default=6, metavar="K", help="steps (default 6)")
    demo.add_argument("--out", metavar="DIR", help="run directory; by default a new one")
    demo.add_argument("--fixed", action="store_true", help="with the upstream fix: must be clean")
    demo.set_defaults(verb=_demo)


def _demo(args: argparse.Namespace) -> int:
    if args.list:
        say(_listing())
        return CLEAN
    names = args.fault.split(",") if args.fault else SHOWCASE
    root = Path(args.out or f"tpwatch-runs/demo-{time.strftime('%Y%m%d-%H%M%S')}")
    faults = [_sized(catalog.get(name.strip()), args.tp, args.dp) for name in names]
    plays = [
        # One fault fills the directory that was asked for, several get one each within it.
        Play(fault, args.steps, root if len(faults) == 1 else root / fault.name, args.fixed)
        for fault in faults
    ]
    judged = [_play(play) for play in plays]
    say(f"\n{closing_table(judged)}")
    say(f"\nrun directory: {root}   (tpwatch report {plays[0].out})")
    # A demonstration succeeds if each fault was named as it should be: finding one is no failure.
    return FAULTS if any(one.problems for one in judged) else CLEAN


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _sized(fault: Fault, tp: int | None, dp: int | None) -> Fault:
    """The entry at another parallel size."""
    sizes = {key: value for key, value in (("tp", tp), ("dp", dp)) if value is not None}
    return replace(fault, config=replace(fault.config, **sizes))


def _listing() -> str:
    rows = [
        (fault.name, fault.report or "-", fault.kind or "clean", fault.story)
        for fault in catalog.ENTRIES
    ]
    return "\n".join(table(("name", "report", "expected", "story"), rows))


def _play(play: Play) -> Judged:
    """Run one entry, showing its course, and judge it."""
    fault, config = play.fault, play.fault.config
    fixed = ", with the upstream fix" if play.fixed else ""
    title = f"{fault.name} (TP{config.tp} x DP{config.dp}){fixed}: {fault.story}"
    running = _start(play)
    with open_screen(title, say, live=sys.stdout.isatty()) as screen:
        while running():
            _show(play.out, screen)
            time.sleep(REFRESH_SECONDS)
        _show(play.out, screen)
    run = read_events(play.out)
    watched = {name for _, start in run.of("start") for name in start.get("names", ())}
    summary = summarize_events(run)
    return judge(fault, summary, sorted(watched), tp=config.tp, fixed=play.fixed)


def _show(out: Path, screen: Screen) -> None:
    if out.is_dir():
        run = read_events(out)
        screen.show(timeline(run), merged_findings(run))
