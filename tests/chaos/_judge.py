"""What must hold of a chaos run, one promise a function: each returns what is wrong, or nothing.

Knows the schedule and what a run left behind; starts nothing.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase

from tests.chaos._runs import Run
from tpwatch.act import ABORT_EXIT_CODE
from tpwatch.errors import RunDirectoryError
from tpwatch.lab import catalog
from tpwatch.records import Finding
from tpwatch.report.events import RunEvents, read_events
from tpwatch.report.summary import merged_findings, summarize_events

KILLED, FAILED = -signal.SIGKILL, 1
SURE = 5
"""Checks without a gap after which a fault of the model must have been found."""

PATIENT = 15.0
"""Seconds that finishing may take: more than a sink is waited for on a busy machine, less than a meeting (`LONG`)."""

WRITERS_OWN = re.compile(r"the last line is cut off|unreadable lines were left out")
INTERNAL = "tpwatch internal error"

Wrong = Iterator[str]


def no_hang(run: Run) -> Wrong:
    """Every process ended by itself, and at the end nobody waited for somebody who was not missing."""
    for rank, code in enumerate(run.codes):
        if code is None:
            yield f"rank {rank} had not ended after {run.seconds:.0f} s"
        for note in run.notes("done", rank):
            if not run.struck and note["ending"] > PATIENT:
                yield f"rank {rank} took {note['ending']:.0f} s to finish"


def own_end(run: Run) -> Wrong:
    """Every rank ends as its script does: its own code and error, a signal, the framework's error, or a stop."""
    for rank, code in enumerate(run.codes):
        expected, text = _ending(run, rank)
        aborted = run.scenario.fails and expected == FAILED and code == -signal.SIGABRT
        if code not in (None, expected) and not aborted:
            yield f"rank {rank} ended with {code} instead of {expected}"
        if text and text not in run.outputs[rank]:
            yield f"rank {rank} did not say {text!r}"
        if code == FAILED and (place := _innermost(run.outputs[rank])).startswith("tpwatch/"):
            yield f"rank {rank} ended by an error in {place}"


def _ending(run: Run, rank: int) -> tuple[int, str]:
    """Exit code of a rank, and what it must have said."""
    scenario = run.scenario
    if run.notes("stopped", rank):
        return ABORT_EXIT_CODE, ""
    if rank in run.struck and scenario.kind == "killed":
        return KILLED, ""
    if rank in run.struck:
        return scenario.exit_code or FAILED, f"planted: rank {rank} at {scenario.point}"
    return (0 if scenario.steps in run.steps(rank) else FAILED), ""


def _innermost(output: str) -> str:
    """Where the last traceback of an output was raised: the end of a file name."""
    places = re.findall(r'^(?:\[rank\d+\]:)? +File "([^"]+)", line', output, re.MULTILINE)
    return re.sub(r"^.*/(?=tpwatch/)", "", places[-1]) if places else ""


def goes_on(run: Run) -> Wrong:
    """Where nobody died, the framework did not fail by itself and nothing stopped the run, all steps are trained."""
    if run.struck or any(run.notes("stopped", rank) for rank in run.ranks):
        return
    for rank in run.ranks:
        if not run.scenario.fails and (run.scenario.steps not in run.steps(rank) or not run.notes("done", rank)):
            yield f"rank {rank} did not train to its end: {sorted(run.steps(rank))}"


def together(run: Run) -> Wrong:
    """All living ranks stop at the same step; within a group they are watched, and communicate, alike at every step."""
    stops = {rank: [(n["step"], n["during"]) for n in run.notes("stopped", rank)] for rank in run.living}
    if len(set(map(tuple, stops.values()))) > 1:
        yield f"stopped by tpwatch at different steps: {stops}"
    if any(stops.values()) and not run.scenario.stops:
        yield f"stopped although nothing may stop this run: {stops}"
    for group in run.scenario.groups:
        living = [rank for rank in group if rank in run.living]
        yield from _alike(run, living)
    last = {rank: max(run.steps(rank), default=0) for rank in run.living}
    if last and max(last.values()) - min(last.values()) > (run.scenario.dp > 1):
        yield f"living ranks trained to different steps: {last}"


def _alike(run: Run, ranks: list[int]) -> Wrong:
    for step in range(1, run.scenario.steps + 1):
        seen = {rank: run.steps(rank)[step] for rank in ranks if step in run.steps(rank)}
        for key in ("on", "collectives"):
            values = {rank: note[key] for rank, note in seen.items()}
            if len(set(values.values())) > 1:
                yield f"after step {step}, {key} differs: {values}"


def on_or_off(run: Run) -> Wrong:
    """Off on every rank where one cannot take part, and else on: a run that is never watched proves nothing."""
    attached = {rank: note for rank in run.ranks for note in run.notes("attached", rank)[:1]}
    for rank, note in attached.items():
        if note["on"] == run.scenario.off:
            yield f"rank {rank} is {'on' if note['on'] else 'off'} after attach: {note['reason']}"
    if run.scenario.off and run.directory.is_dir():
        said = {event["event"] for events in read_events(run.directory).groups.values() for event in events}
        if said & {"check", "finding", "end"}:
            yield f"events were written though nothing was to be watched: {sorted(said)}"


