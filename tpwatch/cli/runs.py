"""Verbs about a run directory, `check` (a gate) and `report`; both recompute from its events."""

from __future__ import annotations

import argparse
from typing import Any

from tpwatch.cli.codes import CLEAN, FAULTS, NOTHING_CHECKED
from tpwatch.cli.output import say, wants_color, warn
from tpwatch.export.jsonl import encode
from tpwatch.records import SEVERITIES, Summary
from tpwatch.report.events import read_events
from tpwatch.report.summary import fails, summarize_events, timeline
from tpwatch.report.table import printable
from tpwatch.report.text import render, verdict_line


def add_verbs(verbs: Any) -> None:  # noqa: ANN401 - argparse gives its sub-parsers no public type
    """Add `check` and `report`."""
    check = verbs.add_parser("check", help="gate: exit 1 if the run has faults, 3 if unchecked")
    check.add_argument("directory", metavar="DIR")
    check.add_argument(
        "--fail-on",
        choices=SEVERITIES,
        default="warning",
        help="least severity of a cause that fails the gate (default: warning)",
    )
    check.add_argument(
        "--allow-incomplete-ranks",
        action="store_true",
        help="do not mind replica groups that left no event file",
    )
    _add_format(check)
    check.set_defaults(verb=_check)
    report = verbs.add_parser("report", help="what was found in a run, with evidence and advice")
    report.add_argument("directory", metavar="DIR")
    _add_format(report)
    report.set_defaults(verb=_report)


def _add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=("text", "json"), default="text")


def _check(args: argparse.Namespace) -> int:
    run = read_events(args.directory)
    summary = summarize_events(run)
    if args.format == "json":
        say(encode(summary.to_json(), indent=2))
    else:
        _say_verdict(summary, args.directory)
    if fails(summary, args.fail_on):
        return FAULTS
    if run.missing and not args.allow_incomplete_ranks:
        warn(f"incomplete: no events of {', '.join(run.missing)} (--allow-incomplete-ranks)")
        return NOTHING_CHECKED
    # Faults below the level asked for are no reason to fail; that nothing was checked is.
    return NOTHING_CHECKED if summary.verdict == "nothing-checked" else CLEAN


def _say_verdict(summary: Summary, directory: str) -> None:
    say(f"{printable(directory)}: {verdict_line(summary)}")
    for finding in summary.findings:
        if finding.role == "cause":
            name, since = printable(finding.parameter), f"since step {finding.first_step}"
            say(f"  {finding.severity}: {finding.kind} [{finding.code}] {name} {since}")
    for note in summary.notes:
        say(f"  note: {printable(note)}")


def _report(args: argparse.Namespace) -> int:
    run = read_events(args.directory)
    summary = summarize_events(run)
    if args.format == "json":
        steps = [
            {"step": s.step, "differing": s.differing, "max_abs": s.max_abs, "max_rel": s.max_rel}
            for s in timeline(run)
        ]
        say(encode({**summary.to_json(), "timeline": steps}, indent=2))
    else:
        say(render(summary, timeline(run), title=args.directory, color=wants_color()))
    return CLEAN
