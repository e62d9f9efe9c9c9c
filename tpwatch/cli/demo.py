"""The verb `demo`: train the lab's faulty models and watch tpwatch name the faults.

The lab runs in processes of its own; what it does is read from the run directory, as for any
other run. Knows the catalogue and files, not torch.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tpwatch._guard import shield
from tpwatch.cli.codes import CLEAN, FAULTS
from tpwatch.cli.demo_verdict import Judged, closing_table, judge
from tpwatch.cli.output import say
from tpwatch.errors import ConfigError
from tpwatch.export.jsonl import make_directory
from tpwatch.lab import catalog
from tpwatch.lab.launch import Job, launch, missing, pools, run_directory
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


def add_verbs(verbs: Any) -> None:  # noqa: ANN401 - argparse gives its sub-parsers no public type
    """Add `demo`."""
    demo = verbs.add_parser("demo", help="train real faulty models and see the faults named")
    demo.add_argument("--list", action="store_true", help="show the catalogue and exit")
    demo.add_argument("--fault", metavar="NAME[,NAME]", help="entries to run; default: a selection")
    demo.add_argument("--tp", type=_positive, default=2, metavar="N", help="tensor-parallel size")
    demo.add_argument("--dp", type=_positive, metavar="M", help="data-parallel size")
    demo.add_argument("--steps", type=_positive, default=6, metavar="K", help="training steps")
    demo.add_argument("--out", metavar="DIR", help="run directory; by default a new one")
    demo.add_argument("--fixed", action="store_true", help="with the upstream fix: must be clean")
    demo.set_defaults(verb=_demo)


def _demo(args: argparse.Namespace) -> int:
    if args.list:
        say(_listing())
        return CLEAN
    job = _job(args)
    say(f"training {', '.join(job.faults)}; output of the processes: {_log(job)}")
    judged = list(_watch(job))
    say(f"\n{closing_table(judged)}")
    say(f"\nrun directory: {job.out}   (next: tpwatch report {run_directory(job, job.faults[0])})")
    # A demonstration succeeds if each fault was named as it should be: finding one is no failure.
    return FAULTS if any(one.problems for one in judged) else CLEAN


def _job(args: argparse.Namespace) -> Job:
    """What is to be run, once it is clear that all of it can be."""
    names = tuple(args.fault.split(",")) if args.fault else SHOWCASE
    out = Path(args.out or f"tpwatch-runs/demo-{time.strftime('%Y%m%d-%H%M%S')}")
    job = Job(faults=names, out=out, tp=args.tp, dp=args.dp, steps=args.steps, fixed=args.fixed)
    for name in names:
        catalog.get(name).at(args.tp, args.dp)
        if lacking := missing(name):
            remedy = "Install that extra: pip install 'tpwatch[lab]'."
            raise ConfigError(knob="fault", value=name, rule=f"needs {lacking}", remedy=remedy)
        if any(run_directory(job, name).glob("events.*")):
            rule, remedy = "holds a run already, which would be judged too", "Choose another."
            raise ConfigError(knob="out", value=str(out), rule=rule, remedy=remedy)
    return job


def _positive(text: str) -> int:
    """A size of at least 1, for the argument parser."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _listing() -> str:
    rows = [(fault.name, fault.report or "-", fault.kind or "clean", fault.story) for fault in catalog.ENTRIES]
    return "\n".join(table(("name", "report", "expected", "story"), rows))


def _watch(job: Job) -> Iterator[Judged]:
    """Run a job, show the course of each entry, and judge it by what its run directory holds."""
    in_order = [name for pool in pools(job) for name in pool]
    make_directory(job.out)
    with _log(job).open("wb") as output:
        running = threading.Thread(target=shield, args=(launch, job, output), daemon=True)
        running.start()
        for name, later in zip(in_order, [*in_order[1:], None], strict=True):
            out = run_directory(job, name)
            with open_screen(_title(job, name), say, live=sys.stdout.isatty()) as screen:
                while running.is_alive() and not _over(out, job, later):
                    _show(out, screen)
                    time.sleep(REFRESH_SECONDS)
                _show(out, screen)
            yield _judge(job, name)
        running.join()


def _over(out: Path, job: Job, later: str | None) -> bool:
    """True once an entry has ended in order, or the next one has begun: it may have crashed."""
    if later is not None and run_directory(job, later).is_dir():
        return True
    groups = read_events(out).groups.values() if out.is_dir() else ()
    return bool(groups) and all(events and events[-1]["event"] == "end" for events in groups)


def _show(out: Path, screen: Screen) -> None:
    if out.is_dir():
        run = read_events(out)
        screen.show(timeline(run), merged_findings(run))


def _judge(job: Job, name: str) -> Judged:
    out = run_directory(job, name)
    make_directory(out)  # a run that crashed at once is judged too: nothing was checked
    run = read_events(out)
    watched = {parameter for _, start in run.of("start") for parameter in start.get("names", ())}
    summary = summarize_events(run)
    return judge(catalog.get(name), summary, sorted(watched), tp=job.tp, fixed=job.fixed)


def _title(job: Job, name: str) -> str:
    fault, config = catalog.get(name), catalog.get(name).at(job.tp, job.dp)
    fixed = f", fixed: {fault.fix}" if job.fixed and fault.fix else ""
    return f"\n{name} (TP{config.tp} x DP{config.dp}): {fault.story}{fixed}"


def _log(job: Job) -> Path:
    return job.out / "lab.log"
