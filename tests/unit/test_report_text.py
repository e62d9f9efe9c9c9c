"""The report as people read it: what must be said, and what must not reach a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tests.unit._samples import finding
from tpwatch.errors import printable
from tpwatch.records import Finding, Summary
from tpwatch.report.summary import StepRow
from tpwatch.report.table import number, some, table
from tpwatch.report.text import render, verdict_line


def summary(*findings: Finding, **changes: Any) -> Summary:
    """A run of six checked steps with these findings."""
    values: Mapping[str, Any] = {
        "verdict": "faults" if any(f.counts for f in findings) else "clean",
        "steps_checked": 6,
        "replicas": 12,
        "findings": findings,
        "not_exercised": (),
        "overhead": {},
        "groups": ("tp-0",),
    }
    return Summary(**{**values, **changes})


def text(*findings: Finding, steps: tuple[StepRow, ...] = (), **changes: Any) -> str:
    """The plain report of such a run."""
    return render(summary(*findings, **changes), steps, title="runs/a", color=False)


def line_with(report: str, part: str) -> str:
    """The one line that contains `part`."""
    (line,) = [line for line in report.splitlines() if part in line]
    return line


def test_the_verdict_is_on_top() -> None:
    """The second line answers the question."""
    assert text(finding()).splitlines()[1] == ("Verdict: faults: 1 fault (double-reduce); 6 steps checked, 12 replicas")
    assert text().splitlines()[1] == "Verdict: clean; 6 steps checked, 12 replicas"


def test_one_step_is_not_called_steps() -> None:
    """Numbers agree with their nouns."""
    assert verdict_line(summary(steps_checked=1, replicas=1)) == "clean; 1 step checked, 1 replica"


def test_a_double_reduction_says_why_comparing_copies_cannot_see_it() -> None:
    """The copies agree exactly, and that is the point."""
    report = text(finding(ratio=2.0, max_abs=0.0))
    assert "norm after / before the reduction: 2" in report
    assert "equal on all ranks, max abs difference 0" in report
    assert "comparing copies cannot see it" in report


def test_a_double_reduction_of_copies_that_differ_does_not_claim_they_agree() -> None:
    """Near copies that were summed."""
    report = text(finding(max_abs=0.5))
    assert "comparing copies" not in report
    assert "max abs difference 0.5" in report


def test_a_finding_names_ranks_steps_confidence_and_advice() -> None:
    """What an on-call person needs."""
    seen = finding(ranks=(0, 1, 2, 3), odd_ranks=(3,), first_step=2, evidence={"zero_ranks": [0]})
    report = text(seen)
    assert "ERROR double-reduce [TPW104] decoder.layers.0.input_layernorm.weight" in report
    assert "since step 2, 6 checks up to step 6" in report
    assert "on ranks 0, 1, 2, 3; confidence 0.99" in report
    assert line_with(report, "odd ranks").endswith(": 3")
    assert line_with(report, "exactly zero").endswith("ranks: 0")
    assert "advice: Reduce it once." in report


def test_advice_is_given_once_for_neighbours_of_a_kind() -> None:
    """Seventy parameters of one block need it once."""
    report = text(finding(parameter="a"), finding(parameter="b"))
    assert report.count("advice:") == 1


def test_camps_thresholds_and_absent_ranks_are_shown() -> None:
    """The rest of the evidence that a person can act on."""
    evidence = {
        "camps_param": [[0, 2], [1, 3]],
        "threshold": "max_abs 0.5 > 0.1",
        "absent_ranks": [1],
        "values_elsewhere": "had already moved apart",
    }
    report = text(finding(evidence=evidence))
    assert "camps of equal ranks at param: 0, 2 | 1, 3" in report
    assert "past your threshold: max_abs 0.5 > 0.1" in report
    assert "no gradient on ranks: 1" in report
    assert "hence the lower confidence" in report


def test_ranks_that_all_differ_are_no_camps() -> None:
    """At two ranks they would say nothing."""
    assert "camps" not in text(finding(evidence={"camps_param": [[0], [1]]}))


def test_consequences_stand_in_one_line_below_their_cause() -> None:
    """They are no alarms of their own."""
    follower = finding(kind="drift", role="consequence", caused_by="a")
    followers = [replace(follower, parameter=f"p{i}") for i in range(9)]
    report = text(finding(parameter="a"), *followers)
    assert line_with(report, "consequences").endswith("(9): p0, p1, p2, p3, p4, p5, and 3 more")
    assert "Faults (1)" in report


def test_a_consequence_of_a_cause_elsewhere_is_not_lost() -> None:
    """Its cause may be in the file of another run."""
    report = text(finding(kind="drift", parameter="p", role="consequence", caused_by="gone"))
    assert "Consequences of causes elsewhere" in report
    assert "drift: p" in report


def test_information_is_listed_apart_from_faults() -> None:
    """It does not change the verdict."""
    report = text(finding(severity="info", kind="drift", max_abs=1e-7))
    assert "For information (1)" in report
    assert "Faults" not in report


def test_a_spreading_fault_shows_its_course_per_step() -> None:
    """Count of differing parameters, max abs and max rel."""
    steps = (
        StepRow(1, {"param": 0, "grad_pre": 2, "grad_post": 2}, 0.0, 0.0),
        StepRow(2, {"param": 74, "grad_pre": 70, "grad_post": 71}, 3.1e-5, 0.25),
    )
    report = text(finding(kind="drift", max_abs=3.1e-5), steps=steps)
    row = line_with(report, "3.1e-05  0.25")
    assert row.split() == ["2", "74", "70", "71", "3.1e-05", "0.25"]


def test_a_fault_that_does_not_spread_shows_no_course() -> None:
    """Rows of zeros help nobody."""
    report = text(finding(), steps=(StepRow(1, {"param": 0}, 0.0, 0.0),))
    assert "per step" not in report


def test_a_long_course_is_shortened_in_the_middle() -> None:
    """Both ends of it are what matters."""
    steps = tuple(StepRow(i, {"param": i}, 0.0, 0.0) for i in range(1, 1001))
    report = text(finding(kind="drift", max_abs=1.0), steps=steps)
    assert len(report.splitlines()) < 60
    assert "\n  1 " in report
    assert "\n  1000 " in report
    assert "\n  500 " not in report


def test_what_the_verdict_does_not_cover_is_listed() -> None:
    """Not exercised, unverified, not watched, notes."""
    report = text(
        not_exercised=("lora_A",),
        unverified=("router",),
        not_watched=(("experts.w", "expert parallel"),),
        notes=("started twice",),
        aborted_at=5,
    )
    assert "never seen non-zero (1)\n  lora_A" in report
    assert "which reduction was applied is not known (1)\n  router" in report
    assert "Not watched (1)\n  experts.w: expert parallel" in report
    assert "Notes\n  started twice" in report
    assert "tpwatch stopped the run at step 5." in report


def test_overhead_is_given_in_milliseconds_and_percent() -> None:
    """Of a check, and of a step."""
    cost = {
        "check_seconds_mean": 0.0015,
        "step_fraction": 0.02,
        "collectives_per_check": 2,
        "deep_collectives_per_check": 0.25,
    }
    report = text(overhead=cost)
    assert "1.50 ms a check, 2.00 % of the checked steps; per check 2 collectives, 0.25" in report


def test_control_characters_never_reach_the_terminal() -> None:
    """A parameter name, a note or an advice could otherwise repaint the screen."""
    bad = "a\x1b[31mb\nc\u202e"
    report = render(
        summary(
            finding(parameter=bad, observed=bad, advice=bad),
            not_exercised=(bad,),
            not_watched=((bad, bad),),
            notes=(bad,),
            groups=(bad,),
        ),
        title=bad,
        color=False,
    )
    assert all(line.isprintable() for line in report.splitlines())
    assert r"a\x1b[31mb\nc\u202e" in report


def test_color_is_used_only_when_asked_for() -> None:
    """No escape sequence in plain text; both say the same."""
    colored = render(summary(finding()), title="runs/a", color=True)
    plain = render(summary(finding()), title="runs/a", color=False)
    assert "\x1b" not in plain
    assert "\x1b[31m" in colored
    assert colored.replace("\x1b[31m", "").replace("\x1b[0m", "") == plain


def test_columns_of_a_table_line_up() -> None:
    """Every cell starts below its header."""
    lines = table(("name", "n"), [("a", "1"), ("longer name", "22")])
    assert lines == ["name         n", "-----------  --", "a            1", "longer name  22"]


def test_an_empty_table_has_headers_only() -> None:
    """Nothing found is no crash."""
    assert table(("name", "n"), []) == ["name  n", "----  -"]


def test_a_list_is_shortened_with_the_number_left_out() -> None:
    """And only if something is left out."""
    assert some(["a", "b"], 2) == "a, b"
    assert some(["a", "b", "c"], 2) == "a, b, and 1 more"


def test_printable_text_is_left_alone() -> None:
    """Names in other scripts are names."""
    assert printable("décoder.層.0") == "décoder.層.0"


def test_numbers_are_short() -> None:
    """Four digits are enough for a person."""
    shown = [number(x) for x in (0.0, 2.0, 3.05175e-05, float("inf"))]
    assert shown == ["0", "2", "3.052e-05", "inf"]
