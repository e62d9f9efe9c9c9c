"""Reading a run directory back: damaged files, merging of groups and starts, verdict, counts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit._samples import finding, plan, step_report
from tpwatch.config import Config
from tpwatch.errors import RunDirectoryError
from tpwatch.export.jsonl import RunLog, event_file, write_meta
from tpwatch.records import SCHEMA, Finding
from tpwatch.report.events import read_events
from tpwatch.report.summary import fails, summarize, timeline


def run_log(directory: Path, names: tuple[str, ...] = ("a", "b"), rank: int = 0, incarnation: str = "first") -> RunLog:
    """The log of a group that has just started."""
    watched = plan(*names, first_rank=rank)
    log = RunLog(directory, watched.group, incarnation)
    log.start(watched, 0, Config())
    return log


def only_finding(directory: Path) -> Finding:
    """The one finding of the summary."""
    (found,) = summarize(directory).findings
    return found


# --------------------------------------------------------------------------------------- verdict


def test_a_run_without_findings_is_clean(tmp_path: Path) -> None:
    """Two checks, nothing found, an orderly end."""
    log = run_log(tmp_path)
    log.check(step_report(1))
    log.check(step_report(2))
    log.end(2)
    summary = summarize(tmp_path)
    assert (summary.verdict, summary.steps_checked, summary.replicas) == ("clean", 2, 2)
    assert (summary.findings, summary.notes, summary.groups) == ((), (), ("tp-0",))


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"severity": "error"}, "faults"),
        ({"severity": "warning"}, "faults"),
        ({"severity": "info"}, "clean"),
        ({"role": "consequence", "caused_by": "x"}, "clean"),
    ],
)
def test_only_a_cause_of_warning_or_error_makes_a_run_faulty(
    tmp_path: Path, changes: dict[str, Any], verdict: str
) -> None:
    """Information and consequences are listed, and the run stays clean."""
    log = run_log(tmp_path)
    log.check(step_report(1))
    log.finding(1, finding(**changes))
    summary = summarize(tmp_path)
    assert summary.verdict == verdict
    assert len(summary.findings) == 1


def test_without_a_check_nothing_was_checked(tmp_path: Path) -> None:
    """Attached and ended: that is not clean."""
    run_log(tmp_path).end(0)
    assert summarize(tmp_path).verdict == "nothing-checked"


def test_a_skipped_step_is_no_check(tmp_path: Path) -> None:
    """The loss scaler skipped the step, so no verdict was made."""
    log = run_log(tmp_path)
    log.check(step_report(1, skipped=True))
    assert summarize(tmp_path).verdict == "nothing-checked"
    assert summarize(tmp_path).steps_checked == 0


def test_a_fault_counts_even_if_no_check_was_completed(tmp_path: Path) -> None:
    """A gradient missing on one rank is on disk before the framework hangs in that very step."""
    run_log(tmp_path).finding(1, finding(kind="grad-presence"))
    assert summarize(tmp_path).verdict == "faults"


def test_a_directory_without_event_files_was_not_checked(tmp_path: Path) -> None:
    """Nothing there, and it says so."""
    summary = summarize(tmp_path)
    assert summary.verdict == "nothing-checked"
    assert "no event files" in summary.notes[0]


@pytest.mark.parametrize(
    ("severity", "level", "expected"),
    [
        ("info", "info", True),
        ("info", "warning", False),
        ("warning", "warning", True),
        ("warning", "error", False),
        ("error", "error", True),
    ],
)
def test_a_gate_fails_from_its_level_on(tmp_path: Path, severity: str, level: Any, *, expected: bool) -> None:
    """`check --fail-on LEVEL`."""
    run_log(tmp_path).finding(1, finding(severity=severity))
    assert fails(summarize(tmp_path), level) is expected


# --------------------------------------------------------------------------------------- merging


def test_the_last_line_about_a_finding_wins(tmp_path: Path) -> None:
    """Severity and counts grow while the run goes on."""
    log = run_log(tmp_path)
    log.finding(3, finding(kind="drift", severity="info", count=3, max_abs=1e-6))
    log.finding(9, finding(kind="drift", severity="warning", count=9, max_abs=1e-5, first_step=2))
    found = only_finding(tmp_path)
    assert (found.severity, found.count, found.max_abs, found.first_step) == ("warning", 9, 1e-5, 2)


def test_several_groups_make_one_finding(tmp_path: Path) -> None:
    """Data-parallel peers see the same fault: ranks are united, extremes are kept."""
    ours, theirs = run_log(tmp_path, rank=0), run_log(tmp_path, rank=2)
    ours.finding(5, finding(ranks=(0, 1), first_step=2, last_step=5, count=4, confidence=0.9))
    later = finding(ranks=(2, 3), first_step=3, last_step=6, count=3, odd_ranks=(3,))
    theirs.finding(6, replace(later, max_abs=0.5, max_rel=0.1))
    found = only_finding(tmp_path)
    assert (found.group, found.ranks, found.odd_ranks) == ("tp", (0, 1, 2, 3), (3,))
    assert (found.first_step, found.last_step, found.count) == (2, 6, 4)
    assert (found.max_abs, found.max_rel, found.confidence) == (0.5, 0.1, 0.99)


def test_a_cause_in_one_group_is_a_cause(tmp_path: Path) -> None:
    """What one group takes for a consequence, another may have seen begin."""
    ours, theirs = run_log(tmp_path, rank=0), run_log(tmp_path, rank=2)
    ours.finding(5, finding(role="consequence", caused_by="x", severity="error", confidence=0.99))
    theirs.finding(5, finding(role="cause", severity="info", confidence=0.5))
    found = only_finding(tmp_path)
    assert (found.role, found.caused_by, found.severity) == ("cause", None, "error")


def test_evidence_is_kept_for_each_group(tmp_path: Path) -> None:
    """Lists of ranks are united, everything else stays with its group."""
    ours, theirs = run_log(tmp_path, rank=0), run_log(tmp_path, rank=2)
    ours.finding(5, finding(evidence={"zero_ranks": [1], "norms_pre": [1.0, 0.0]}))
    theirs.finding(5, finding(ranks=(2, 3), evidence={"zero_ranks": [3], "norms_pre": [2.0, 0.0]}))
    evidence = only_finding(tmp_path).evidence
    assert evidence["zero_ranks"] == [1, 3]
    assert evidence["by_group"]["tp-0"]["norms_pre"] == [1.0, 0.0]
    assert evidence["by_group"]["tp-2"]["norms_pre"] == [2.0, 0.0]


def test_kinds_and_parameters_are_not_merged(tmp_path: Path) -> None:
    """Two parameters, and two kinds of one parameter, are three findings."""
    log = run_log(tmp_path)
    log.finding(1, finding(parameter="a"))
    log.finding(1, finding(parameter="b"))
    log.finding(1, finding(parameter="a", kind="nonfinite"))
    assert len(summarize(tmp_path).findings) == 3


def test_findings_are_ordered_by_what_to_look_at_first(tmp_path: Path) -> None:
    """Causes, then severity, then the first step, then the name."""
    log = run_log(tmp_path)
    log.finding(9, finding(parameter="e", role="consequence", caused_by="c"))
    log.finding(9, finding(parameter="d", severity="info"))
    log.finding(9, finding(parameter="b", first_step=2))
    log.finding(9, finding(parameter="c", first_step=1))
    log.finding(9, finding(parameter="a", first_step=2))
    assert [f.parameter for f in summarize(tmp_path).findings] == ["c", "a", "b", "d", "e"]


def test_starts_of_the_job_are_merged(tmp_path: Path) -> None:
    """A finding of the first start is not forgotten by the second, which says it was restarted."""
    first = run_log(tmp_path, incarnation="first")
    first.finding(2, finding(first_step=1, last_step=2))
    first.close()
    second = run_log(tmp_path, incarnation="second")
    second.check(step_report(3))
    second.end(3)
    assert only_finding(tmp_path).last_step == 2
    assert summarize(tmp_path).notes == ("tp-0: the job was started 2 times into this directory",)


def test_a_spread_beyond_all_bounds_is_read_back_as_infinite(tmp_path: Path) -> None:
    """Infinity is written as null."""
    run_log(tmp_path).finding(1, finding(max_abs=float("inf")))
    assert only_finding(tmp_path).max_abs == float("inf")


# ------------------------------------------------------------------------------------ other facts


def test_replicas_and_steps_are_counted_once(tmp_path: Path) -> None:
    """Two groups that watch overlapping parameters, one checked further than the other."""
    ours = run_log(tmp_path, names=("a", "b"), rank=0)
    theirs = run_log(tmp_path, names=("b", "c"), rank=2)
    for step in (1, 2, 3):
        ours.check(step_report(step))
    ours.check(step_report(3, call=2))
    theirs.check(step_report(1))
    summary = summarize(tmp_path)
    assert (summary.replicas, summary.steps_checked) == (3, 3)


def test_the_last_status_says_where_no_claim_is_made(tmp_path: Path) -> None:
    """Of each group the last line counts, and groups add up."""
    ours, theirs = run_log(tmp_path, rank=0), run_log(tmp_path, rank=2)
    ours.status(1, ["a", "b"], ["c"])
    ours.status(2, ["b"], [])
    theirs.status(2, ["d"], ["e"])
    summary = summarize(tmp_path)
    assert summary.not_exercised == ("b", "d")
    assert summary.unverified == ("e",)


def test_what_is_not_watched_is_listed_with_its_reason(tmp_path: Path) -> None:
    """Once, although two groups say it."""
    for rank in (0, 2):
        watched = plan("a", first_rank=rank, not_watched=(("experts.w", "expert parallel"),))
        RunLog(tmp_path, watched.group, "x").start(watched, 0, Config())
    assert summarize(tmp_path).not_watched == (("experts.w", "expert parallel"),)


def test_overhead_is_the_mean_of_the_checks(tmp_path: Path) -> None:
    """The first check has no step time and does not enter the fraction."""
    log = run_log(tmp_path)
    log.check(step_report(1, seconds=0.5, step_seconds=0.0, deep_collectives=3))
    log.check(step_report(2, seconds=0.1, step_seconds=1.0))
    log.check(step_report(3, seconds=0.3, step_seconds=3.0))
    overhead = summarize(tmp_path).overhead
    assert overhead["check_seconds_mean"] == pytest.approx(0.3)
    assert overhead["step_fraction"] == pytest.approx(0.1)
    assert overhead["collectives_per_check"] == 2
    assert overhead["deep_collectives_per_check"] == pytest.approx(1.0)


def test_an_abort_is_reported_with_its_step(tmp_path: Path) -> None:
    """Of the latest start of the job only."""
    first = run_log(tmp_path, incarnation="first")
    first.abort(4)
    first.close()
    assert summarize(tmp_path).aborted_at == 4
    run_log(tmp_path, incarnation="second").end(9)
    assert summarize(tmp_path).aborted_at is None


def test_the_timeline_has_the_worst_of_all_groups_per_step(tmp_path: Path) -> None:
    """Two groups and two calls of the finalizer make one row per step."""
    ours, theirs = run_log(tmp_path, rank=0), run_log(tmp_path, rank=2)
    ours.check(step_report(2, differing={"param": 3}, max_abs=0.5))
    ours.check(step_report(1, differing={"param": 1, "grad_post": 4}, max_rel=0.25))
    theirs.check(step_report(2, differing={"param": 7, "grad_pre": 1}, max_abs=0.25))
    first, second = timeline(read_events(tmp_path))
    assert (first.step, first.differing, first.max_rel) == (1, {"param": 1, "grad_post": 4}, 0.25)
    assert (second.step, second.max_abs) == (2, 0.5)
    assert second.differing == {"param": 7, "grad_pre": 1}


# --------------------------------------------------------------------------------- damaged files


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    """It names the path."""
    with pytest.raises(RunDirectoryError, match="nothing: no such run directory"):
        summarize(tmp_path / "nothing")


def test_a_cut_off_last_line_is_noted_and_left_out(tmp_path: Path) -> None:
    """What a kill -9 within a line leaves behind."""
    log = run_log(tmp_path)
    log.check(step_report(1))
    path = event_file(tmp_path, "tp-0")
    path.write_bytes(path.read_bytes() + path.read_bytes()[-40:-1])
    summary = summarize(tmp_path)
    assert summary.steps_checked == 1
    assert "events.tp-0.jsonl: the last line is cut off" in summary.notes


def test_a_whole_last_line_without_its_end_counts(tmp_path: Path) -> None:
    """Only the line break was lost."""
    log = run_log(tmp_path)
    log.check(step_report(1))
    path = event_file(tmp_path, "tp-0")
    path.write_bytes(path.read_bytes()[:-1])
    assert summarize(tmp_path).steps_checked == 1


@pytest.mark.parametrize(
    "garbage",
    [
        b"not json",
        b"\xff\xfe\x00",
        b"[1, 2]",
        b'{"event": "check", "step": 1}',
        b'{"schema": 1, "event": "check"}',
        b'{"schema": 1, "event": "finding", "step": 1, "finding": {"kind": "drift"}}',
        b'{"schema": 1, "event": "finding", "step": 1, "finding": 3}',
    ],
)
def test_lines_that_are_no_events_are_counted(tmp_path: Path, garbage: bytes) -> None:
    """They cost themselves, not the run."""
    log = run_log(tmp_path)
    path = event_file(tmp_path, "tp-0")
    path.write_bytes(path.read_bytes() + garbage + b"\n")
    log.check(step_report(1))
    summary = summarize(tmp_path)
    assert summary.steps_checked == 1
    assert "events.tp-0.jsonl: 1 unreadable lines were left out" in summary.notes


def test_a_newer_schema_is_refused_by_name(tmp_path: Path) -> None:
    """Guessing at records of another version would be worse than nothing."""
    record = {"schema": SCHEMA + 1, "event": "check", "step": 1}
    event_file(tmp_path, "tp-0").write_text(json.dumps(record) + "\n")
    with pytest.raises(RunDirectoryError, match=rf"schema {SCHEMA + 1}.*up to {SCHEMA}"):
        summarize(tmp_path)


def test_an_unknown_event_is_ignored(tmp_path: Path) -> None:
    """A newer minor version may add events."""
    log = run_log(tmp_path)
    path = event_file(tmp_path, "tp-0")
    event = '{"schema": 1, "event": "weather", "step": 1, "incarnation": "first"}'
    path.write_text(f"{path.read_text()}{event}\n")
    log.end(1)
    assert summarize(tmp_path).notes == ()


def test_a_group_that_left_no_file_is_missed(tmp_path: Path) -> None:
    """`meta.json` names the groups of the job."""
    write_meta(tmp_path, {"groups": ["tp-0", "tp-2"]})
    run_log(tmp_path).end(0)
    assert read_events(tmp_path).missing == ("tp-2",)
    assert "replica group tp-2 left no event file" in summarize(tmp_path).notes


def test_a_damaged_meta_file_is_no_obstacle(tmp_path: Path) -> None:
    """The event files are the truth."""
    (tmp_path / "meta.json").write_text('{"groups": ["tp-')
    run_log(tmp_path).check(step_report(1))
    assert summarize(tmp_path).verdict == "clean"


def test_a_watch_that_did_not_end_is_noted(tmp_path: Path) -> None:
    """Killed, or still running: the reader should know."""
    run_log(tmp_path).check(step_report(1))
    assert any("no orderly end" in note for note in summarize(tmp_path).notes)


def test_groups_are_read_in_order_of_their_ranks(tmp_path: Path) -> None:
    """tp-2 comes before tp-10."""
    for rank in (10, 2, 0):
        run_log(tmp_path, rank=rank).close()
    assert summarize(tmp_path).groups == ("tp-0", "tp-2", "tp-10")
