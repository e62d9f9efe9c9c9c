"""Whatever stands in a run directory: a verdict, a report and notes come out of it, never a traceback."""

from __future__ import annotations

import copy
import io
import json
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit._samples import finding, plan, step_report
from tpwatch.cli import build_parser
from tpwatch.config import Config
from tpwatch.errors import RunDirectoryError
from tpwatch.export.jsonl import RunLog, event_file
from tpwatch.report.events import read_events
from tpwatch.report.summary import summarize
from tpwatch.report.watching import read_state, step_line

# Derandomised and without a database: a failure is the same on every machine.
steadily = settings(
    max_examples=60,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)

COMMANDS = (
    ("check",),
    ("check", "--format=json", "--allow-incomplete-ranks"),
    ("report",),
    ("report", "--format=json"),
    ("report", "--html"),
)
FILES = (
    "events.tp-0.jsonl",
    "events.tp-0.1.jsonl",
    "events.tp-2.jsonl",
    "events.a\x1b[2Jb.jsonl",
    "events.\udcff.jsonl",
)


def sample_events() -> list[dict[str, Any]]:
    """One event of every kind, as the package writes them."""
    evidence = {
        "exact": True,
        "zero_ranks": [1],
        "camps_param": [[0], [1]],
        "norms_pre": [0.5, 0.25],
        "norms_post": [1.0, 1.0],
        "spread_param": {"max_abs": 0.1, "max_rel": 0.5, "l2": 0.2, "differing": 3, "elements": 4},
        "gradient": {"before": "partials", "reduction": "none"},
        "threshold": "max_abs 1 > 0.5",
    }
    with tempfile.TemporaryDirectory() as directory:
        log = RunLog(directory, "tp-0", "first")
        log.start(plan("a", "b", not_watched=(("c", "excluded"),)), 0, Config(), versions={"torch": "2"})
        log.check(step_report(1, phases={"exchange": 0.1}, ratio_lo=1.0, ratio_hi=2.0))
        log.finding(1, finding(parameter="a", evidence=evidence, max_abs=0.1))
        log.finding(1, finding(kind="drift", parameter="b", role="consequence", caused_by="a"))
        log.status(1, ["a"], ["b"])
        log.note(1, "a word")
        log.job(1, {"counts": {"drift": 1}, "ratio": 2.0, "max_abs": 0.1})
        log.abort(1)
        log.end(1)
        log.close()
        lines = event_file(directory, "tp-0").read_text().splitlines()
    thinned = {"schema": 1, "event": "thinned", "step": 9, "steps": 9, "lines": 9, "incarnation": "first"}
    thinned["runs"] = [[1, 7, 1], [8, 9, 1]]
    return [*map(json.loads, lines), thinned]


SAMPLES = sample_events()

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([2**53 + 1, -(2**70), 10**400, 1e308, -1e308, 5e-324, float("inf"), float("-inf"), float("nan")])
    | st.floats()
    | st.sampled_from(
        ["", "a", "cause", "info", "error", "drift", "\x1b[31m", "\ud800", "</script>", "9" * 5000 + ".w"]
    )
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def spoilt(draw: st.DrawFn) -> bytes:
    """The line of a real event of which some values, at any depth, are something else or are gone."""
    event = copy.deepcopy(draw(st.sampled_from(SAMPLES)))
    for _ in range(draw(st.integers(0, 3))):
        at = event
        key = draw(st.sampled_from(sorted(at)))
        while isinstance(at[key], dict) and at[key] and draw(st.booleans()):
            at = at[key]
            key = draw(st.sampled_from(sorted(at)))
        if draw(st.integers(0, 3)):
            at[key] = draw(values)
        else:
            del at[key]
        if not event:
            break
    return json.dumps(event).encode()


@st.composite
def cut(draw: st.DrawFn) -> bytes:
    """A line that ends too early."""
    line = draw(spoilt())
    return line[: draw(st.integers(0, len(line)))]


contents = st.lists(spoilt() | spoilt() | cut() | st.binary(max_size=40), max_size=12).map(b"\n".join)
directories = st.dictionaries(st.sampled_from(FILES), contents | st.binary(max_size=200), max_size=3)
metas = st.none() | st.binary(max_size=40) | values.map(lambda v: json.dumps({"groups": v}).encode())


def say(directory: Path, *command: str) -> tuple[int, str]:
    """Exit code and output of a command on a directory; a traceback is a failure of the test."""
    args = build_parser().parse_args([command[0], str(directory), *command[1:]])
    out, err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code: int = args.verb(args)
    out.flush()
    return code, out.buffer.getvalue().decode()


def only_a_newer_version(directory: Path) -> bool:
    """True if a line says that a newer tpwatch wrote it; such a directory is refused."""
    try:
        read_events(directory)
    except RunDirectoryError as error:
        assert "this tpwatch reads up to" in str(error)  # noqa: PT017 - what is refused is refused for this alone
        return True
    return False


