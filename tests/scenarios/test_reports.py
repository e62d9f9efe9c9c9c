"""Each public report is named as what it was: kind, parameter, first step, role, severity, ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.scenarios._reports import REPORTS, Expected, Report, specs
from tests.unit._builders import Run, watched


def told(report: Report, *, exact: bool = True, lazy: bool = True) -> Run:
    """The run of a report."""
    run = watched(
        *specs(report),
        size=report.size,
        loss_scaler=report.loss_scaler,
        exact=exact,
        leaves_out_settled=lazy,
    )
    for step in range(1, report.steps + 1):
        run.step(*report.story(step).values())
    return run


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_the_fault_is_named(report: Report) -> None:
    """Exactly the faulty parameters have a finding, and it says what the report found out."""
    run = told(report)
    facts = {name: expected.facts for name, expected in report.expected.items()}
    assert {
        f.parameter: Expected(
            f.kind,
            f.first_step,
            f.severity,
            f.role,
            f.caused_by,
            f.odd_ranks,
            {key: f.evidence.get(key) for key in facts.get(f.parameter, {})},
        )
        for f in run.findings
    } == dict(report.expected)
    assert run.diagnosis.not_exercised == report.not_exercised


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_large_tensors_are_named_the_same_a_step_later(report: Report) -> None:
    """Where elements are not gathered, sketches say the same after one more gather."""
    more = replace(report, steps=report.steps + 1)
    assert told(more, exact=False).named == told(more).named


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_all_rows_or_open_ones_lead_to_the_same(report: Report) -> None:
    """Handing over only what changed or is open loses nothing."""
    assert told(report, lazy=False).findings == told(report, lazy=True).findings


def test_slime_is_information_before_it_has_grown() -> None:
    """Four values are a trend; before that, the drift is known but does not make the run faulty."""
    report = REPORTS["slime: linear attention drifts"]
    severities = []
    run = watched(*specs(report))
    for step in range(1, 7):
        run.step(*report.story(step).values())
        severities.append({f.severity for f in run.findings})
    assert severities[:3] == [set(), set(), {"info"}]
    assert severities[-1] == {"warning"}
