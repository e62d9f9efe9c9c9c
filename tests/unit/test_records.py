"""Records that the stages pass to each other: what they say of themselves, and that JSON loses nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit._samples import finding, plan, step_report
from tpwatch import records
from tpwatch.diagnose.rules import RULES
from tpwatch.records import (
    KINDS,
    SCHEMA,
    SEVERITIES,
    Finding,
    PointSpread,
    ReplicaSpec,
    StepReport,
    Summary,
    WatchPlan,
    worst,
)

steadily = settings(max_examples=100, deadline=None, database=None, derandomize=True)

SILENT = PointSpread(same=True, l2_lo=0.0, l2_hi=0.0, absmax_lo=0.0, absmax_hi=0.0, nonfinite_lo=0, nonfinite_hi=0)


def through_json(value: Any) -> Any:
    """What a reader of the written text gets."""
    return json.loads(json.dumps(value, allow_nan=False))


# ------------------------------------------------------------------------------------------------ plan


def test_grad_numel_is_the_owned_slice() -> None:
    """With the distributed optimizer a rank owns a part of the gradient, or none of it."""
    assert ReplicaSpec("p", (8, 4), "float32", 8, 20, "sum").grad_numel == 12
    assert ReplicaSpec("p", (8, 4), "float32", 8, 8, "sum").grad_numel == 0


def test_a_group_is_named_by_axis_and_first_rank() -> None:
    """Event files of several groups go by it."""
    assert WatchPlan("tp", (4, 5, 6, 7), ()).group == "tp-4"


def test_a_digest_is_the_same_in_every_process() -> None:
    """A hash that depended on the interpreter would make every rank differ; this one is written down."""
    one = WatchPlan("tp", (0, 1), (ReplicaSpec("p", (4,), "float32", 0, 4, "sum"),))
    text = (
        '[{"declared": false, "dtype": "float32", "grad_start": 0, "grad_stop": 4, "name": "p", "rule": "sum",'
        ' "shape": [4]}]'
    )
    assert one.digest == int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def test_what_is_not_watched_does_not_enter_the_digest() -> None:
    """Ranks whose rows agree can exchange buffers, whatever else they left out."""
    assert plan("a", not_watched=(("b", "excluded"),)).digest == plan("a").digest


# ---------------------------------------------------------------------------------------------- silence


def test_silent_is_exactly_zero_everywhere() -> None:
    """One element of one rank, however small, or one that is not finite, breaks the silence."""
    assert SILENT.silent
    assert not dataclasses.replace(SILENT, absmax_hi=5e-324).silent
    assert not dataclasses.replace(SILENT, nonfinite_hi=1).silent


# --------------------------------------------------------------------------------------------- findings


@pytest.mark.parametrize(
    ("role", "severity", "counts"),
    [
        ("cause", "error", True),
        ("cause", "warning", True),
        ("cause", "info", False),
        ("consequence", "error", False),
        ("consequence", "warning", False),
    ],
)
def test_a_run_is_faulty_by_causes_above_information(role: Any, severity: Any, *, counts: bool) -> None:
    """Consequences never count, and neither does information."""
    assert finding(role=role, severity=severity).counts is counts


def test_the_same_fault_has_the_same_key() -> None:
    """Another group, step or rank is not another fault; another kind or parameter is."""
    one = finding()
    assert finding(group="dp", first_step=9, ranks=(2, 3)).key == one.key
    assert finding(kind="drift").key != one.key
    assert finding(parameter="other").key != one.key


plain = st.one_of(
    st.booleans(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False), st.text()
)
facts = st.dictionaries(st.text(), st.recursive(plain, lambda inner: st.lists(inner, max_size=3), max_leaves=6))
ranks = st.lists(st.integers(0, 10**5), max_size=8).map(tuple)
amounts = st.floats(0, allow_nan=False, allow_infinity=False)
found = st.builds(
    Finding,
    kind=st.sampled_from(KINDS),
    code=st.text(),
    parameter=st.text(),
    point=st.sampled_from(["param", "grad_pre", "grad_post"]),
    group=st.text(),
    ranks=ranks,
    first_step=st.integers(0),
    last_step=st.integers(0),
    count=st.integers(1),
    severity=st.sampled_from(SEVERITIES),
    role=st.sampled_from(["cause", "consequence"]),
    caused_by=st.none() | st.text(),
    confidence=st.floats(0, 1),
    observed=st.text(),
    expected=st.text(),
    ratio=st.none() | amounts,
    max_abs=amounts,
    max_rel=amounts,
    odd_ranks=ranks,
    advice=st.text(),
    evidence=facts,
)


@steadily
@given(found)
def test_a_finding_survives_json(one: Finding) -> None:
    """Written as text and read back it is the same finding."""
    assert Finding.from_json(through_json(one.to_json())) == one


@steadily
@given(found, st.dictionaries(st.text(min_size=30), plain, max_size=3))
def test_what_a_newer_version_adds_is_dropped(one: Finding, added: dict[str, Any]) -> None:
    """An older reader understands a newer finding as far as it knows the keys."""
    assert Finding.from_json({**one.to_json(), **added}) == one


def test_a_finding_is_written_in_the_order_of_its_fields() -> None:
    """People read event files."""
    assert list(finding().to_json()) == [f.name for f in dataclasses.fields(Finding)]


# -------------------------------------------------------------------------------- reports and summaries


def test_a_step_report_leaves_its_findings_to_their_own_events() -> None:
    """Everything else is in its JSON."""
    written = through_json(step_report(3, new=(finding(),), phases={"exchange": 0.5}, ratio_lo=1.0).to_json())
    assert set(written) == {f.name for f in dataclasses.fields(StepReport)} - {"new"}
    assert (written["step"], written["phases"], written["ratio_lo"]) == (3, {"exchange": 0.5}, 1.0)


CONTRACT = [
    "schema", "verdict", "steps_checked", "replicas", "findings", "not_exercised", "overhead", "unverified",
    "not_watched", "notes", "groups", "aborted_at",
]  # fmt: skip


def test_a_summary_is_written_as_promised() -> None:
    """The schema version comes first, and every key that other tools read is there."""
    summary = Summary("faults", 30, 42, (finding(),), ("p",), {"step_fraction": 0.01})
    written = through_json(summary.to_json())
    assert list(written)[: len(CONTRACT)] == CONTRACT
    assert written["schema"] == SCHEMA == 1
    assert Finding.from_json(written["findings"][0]) == finding()


def test_causes_of_a_summary_are_those_that_count() -> None:
    """What makes the run faulty, in order."""
    all_of_them = (finding(), finding(severity="info"), finding(role="consequence"), finding(kind="drift"))
    summary = Summary("faults", 1, 1, all_of_them, (), {})
    assert summary.causes == (all_of_them[0], all_of_them[3])


# ------------------------------------------------------------------------------------------ closed lists


@steadily
@given(st.lists(st.sampled_from(SEVERITIES), min_size=1))
def test_worst_is_the_most_severe(severities: list[Any]) -> None:
    """Error before warning before information, in whatever order they come."""
    expected = next(s for s in ("error", "warning", "info") if s in severities)
    assert worst(severities) == expected


def test_every_rule_has_a_kind_of_the_closed_list() -> None:
    """Other tools match on kinds: a rule may not invent one."""
    assert {rule.kind for rule in RULES} <= set(KINDS)
    assert len(set(KINDS)) == len(KINDS)


@pytest.mark.parametrize(
    "record", [r for r in vars(records).values() if dataclasses.is_dataclass(r)], ids=lambda r: r.__name__
)
def test_records_are_frozen_and_slotted(record: type[Any]) -> None:
    """Stages pass them on and keep them: nobody may change one, or hang something onto it."""
    assert record.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert "__slots__" in vars(record)