@steadily
@given(directories, metas)
def test_any_directory_has_a_verdict_and_a_report(files: dict[str, bytes], meta: bytes | None) -> None:
    """Exit codes are those of a gate, text is safe to print, JSON is JSON, the page is whole."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for file, content in files.items():
            (root / file).write_bytes(content)
        if meta is not None:
            (root / "meta.json").write_bytes(meta)
        if only_a_newer_version(root):
            return
        for command in COMMANDS:
            code, out = say(root, *command)
            assert code in ({0, 1, 3} if command[0] == "check" else {0})
            if "--format=json" in command:
                json.loads(out, parse_constant=pytest.fail)
            else:
                assert all(line.isprintable() for line in out.splitlines())
        assert (root / "report.html").read_text(encoding="utf-8").endswith("</html>\n")
        state = read_state(root)
        assert step_line(state, 0.0)


@steadily
@given(contents)
def test_every_line_is_an_event_or_is_counted(content: bytes) -> None:
    """Nothing vanishes in silence: events and unreadable lines add up to the lines there are."""
    with tempfile.TemporaryDirectory() as name:
        event_file(name, "tp-0").write_bytes(content + b"\n")
        if only_a_newer_version(Path(name)):
            return
        run = read_events(name)
        counted = [int(note.split(": ")[1].split()[0]) for note in run.notes]
        assert len(run.groups["tp-0"]) + sum(counted) == len([line for line in content.split(b"\n") if line])


@steadily
@given(st.lists(st.sampled_from(range(len(SAMPLES))), max_size=12), st.integers(1, 3))
def test_a_line_that_is_there_twice_changes_no_verdict(order: list[int], times: int) -> None:
    """Lines repeated, and events in any order: the same findings and counts."""
    written = [json.dumps({**SAMPLES[i], "step": 1}).encode() for i in order if SAMPLES[i]["event"] != "thinned"]
    summaries = []
    for lines in (written, written * times):
        with tempfile.TemporaryDirectory() as name:
            event_file(name, "tp-0").write_bytes(b"\n".join(lines))
            found = summarize(name)
        summaries.append((found.verdict, found.findings, found.steps_checked, found.replicas, found.unverified))
    assert summaries[0] == summaries[1]


def spoil(kind: str, **changes: object) -> bytes:
    """A sample event of one kind with some values changed."""
    event = next(event for event in SAMPLES if event["event"] == kind)
    return json.dumps({**event, **changes}).encode()


def spoil_finding(**changes: object) -> bytes:
    """A sample finding with some values changed."""
    event = next(event for event in SAMPLES if event["event"] == "finding")
    return json.dumps({**event, "finding": {**event["finding"], **changes}}).encode()


UNREADABLE = {
    "brackets without end": b"[" * 100_000,
    "nested too deep": spoil("note", more=json.loads("[" * 200 + "]" * 200)),
    "a number with no end": b'{"schema": 1, "event": "note", "step": ' + b"9" * 5000 + b"}",
    "a step beyond all steps": spoil("check", step=10**30),
    "a step that is a truth value": spoil("check", step=True),
    "a time before time": spoil("note", time=-1.0),
    "a time after time": spoil("note", time=1e300),
    "an incarnation that is a list": spoil("note", incarnation=[]),
    "not a number": spoil("check", max_abs=float("nan")),
    "a negative amount": spoil("check", max_abs=-1.0),
    "counts that are text": spoil("check", differing={"param": "many"}),
    "names that are numbers": spoil("start", names=[1, 2]),
    "steps beyond all bounds": spoil("thinned", runs=[[0, 2**52, 1]]),
    "steps beyond all bounds, bit by bit": spoil("thinned", runs=[[0, 2**16, 1]] * 3),
    "steps that go backwards": spoil("thinned", runs=[[5, 1, 1]]),
    "steps that stay where they are": spoil("thinned", runs=[[1, 5, 0]]),
    "steps without a stride": spoil("thinned", runs=[[1, 5]]),
    "steps that are text": spoil("thinned", runs=["1-5"]),
    "a list that is text": spoil("status", unverified="abc"),
    "ranks that are text": spoil_finding(ranks=["0"]),
    "an end before its beginning": spoil_finding(first_step=7, last_step=3),
    "a kind that paints the screen": spoil_finding(kind="\x1b[31mdrift"),
    "an unknown severity": spoil_finding(severity="catastrophe"),
    "camps of nobody": spoil_finding(evidence={"camps_param": [0, 1]}),
    "a spread of text": spoil_finding(evidence={"spread_param": {"differing": 3}}),
}


@pytest.mark.parametrize("line", UNREADABLE.values(), ids=UNREADABLE)
def test_a_line_with_a_wrong_value_costs_itself(tmp_path: Path, line: bytes) -> None:
    """It is counted in a note, and what stands beside it counts."""
    event_file(tmp_path, "tp-0").write_bytes(spoil("check") + b"\n" + line + b"\n")
    summary = summarize(tmp_path)
    assert (summary.verdict, summary.steps_checked) == ("clean", 1)
    assert "events.tp-0.jsonl: 1 unreadable lines were left out" in summary.notes


@pytest.mark.parametrize(
    "line",
    [
        spoil("check", added_later=[1, {"a": None}]),
        b'{"schema": 1, "event": "check", "step": 3}',
        spoil("check", max_abs=None, ratio_hi=None),
        spoil_finding(max_abs=None, added_later="x"),
    ],
)
def test_what_a_newer_version_adds_or_leaves_out_is_no_error(tmp_path: Path, line: bytes) -> None:
    """Further keys, missing ones, and measures that were not finite."""
    event_file(tmp_path, "tp-0").write_bytes(line + b"\n")
    assert not any("unreadable" in note for note in summarize(tmp_path).notes)
    for command in COMMANDS:
        assert say(tmp_path, *command)[0] in {0, 1, 3}


def test_a_directory_that_cannot_be_read_is_an_error_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a traceback about a file."""

    def refuse(_path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    event_file(tmp_path, "tp-0").write_bytes(spoil("check"))
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(RunDirectoryError, match="cannot be read: Permission denied"):
        read_events(tmp_path)


def test_a_large_directory_is_read_in_reasonable_time(tmp_path: Path) -> None:
    """Looking at the type of every value costs microseconds a line."""
    event_file(tmp_path, "tp-0").write_bytes((spoil("check") + b"\n") * 20_000)
    began = time.monotonic()
    read_events(tmp_path)
    assert time.monotonic() - began < 10
