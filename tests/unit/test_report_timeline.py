"""The timeline of a run: a difference that was not measured is nowhere shown as 0, and no curve ends because of it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit._report_runs import write_run
from tests.unit._samples import finding, plan, step_report
from tpwatch.cli import main
from tpwatch.records import StepReport
from tpwatch.report.charts import FEW_POINTS, WIDTH, Series, lines
from tpwatch.report.events import read_events
from tpwatch.report.html import render_html
from tpwatch.report.html_parts import POINTS_DRAWN, thinned
from tpwatch.report.live import Lines
from tpwatch.report.summary import UNMEASURED, StepRow, equal_copies, timeline
from tpwatch.report.watching import read_state, step_line

EQUAL = {"param": 0, "grad_post": 2}
APART = {"param": 8, "grad_post": 8}


def equal(step: int) -> StepReport:
    """A check that found all values equal."""
    return step_report(step, differing=EQUAL)


def unmeasured(step: int) -> StepReport:
    """A check that found values to differ and gathered none of them."""
    return step_report(step, differing=APART)


def measured(step: int, by: float = 0.5) -> StepReport:
    """A check that gathered values that differ."""
    return step_report(step, differing=APART, max_abs=by, max_rel=by / 2)


def run_of(directory: Path, *checks: StepReport, first_rank: int = 0) -> Path:
    """A run in which values moved apart."""
    found = [(checks[-1].step, finding(kind="drift", parameter="a", max_abs=0.5, ratio=None))]
    return write_run(directory, plan("a", first_rank=first_rank), checks=checks, findings=found)


def measures(directory: Path) -> list[tuple[float | None, float | None]]:
    """What the timeline has to say of each step."""
    return [(row.max_abs, row.max_rel) for row in timeline(read_events(directory))]


# ------------------------------------------------------------------------------------ measured or not


def test_a_zero_of_values_that_differ_is_no_measure(tmp_path: Path) -> None:
    """Equal values are at a distance of 0; of those that differ and were not gathered nothing is known."""
    run = run_of(tmp_path, equal(1), unmeasured(2), measured(3), unmeasured(4))
    assert measures(run) == [(0.0, 0.0), (None, None), (0.5, 0.25), (None, None)]


def test_a_difference_too_small_for_a_relative_one_was_measured(tmp_path: Path) -> None:
    """All elements may lie below the floor of the relative difference."""
    assert measures(run_of(tmp_path, step_report(1, differing=APART, max_abs=1e-9))) == [(1e-9, 0.0)]


def test_a_difference_beyond_all_bounds_was_measured(tmp_path: Path) -> None:
    """It is written as null, which is not the same as nothing."""
    assert measures(run_of(tmp_path, measured(1, by=math.inf))) == [(math.inf, math.inf)]


@pytest.mark.parametrize(
    ("theirs", "both"),
    [(equal(1), None), (unmeasured(1), None), (measured(1), 0.5)],
    ids=["equal", "apart", "gathered"],
)
def test_a_group_that_measured_nothing_says_nothing_about_the_others(
    tmp_path: Path, theirs: StepReport, both: float | None
) -> None:
    """The largest of what was measured; where one group does not know, the zero of another is no answer."""
    run_of(tmp_path, unmeasured(1))
    run_of(tmp_path, theirs, first_rank=2)
    assert [abs_ for abs_, _ in measures(tmp_path)] == [both]


def test_points_that_share_steps_keep_what_is_not_known() -> None:
    """A step that was measured counts; else one that was not outweighs those that are equal."""
    rows = [StepRow(step, EQUAL, 0.0, 0.0) for step in range(2 * POINTS_DRAWN)]
    rows[10] = StepRow(10, APART, None, None)
    rows[20], rows[21] = StepRow(20, APART, None, None), StepRow(21, APART, 0.5, 0.25)
    at = {row.step: row for row in thinned(rows)}
    assert [(at[step].max_abs, at[step].max_rel) for step in (11, 21, 31)] == [(None, None), (0.5, 0.25), (0.0, 0.0)]


# ------------------------------------------------------------------------------------------ in words


def test_the_text_report_has_a_dash_and_says_what_it_means(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And no such line where everything was measured."""
    main(["report", str(run_of(tmp_path / "sparse", equal(1), unmeasured(2), measured(3)))])
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if re.match(r"  \d ", line)]
    assert rows == [["1", "0", "0", "2", "0", "0"], ["2", "8", "0", "8", "-", "-"], ["3", "8", "0", "8", "0.5", "0.25"]]
    assert f"  -: {UNMEASURED}" in out.splitlines()
    main(["report", str(run_of(tmp_path / "dense", equal(1), measured(2)))])
    assert UNMEASURED not in capsys.readouterr().out


def test_the_report_in_json_has_no_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """But null."""
    main(["report", str(run_of(tmp_path, equal(1), unmeasured(2))), "--format", "json"])
    rows = json.loads(capsys.readouterr().out)["timeline"]
    assert [(row["max_abs"], row["max_rel"]) for row in rows] == [(0.0, 0.0), (None, None)]