def readable(run: Run) -> Wrong:
    """What was committed can be read: whole lines, every check that the leader saw the end of, every finding."""
    try:
        events = read_events(run.directory)
    except RunDirectoryError as error:
        if any(note["reported"] for rank in run.ranks for note in run.steps(rank).values()):
            yield str(error)
        return
    summarize_events(events)
    torn = [note for note in events.notes if WRITERS_OWN.search(note)]
    if torn and not (run.scenario.kind == "disk-full" or run.struck):
        yield f"lines are damaged: {torn}"
    for group in run.scenario.groups:
        yield from _complete(run, events, group[0])


def _complete(run: Run, events: RunEvents, leader: int) -> Wrong:
    written = {event["step"] for event in events.groups.get(f"tp-{leader}", ()) if event["event"] == "check"}
    reported = {note["reported"] for note in run.steps(leader).values()} - {0}
    if not run.scenario.traits.lossy and (lost := reported - written):
        yield f"checks of steps {sorted(lost)} are missing from the event file of tp-{leader}"
    if run.scenario.kind == "disk-full" and run.scenario.point != "a-while":
        return
    kept = {(f.kind, f.parameter) for f in merged_findings(events)}
    for rank in run.ranks:
        for note in run.notes("done", rank):
            if missing := {tuple(found) for found in note["findings"]} - kept:
                yield f"findings of rank {rank} are missing from the event files: {missing}"


def nothing_invented(run: Run) -> Wrong:
    """Every finding is explained by the event, or by the fault of the model; and that fault is found in time."""
    if not run.directory.is_dir():
        return
    events = read_events(run.directory)
    found = merged_findings(events)
    for finding in found:
        if finding.kind not in run.scenario.traits.findings and not _true(run, finding):
            yield f"invented: {finding.kind} on {finding.parameter} ({finding.role}), first step {finding.first_step}"
    checked = len({e["step"] for _, e in events.of("check") if e.get("call") == 1})
    hidden = run.scenario.traits.alters or run.scenario.kind == "reattached"
    due = run.scenario.faulty and checked >= SURE and not hidden
    if due and not any(_true(run, finding) for finding in found):
        yield f"the fault of the model was not found in {checked} checks"


def _true(run: Run, finding: Finding) -> bool:
    """True if the fault of the model is just this."""
    if not run.scenario.faulty:
        return False
    if run.scenario.host == "plain":
        # Unwatched for two steps, the fault has set values apart by the time of the second attach.
        parted = run.scenario.kind == "reattached" and finding.kind == "init-mismatch"
        return finding.parameter == "gain" and (finding.kind == "missing-reduce" or parted)
    entry = catalog.get("ple-double-sum")
    return finding.kind == entry.kind and any(fnmatchcase(finding.parameter, f.pattern) for f in entry.faulty)


def quiet(run: Run) -> Wrong:
    """Nothing went wrong inside tpwatch that was not made to."""
    if run.scenario.traits.internal:
        return
    for rank, output in enumerate(run.outputs):
        if INTERNAL in output:
            yield f"rank {rank}: " + next(line for line in output.splitlines() if INTERNAL in line)


def unchanged(run: Run, plain: Run) -> Wrong:
    """Losses, weights, gradients and global state are those of the unwatched training, as far as this one came."""
    for rank in run.ranks:
        ours, theirs = run.steps(rank), plain.steps(rank)
        for what in ("loss", "state"):
            differing = [step for step, note in ours.items() if step not in theirs or note[what] != theirs[step][what]]
            if differing:
                yield f"rank {rank}: the {what} of step {differing[0]} is not that of the unwatched run"
        if run.scenario.kind != "not-finite" and not all(
            math.isfinite(float.fromhex(n["loss"])) for n in ours.values()
        ):
            yield f"rank {rank}: a loss is not finite"
        for what in ("weights", "process"):
            ends = [[note[what] for note in one.notes("done", rank)] for one in (run, plain)]
            if ends[0] and ends[0] != ends[1]:
                yield f"rank {rank}: the {what} at the end is not that of the unwatched run"
    if run.scenario.fails and plain.scenario.steps in plain.steps(0):
        yield "the framework was to fail, and did not without tpwatch"


PROMISES: tuple[Callable[[Run], Wrong], ...] = (
    no_hang, own_end, goes_on, together, on_or_off, readable, nothing_invented, quiet,
)  # fmt: skip
"""All that can be judged from the run alone."""


def broken(run: Run, plain: Run) -> list[str]:
    """Everything that is wrong with a run, each with its promise."""
    wrong = [f"{promise.__name__}: {text}" for promise in PROMISES for text in promise(run)]
    return wrong + [f"unchanged: {text}" for text in unchanged(run, plain)]


def repeat(run: Run) -> str:
    """The one command that repeats a run."""
    return f"TPWATCH_TEST_CHAOS={run.scenario.name} python -m pytest -p no:randomly tests/chaos/test_chaos.py"


def story(run: Run) -> str:
    """A run in words, for a failed test: the scenario, how it ended, and the last words of each rank."""
    lines = [f"{run.scenario}", f"codes {list(run.codes)} in {run.seconds:.1f} s, fired: {run.fired}", repeat(run)]
    for rank, output in enumerate(run.outputs):
        lines += [f"--- rank {rank}, last notes {list(run.diaries[rank])[-3:]}", *output.splitlines()[-25:]]
    return "\n".join(lines)
