"""Verbs about a run directory: `check` (a gate), `report` and `watch`; all recompute from its events."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

import tpwatch
from tpwatch.cli.codes import CLEAN, FAULTS, NOTHING_CHECKED
from tpwatch.cli.output import say, wants_color, warn
from tpwatch.errors import ConfigError, RunDirectoryError, printable
from tpwatch.export.jsonl import encode
from tpwatch.records import SEVERITIES, Summary
from tpwatch.report.events import RunEvents, read_events
from tpwatch.report.html import render_html
from tpwatch.report.summary import fails, summarize_events, timeline
from tpwatch.report.text import render, verdict_line
from tpwatch.report.watching import follow, open_watch


def add_verbs(verbs: Any) -> None:  # noqa: ANN401 - argparse gives its sub-parsers no public type
    """Add `check`, `report` and `watch`."""
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
    form = report.add_mutually_exclusive_group()
    _add_format(form)
    form.add_argument("--html", action="store_true", help="one file for a browser, complete in itself")
    report.add_argument("--output", metavar="FILE", help="with --html: where to (default: DIR/report.html)")
    report.set_defaults(verb=_report)
    watch = verbs.add_parser("watch", help="follow a running job until it ends, or Ctrl-C")
    watch.add_argument("directory", metavar="DIR")
    watch.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="SECONDS", help="time between two looks (default: 1)"
    )
    watch.set_defaults(verb=_watch)


def _add_format(parser: argparse._ActionsContainer) -> None:
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
    if args.output and not args.html:
        knob, rule = "output", "is the place of an HTML report"
        raise ConfigError(knob, args.output, rule, "Add --html.")
    run = read_events(args.directory)
    if args.html:
        return _write_html(run, Path(args.output or Path(args.directory, "report.html")))
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


def _write_html(run: RunEvents, path: Path) -> int:
    """Write the report so that a reader sees the old one or the new one, never half of it."""
    text = render_html(run, run.directory, tpwatch.__version__)
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise RunDirectoryError(str(path), f"cannot be written: {error.strerror}") from None
    say(f"wrote {printable(str(path))}")
    return CLEAN


def _watch(args: argparse.Namespace) -> int:
    title = f"tpwatch: {printable(args.directory)}"
    with contextlib.suppress(KeyboardInterrupt):
        with open_watch(title, say, live=sys.stdout.isatty()) as screen:
            state = follow(Path(args.directory), screen, args.interval)
        say(f"ended: {verdict_line(state.summary)}")
    return CLEAN


def _seconds(text: str) -> float:
    """A time above 0, for the argument parser."""
    value = float(text)
    if not 0.0 < value < float("inf"):
        raise ValueError(text)
    return value