def test_a_line_of_progress_says_so_in_words(tmp_path: Path) -> None:
    """There is no table under which a sign could be explained."""
    said: list[str] = []
    state = read_state(run_of(tmp_path, equal(1), unmeasured(2)))
    Lines(said.append).show(state.steps, ())
    assert [line.rsplit(", ", 1)[1] for line in said] == ["max abs 0", "max abs not measured"]
    assert step_line(state, 0.0) == "step 2: 8 values and 8 reduced gradients differ, max abs not measured"


def test_copies_that_could_not_be_measured_are_not_called_equal() -> None:
    """A tensor may be too large to be gathered: that its ranks fall into camps tells."""
    apart = {"camps_param": [[0], [1]]}
    assert equal_copies(finding())
    assert not equal_copies(finding(evidence=apart))
    assert not equal_copies(finding(evidence={"by_group": {"tp-0": {}, "tp-2": apart}}))
    assert not equal_copies(finding(kind="drift"))


# ---------------------------------------------------------------------------------------- in the page


def test_the_page_has_a_dash_and_says_what_it_means(tmp_path: Path) -> None:
    """In the table behind the timeline; the script gets null, and a word for what JSON cannot say."""
    checks = (equal(1), unmeasured(2), measured(3), measured(4, by=math.inf))
    page = render_html(read_events(run_of(tmp_path, *checks)), "a", "0")
    assert "<tr><td>2</td><td>8</td><td>0</td><td>8</td><td>-</td><td>-</td></tr>" in page
    assert f"-: {UNMEASURED}." in page
    data = re.search(r'id="timeline-data">(.*?)</script>', page)
    assert data is not None
    assert [row[3] for row in json.loads(data[1])] == [0.0, None, 0.5, "inf"]


def test_the_page_explains_dots_only_where_there_are_gaps(tmp_path: Path) -> None:
    """Else each step was measured."""
    for name, checks, said in (("sparse", (measured(1), unmeasured(2)), True), ("dense", (measured(1),), False)):
        page = render_html(read_events(run_of(tmp_path / name, *checks)), "a", "0")
        assert ("dots: measured" in page) is said


# ------------------------------------------------------------------------------------------ the curve


def drawn(values: list[float | None], *, log: bool = True) -> dict[str, list[tuple[str, float]]]:
    """Per kind of stroke its commands and where along the chart, in steps from 0 on."""
    chart = lines([Series("s", list(enumerate(values)))], "s", log=log)
    strokes: dict[str, list[tuple[str, float]]] = {"line": [], "dots": []}
    for path, kind in re.findall(r'<path d="([^"]*)" class="(line|dots) solid"', chart):
        moves: list[Any] = re.findall(r"([ML])([\d.]+) ", path)
        strokes[kind] = [(how, round(float(x) * (len(values) - 1) / WIDTH, 1)) for how, x in moves]
    return strokes


LONG: list[float | None] = [1.0] * (FEW_POINTS + 1)
"""More points than are marked one by one."""


def test_a_line_goes_on_over_steps_that_were_not_measured() -> None:
    """From the last that was to the next, each of which is marked, with all behind a gap of their own."""
    strokes = drawn([*LONG, None, None, 2.0, None, 3.0])
    at = len(LONG)
    assert [how for how, _ in strokes["line"]] == ["M"] + ["L"] * (at + 1)
    assert [x for _, x in strokes["line"]][-3:] == [at - 1, at + 2, at + 4]
    assert [x for _, x in strokes["dots"]] == [at - 1, at + 2, at + 4]


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
def test_a_line_breaks_where_a_value_cannot_be_drawn(value: float) -> None:
    """On a log scale 0 is one: copies that are equal again were measured, and no line leads past them."""
    strokes = drawn([*LONG, value, *LONG])
    assert [x for how, x in strokes["line"] if how == "M"] == [0.0, len(LONG) + 1]
    assert strokes["dots"] == []


def test_a_break_outlasts_a_gap() -> None:
    """What was not measured next to a break does not mend it."""
    strokes = drawn([*LONG, 0.0, None, 2.0])
    assert strokes["line"][-1] == ("M", len(LONG) + 2)


def test_a_value_that_stands_alone_is_a_dot() -> None:
    """Between two breaks it has no line."""
    strokes = drawn([*LONG, 0.0, 2.0, 0.0, *LONG])
    assert [x for _, x in strokes["dots"]] == [len(LONG) + 1]


def test_a_line_that_was_measured_throughout_has_no_dots() -> None:
    """Unless it has few points."""
    assert drawn(LONG)["dots"] == []
    assert len(drawn(LONG[1:])["dots"]) == FEW_POINTS


def test_what_was_not_measured_has_no_place_on_the_scale() -> None:
    """Nothing is drawn of nothing, and the scale is that of the measures."""
    assert lines([Series("s", [(1, None), (2, 0.0)])], "s", log=True) == ""
    chart = lines([Series("s", [(1, None), (2, 0.0), (3, 0.5)])], "s", log=True)
    assert '<div class="values"><span>1</span><span>0.1</span></div>' in chart
