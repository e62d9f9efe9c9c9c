"""One checked step over real collectives: what is sent, what is decided, and what a failure costs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from tests.dist._harness import run_ranks
from tests.dist._parts import WHOLE, Gradients, Reduce, averaged, normal, plan_of, rig, summed
from tpwatch.config import Config
from tpwatch.records import Finding


def nothing(_gradients: Gradients) -> None:
    """Reduce nothing."""


def brief(findings: list[Finding]) -> list[tuple[str, str, int]]:
    """Kind, parameter and first step of each finding."""
    return [(f.kind, f.parameter, f.first_step) for f in findings]


# ------------------------------------------------------------------------------------ what is right


def healthy(rank: int) -> tuple[list[Finding], tuple[str, ...], tuple[str, ...]]:
    """Eight steps of copies that are left alone, partials that are summed, and silence."""
    watched = rig([normal(i, 40) for i in range(3)], [None] * 3)
    for step in range(1, 9):
        partial = normal(100 * step + rank, 40)
        watched.source.gradients = [normal(step, 40), partial, torch.zeros(40)]
        watched.step(step, lambda gradients: summed(gradients[1:]))
        for parameter in watched.source.parameters:
            parameter.sub_(0.01)
    diagnosis = watched.monitor.parts.diagnosis
    return watched.findings, diagnosis.not_exercised, diagnosis.unverified


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_a_healthy_group_has_no_findings(world: int) -> None:
    """Copies and summed partials are healthy, and no claim is made about a gradient never seen."""
    for findings, not_exercised, unverified in run_ranks(world, healthy):
        assert findings == []
        assert not_exercised == ("p2",)
        assert unverified == ()


def faulty(rank: int, reduce: Reduce, onset: int) -> list[list[tuple[str, str, int]]]:
    """Partials are summed before step `onset` and then reduced as told; findings after each step."""
    watched = rig([normal(1, 30), normal(2, 30)], [None, None])
    seen = []
    for step in range(1, onset + 4):
        watched.source.gradients = [normal(step, 30), normal(100 * step + rank, 30)]
        watched.step(step, lambda g, s=step: (summed if s < onset else reduce)(g[1:]))
        seen.append(brief(watched.findings))
    return seen


@pytest.mark.parametrize(
    ("reduce", "kind", "onset"),
    [
        (nothing, "missing-reduce", 1),
        (nothing, "missing-reduce", 6),
        (averaged, "averaged-partial", 1),
    ],
)
def test_a_fault_is_named_after_its_patience_with_its_first_step(reduce: Reduce, kind: str, onset: int) -> None:
    """Also in a row that had long been settled as healthy: found in time, dated back to its onset."""
    runs = run_ranks(3, faulty, reduce, onset)
    assert all(seen == runs[0] for seen in runs)
    *before, at_patience, after = runs[0]
    assert before == [[]] * (onset + 1)
    assert at_patience == after == [(kind, "p1", onset)]


def summed_copies(rank: int) -> list[Finding]:
    """Three steps in which a complete gradient is summed once more."""
    del rank
    watched = rig([normal(1, 30)], [None])
    for step in range(1, 4):
        watched.source.gradients = [normal(step, 30)]
        watched.step(step, summed)
    return watched.findings


@pytest.mark.parametrize("world", [2, 4])
def test_summed_copies_are_named_though_all_replicas_agree(world: int) -> None:
    """The factor is the size of the group and the copies are bit-identical."""
    for findings in run_ranks(world, summed_copies):
        (finding,) = findings
        assert (finding.kind, finding.first_step, finding.max_abs) == ("double-reduce", 1, 0.0)
        assert finding.ratio == pytest.approx(world, rel=1e-6)


def values_apart(rank: int) -> list[Finding]:
    """Two steps of a parameter that rank 2 initialised by itself."""
    watched = rig([normal(1, 30), normal(50 if rank == 2 else 2, 30)], [None, None])
    for step in (1, 2):
        watched.source.gradients = [normal(3, 30), normal(4, 30)]
        watched.step(step)
    return watched.findings


def test_the_odd_rank_out_is_named() -> None:
    """Values that differ at the start name the parameter and the rank that the others outvote."""
    for findings in run_ranks(4, values_apart):
        (finding,) = findings
        assert (finding.kind, finding.parameter, finding.first_step) == ("init-mismatch", "p1", 0)
        assert finding.odd_ranks == (2,)
        spread = (normal(50, 30) - normal(2, 30)).abs().max()
        assert finding.max_abs == pytest.approx(float(spread))


# ------------------------------------------------------------------------------------- collectives


def counted(rank: int, count: int, kind: str) -> list[tuple[int, int, int, int]]:
    """Four steps of `count` rows: per step our count, torch's, and the two that the report states."""
    gradients: Gradients = [None] * count
    watched = rig([normal(i, 5) for i in range(count)], gradients)
    rows = []
    for step in range(1, 5):
        same = kind == "copies"
        gradients[:] = [normal(step + i if same else 9999 * rank + i, 5) for i in range(count)]
        if kind == "uneven" and rank == 0:
            gradients[:] = [None] * count
        if kind == "everything" and step > 1:
            for parameter in watched.source.parameters:
                parameter.add_(rank)
        before = watched.exchange.collectives
        with CommDebugMode() as mode:
            watched.step(step)
        report = watched.monitor.last_report
        assert report is not None
        ours = watched.exchange.collectives - before
        rows.append((ours, mode.get_total_counts(), report.collectives, report.deep_collectives))
    return rows


@pytest.mark.parametrize("count", [10, 2000])
def test_a_clean_check_is_two_collectives(count: int, gloo_ranks: Callable[..., Any]) -> None:
    """Two whatever the number of replicas, by our count, by torch's, and in the report."""
    for rows in gloo_ranks(2, counted, count, "copies", timeout=60):
        assert rows == [(2, 2, 2, 0)] * 4


@pytest.mark.parametrize("count", [10, 100])
def test_a_deep_check_adds_at_most_four(count: int, gloo_ranks: Callable[..., Any]) -> None:
    """However many rows are flagged, in values and in gradients, the number stays the same."""
    for rows in gloo_ranks(2, counted, count, "everything", timeout=60):
        assert all(ours == theirs == two + deep for ours, theirs, two, deep in rows)
        assert rows[0][2:] == (2, 0)
        assert [row[2:] for row in rows[2:]] == [(2, 4), (2, 4)]


def test_uneven_presence_adds_one_collective_once(gloo_ranks: Callable[..., Any]) -> None:
    """Which ranks are absent is asked once, for all rows together."""
    for rows in gloo_ranks(2, counted, 50, "uneven", timeout=60):
        assert [row[0] for row in rows] == [3, 2, 2, 2]
        assert all(ours == theirs == two + deep for ours, theirs, two, deep in rows)


def intervals(rank: int) -> list[int]:
    """Collectives of each of nine steps, checked to step 3 and then every fourth."""
    del rank
    watched = rig([normal(1, 5)], [normal(2, 5)], Config(warmup=3, interval=4))
    counts = []
    for step in range(1, 10):
        before = watched.exchange.collectives
        watched.step(step)
        counts.append(watched.exchange.collectives - before)
    return counts


def test_unchecked_steps_cost_no_collective() -> None:
    """Warm-up steps and then every fourth are checked, the others not at all."""
    assert run_ranks(2, intervals) == [[2, 2, 2, 2, 0, 0, 0, 2, 0]] * 2


# ----------------------------------------------------------------------------- a rank that fails


def void_step(rank: int, side: str, guard: str) -> dict[str, Any]:
    """Seven steps; on rank 1 the source fails at step 3, on one side."""
    watched = rig([normal(1, 30), normal(2, 30)], [None, None], Config(guard=guard))
    for step in range(1, 8):
        watched.source.gradients = [normal(step, 30), normal(100 * step + rank, 30)]
        if step == 3 and rank == 1:
            watched.source.failing_looks = 1
            watched.source.looks_before_failing = int(side == "exit")
        watched.step(step, lambda gradients: summed(gradients[1:]))
    watched.monitor.catch_up()
    return {
        "findings": watched.findings,
        "checked": [step for step, _ in watched.memo.of("check")],
        "errors": watched.guard.errors,
        "watching": watched.monitor.watching,
        "unverified": watched.monitor.parts.diagnosis.unverified,
    }


@pytest.mark.parametrize("guard", ["before_update", "deferred"])
@pytest.mark.parametrize("side", ["entry", "exit"])
@pytest.mark.parametrize("world", [2, 4])
def test_a_failing_rank_makes_its_step_void_everywhere(world: int, side: str, guard: str) -> None:
    """Nobody hangs and nobody concludes anything from that step; the next one is as usual."""
    for rank, result in enumerate(run_ranks(world, void_step, side, guard)):
        assert result["findings"] == []
        assert result["checked"] == [1, 2, 4, 5, 6, 7]
        assert result["errors"] == (1 if rank == 1 else 0)
        assert result["watching"]
        assert result["unverified"] == ()


def void_amid_a_fault(rank: int) -> list[list[tuple[str, str, int]]]:
    """A missing reduction from step 1 on; rank 0 fails at step 2."""
    watched = rig([normal(2, 30)], [None])
    seen = []
    for step in range(1, 5):
        watched.source.gradients = [normal(100 * step + rank, 30)]
        watched.source.failing_looks = int(step == 2 and rank == 0)
        watched.step(step)
        seen.append(brief(watched.findings))
    return seen


def test_a_void_step_neither_breaks_nor_continues_a_streak() -> None:
    """The fault is confirmed one step later, with the same first step."""
    expected = [[], [], [], [("missing-reduce", "p0", 1)]]
    assert run_ranks(2, void_amid_a_fault) == [expected] * 2


def unreadable_in_tier_two(rank: int) -> tuple[list[Finding], list[int], int]:
    """Partials left alone; on rank 1 the gradient has another size than the plan says."""
    plan = plan_of([normal(1, 30)])
    watched = rig([normal(1, 30)], [None], plan=plan)
    counts = []
    for step in range(1, 5):
        watched.source.gradients = [normal(10 * step + rank, 31 if rank == 1 else 30)]
        before = watched.exchange.collectives
        watched.step(step)
        counts.append(watched.exchange.collectives - before)
    return watched.findings, counts, watched.guard.errors


def test_a_rank_that_cannot_gather_joins_with_a_void_payload() -> None:
    """All ranks enter the same collectives, and no evidence is drawn from what one could not send."""
    (first, counts, _), (second, other_counts, _) = run_ranks(2, unreadable_in_tier_two)
    assert counts == other_counts
    assert counts == [2, 6, 6, 6]
    assert first == second == []


def unwilling(rank: int) -> tuple[list[int], list[tuple[str, str, int]]]:
    """A missing reduction; in step 2 rank 1 cannot tell what it wants gathered."""
    watched = rig([normal(1, 30)], [None])
    diagnosis = watched.monitor.parts.diagnosis
    counts = []
    for step in range(1, 5):
        watched.source.gradients = [normal(100 * step + rank, 30)]
        broken = mock.patch.object(diagnosis, "wanted", side_effect=ZeroDivisionError)
        before = watched.exchange.collectives
        with broken if step == 2 and rank == 1 else contextlib.nullcontext():
            watched.step(step)
        counts.append(watched.exchange.collectives - before)
    return counts, brief(watched.findings)


def test_ranks_that_want_different_evidence_gather_none() -> None:
    """The header says that the wishes differ: that check does without, the next one has it again."""
    assert run_ranks(2, unwilling) == [([2, 2, 6, 6], [("missing-reduce", "p0", 1)])] * 2


def stopping(rank: int, guard: str) -> dict[str, Any]:
    """Ten steps with three errors allowed; rank 2 fails in each from step 3 on."""
    watched = rig([normal(1, 30)], [normal(2, 30)], Config(max_errors=3, guard=guard))
    stopped = []
    for step in range(1, 11):
        watched.source.failing_looks = int(rank == 2 and step >= 3)
        before = watched.exchange.collectives
        watched.step(step)
        stopped.append(watched.exchange.collectives - before)
    return {
        "collectives": stopped,
        "notes": watched.memo.of("note"),
        "findings": watched.findings,
        "watching": watched.monitor.watching,
    }


@pytest.mark.parametrize("guard", ["before_update", "deferred"])
def test_all_ranks_stop_at_the_same_step_after_too_many_errors(guard: str) -> None:
    """The third error, at step 5, is the end on every rank, with one note and no finding."""
    for result in run_ranks(3, stopping, guard):
        assert result["collectives"] == [2] * 5 + [0] * 5
        assert [step for step, _ in result["notes"]] == [5]
        assert result["findings"] == []
        assert not result["watching"]


def failing_diagnosis(rank: int) -> tuple[list[int], bool]:
    """The diagnosis fails once, on rank 1, at step 2: collectives of each step."""
    watched = rig([normal(1, 30)], [normal(2, 30)])
    counts = []
    for step in range(1, 6):
        if step == 2 and rank == 1:
            watched.monitor.parts.diagnosis._histories = None  # type: ignore[assignment]
        before = watched.exchange.collectives
        watched.step(step)
        counts.append(watched.exchange.collectives - before)
    return counts, watched.monitor.watching


def test_a_failed_diagnosis_takes_all_ranks_off_together() -> None:
    """A rank whose history differs from its peers' could decide on another collective."""
    assert run_ranks(2, failing_diagnosis) == [([2, 2, 2, 0, 0], False)] * 2


class Refusing(logging.Handler):
    """A log handler of the host that chokes on everything."""

    def emit(self, record: logging.LogRecord) -> None:
        """Raise, as a handler should not."""
        raise OSError(record.getMessage())


def announcing(rank: int) -> tuple[list[tuple[str, str, int]], bool, str]:
    """Three steps with a fault that rank 0 will announce."""
    watched = rig([normal(1, 30)], [None])
    for step in range(1, 4):
        watched.source.gradients = [normal(100 * step + rank, 30)]
        watched.step(step)
    return brief(watched.findings), watched.monitor.watching, watched.guard.last_error


def test_a_broken_log_handler_costs_the_line_not_the_run() -> None:
    """Announcing happens on rank 0 alone: a failure there must not part it from its peers."""
    logger, handler = logging.getLogger("tpwatch"), Refusing()
    logger.addHandler(handler)
    try:
        results = run_ranks(2, announcing)
    finally:
        logger.removeHandler(handler)
    assert results == [([("missing-reduce", "p0", 1)], True, "")] * 2


def recording(rank: int) -> tuple[list[tuple[str, str, int]], int]:
    """Five steps with a fault; every write of rank 0 fails."""
    watched = rig([normal(1, 30)], [None], Config(max_errors=100))
    if rank == 0:
        watched.memo.events = None  # type: ignore[assignment]
    for step in range(1, 6):
        watched.source.gradients = [normal(100 * step + rank, 30)]
        watched.step(step)
    return brief(watched.findings), watched.guard.errors


def test_a_full_disk_costs_events_not_findings() -> None:
    """A recorder that fails on the leader leaves the verdicts as they are on every rank."""
    (first, errors), (second, _) = run_ranks(2, recording)
    assert first == second == [("missing-reduce", "p0", 1)]
    assert errors > 0


# --------------------------------------------------------------------------- ranks that do not match


def mismatched(rank: int, what: str) -> dict[str, Any]:
    """Four steps in which rank 1 is at another step, or holds another plan of the same size."""
    parameters = [normal(1, 30), normal(2, 30)]
    plan = plan_of(parameters)
    if what == "plan" and rank == 1:
        plan = replace(plan, replicas=(replace(plan.replicas[0], rule="avg"), *plan.replicas[1:]))
    watched = rig(parameters, [normal(3, 30), normal(4, 30)], plan=plan)
    ahead = int(what == "step" and rank == 1)
    for step in range(1, 5):
        watched.step(step + ahead)
    return {
        "findings": watched.findings,
        "written": [step for step, _ in watched.memo.of("finding")],
        "collectives": watched.exchange.collectives,
    }


@pytest.mark.parametrize("what", ["step", "plan"])
def test_a_header_mismatch_is_a_layout_finding(what: str) -> None:
    """Ranks that are not doing the same are told so, once, and nothing is concluded from the rest."""
    for rank, result in enumerate(run_ranks(3, mismatched, what)):
        (finding,) = result["findings"]
        first = 2 if what == "step" and rank == 1 else 1
        assert finding.kind == "replica-layout"
        assert finding.observed.startswith("step: 1 on one rank, 2" if what == "step" else "plan_")
        assert (finding.first_step, finding.last_step, finding.count) == (first, first + 3, 4)
        assert result["written"] == [first]
        assert result["collectives"] == 8


# -------------------------------------------------------------------------------------- presence


def absent_gradient(rank: int, absent: tuple[int, ...]) -> dict[str, Any]:
    """Three steps without the gradient of p1 on some ranks."""
    watched = rig([normal(1, 30), normal(2, 30)], [None, None])
    said_before, counts, lists = [], [], []
    for step in range(1, 4):
        watched.source.gradients = [normal(step, 30), None if rank in absent else normal(9, 30)]
        before = watched.exchange.collectives

        def framework(gradients: Gradients) -> None:
            del gradients
            said_before.append(len(watched.memo.of("finding")))
            counts.append(watched.exchange.collectives - before)  # noqa: B023 - as above

        watched.step(step, framework)
        lists.append([f.evidence["absent_ranks"] for f in watched.findings])
    finding = watched.findings[0]
    return {
        "said_before": said_before[0],
        "counts": counts,
        "absent": lists,
        "key": (finding.kind, finding.parameter, finding.first_step, finding.last_step),
        "count": finding.count,
        "findings": len(watched.findings),
        "odd": finding.odd_ranks,
    }


@pytest.mark.parametrize("absent", [(1,), (0, 2), (1, 2), (0, 1, 3), (0, 2, 3)])
def test_an_absent_gradient_is_said_before_the_framework_reduces(absent: tuple[int, ...]) -> None:
    """Named with exactly the absent ranks at entry, and it stays so while the fault lasts."""
    for result in run_ranks(4, absent_gradient, absent):
        assert result["said_before"] == 1
        assert result["key"] == ("grad-presence", "p1", 1, 3)
        assert (result["findings"], result["count"]) == (1, 3)
        assert result["absent"] == [[list(absent)]] * 3
        # One exchange and, the first time, one gather: nothing more before the framework's own.
        assert result["counts"] == [2, 1, 1]


def test_the_ranks_outside_a_majority_are_odd() -> None:
    """One absent rank of four is the odd one; of two against two nobody is."""
    assert run_ranks(4, absent_gradient, (3,))[0]["odd"] == (3,)
    assert run_ranks(4, absent_gradient, (1, 3))[0]["odd"] == ()


def moving_absence(rank: int) -> list[Any]:
    """The gradient is absent on rank 1, then on rank 3, then nowhere."""
    watched = rig([normal(1, 30)], [None])
    named = []
    for step, absent in enumerate((1, 3, None, None), start=1):
        watched.source.gradients = [None if rank == absent else normal(step, 30)]
        watched.step(step)
        (finding,) = watched.findings
        named.append((finding.evidence["absent_ranks"], finding.last_step))
    return named


def test_absence_that_moves_to_another_rank_is_followed() -> None:
    """The evidence names the rank that is absent now; a recovered gradient ends the count."""
    expected = [([1], 1), ([3], 2), ([3], 2), ([3], 2)]
    assert run_ranks(4, moving_absence) == [expected] * 4


# ----------------------------------------------------------------------------- asking for a stop


def asking(rank: int, fault: str, on_fault: str) -> dict[str, Any]:
    """Five steps under `on_fault`: what asks for a stop before and after each reduction."""
    watched = rig([normal(1, 30)], [None], Config(on_fault=on_fault))
    before, after = [], []
    for step in range(1, 6):
        absent = fault == "presence" and rank == 1
        watched.source.gradients = [None if absent else normal(100 * step + rank, 30)]
        watched.step(step, lambda _g: before.append([f.kind for f in watched.monitor.stopping]))
        after.append([f.kind for f in watched.monitor.stopping])
    return {"before": before, "after": after, "written": watched.memo.of("finding")}


@pytest.mark.parametrize(
    ("fault", "kind", "before", "after"),
    [("presence", "grad-presence", 1, 1), ("unreduced", "missing-reduce", 4, 3)],
)
def test_a_fault_asks_for_a_stop_on_all_ranks_at_the_same_step(fault: str, kind: str, before: int, after: int) -> None:
    """Uneven presence asks before the framework's reduction could hang."""
    for result in run_ranks(4, asking, fault, "abort"):
        assert result["before"] == [[kind] if step >= before else [] for step in range(1, 6)]
        assert result["after"] == [[kind] if step >= after else [] for step in range(1, 6)]


@pytest.mark.parametrize("on_fault", ["warn", "log"])
@pytest.mark.parametrize("fault", ["presence", "unreduced"])
def test_nothing_asks_for_a_stop_unless_the_user_does(fault: str, on_fault: str) -> None:
    """The same faults only get written down."""
    for result in run_ranks(2, asking, fault, on_fault):
        assert result["before"] == result["after"] == [[]] * 5
        assert result["written"] != []


# ------------------------------------------------------------------------------- odd tensors

ODD: dict[str, Callable[[int], torch.Tensor]] = {
    "nan": lambda rank: torch.tensor([float("nan"), 1.0, 2.0 + rank]),
    "inf": lambda rank: torch.tensor([float("inf"), -float("inf"), 2.0 + rank]),
    "all-nan": lambda _rank: torch.full((7,), float("nan"), dtype=torch.float16),
    "huge": lambda rank: torch.full((5,), 1e308 - rank * 1e300, dtype=torch.float64),
    "minus-zero": lambda _rank: torch.tensor([-0.0, 0.0]),
    "empty": lambda _rank: torch.zeros(0),
    "empty-matrix": lambda _rank: torch.zeros(0, 4, dtype=torch.bfloat16),
    "transposed": lambda rank: normal(rank, 7, 5).T,
    "strided": lambda rank: normal(rank, 40)[::3],
    "scalar": lambda rank: normal(rank).squeeze(),
    "float8": lambda rank: normal(rank, 33).to(torch.float8_e4m3fn),
    "integer": lambda rank: torch.arange(rank, rank + 9),
}
"""Tensors that differ by rank, or hold what must not enter MAX."""


def odd_tensors(rank: int, fingerprint: str) -> dict[str, Any]:
    """Three steps of every odd tensor as parameter and as gradient."""
    tensors = [build(rank) for build in ODD.values()]
    gradients: Gradients = list(tensors)
    for i, tensor in enumerate(tensors):
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1:
            gradients[i] = normal(rank, *tensor.shape)
    watched = rig(tensors, gradients, Config(fingerprint=fingerprint))
    for step in range(1, 4):
        watched.step(step)
    buffers = watched.monitor._buffers
    return {
        "finite": bool(buffers.entry.isfinite().all() and buffers.exit.isfinite().all()),
        "errors": watched.guard.last_error,
        "named": {f.parameter: f.kind for f in watched.findings},
        "differing": watched.monitor.last_report.differing if watched.monitor.last_report else None,
    }


@pytest.mark.parametrize("fingerprint", ["auto", "reference"])
def test_buffers_are_finite_whatever_the_tensors(fingerprint: str) -> None:
    """No NaN or Inf of a tensor gets into a MAX, and none of these tensors is an internal error."""
    names = {f"p{i}": name for i, name in enumerate(ODD)}
    same = {"all-nan", "minus-zero", "empty", "empty-matrix"}
    for result in run_ranks(2, odd_tensors, fingerprint):
        assert result["finite"]
        assert result["errors"] == ""
        # All values that differ by rank are seen to differ, also behind NaN, Inf and strides.
        apart = {names[p] for p, kind in result["named"].items() if kind == "init-mismatch"}
        assert apart == set(ODD) - same
        assert {names[p] for p, kind in result["named"].items() if kind == "nonfinite"} == {"all-nan"}


def minus_zero(rank: int) -> dict[str, int]:
    """One step of a parameter that is -0.0 on rank 1 and 0.0 elsewhere."""
    watched = rig([torch.tensor([-0.0 if rank == 1 else 0.0, 1.0])], [torch.ones(2)])
    watched.step(1)
    report = watched.monitor.last_report
    return dict(report.differing) if report else {}


def test_minus_zero_is_not_bit_identical_to_zero() -> None:
    """The copies compare equal as numbers; their bits do not, and bits are what a copy is."""
    assert run_ranks(2, minus_zero) == [{"param": 1, "grad_pre": 0, "grad_post": 0}] * 2


def layouts(rank: int) -> dict[str, int]:
    """One step of equal values in different memory layouts."""
    matrix = normal(1, 6, 4)
    watched = rig([matrix if rank else matrix.T.contiguous().T], [torch.ones(24)])
    watched.step(1)
    report = watched.monitor.last_report
    return dict(report.differing) if report else {}


def test_equal_values_in_another_memory_layout_are_equal() -> None:
    """A non-contiguous copy is a copy: logical order counts, strides do not."""
    assert run_ranks(2, layouts) == [{"param": 0, "grad_pre": 0, "grad_post": 0}] * 2


# ------------------------------------------------------------------------------ values on their own


def values_only(rank: int) -> dict[str, Any]:
    """Two steps, then rank 1 overwrites a value, then a comparison of values alone."""
    watched = rig([normal(1, 30), normal(2, 30)], [normal(3, 30), normal(4, 30)])
    for step in (1, 2):
        watched.step(step)
    if rank == 1:
        watched.source.parameters[1][0] += 1
    before = watched.exchange.collectives
    watched.monitor.check_values(2)
    report = watched.monitor.last_report
    return {
        "collectives": watched.exchange.collectives - before,
        "call": report.call if report else None,
        "differing": dict(report.differing) if report else {},
        "findings": watched.findings,
    }


def test_values_alone_are_one_collective() -> None:
    """A comparison outside a step sees what differs; one look is not enough to call it a fault."""
    for result in run_ranks(2, values_only):
        assert (result["collectives"], result["call"]) == (1, 0)
        assert result["differing"] == {"param": 1}
        assert result["findings"] == []


def values_between(rank: int, reduce: Reduce, when: int) -> list[tuple[str, str, int]]:
    """Six steps of a large and a small partial, with a comparison of values after step `when`."""
    watched = rig([normal(1, 30), normal(2, 3000)], [None, None])
    for step in range(1, 7):
        watched.source.gradients = [normal(step + 50 * rank, 30), normal(step + 70 * rank, 3000)]
        watched.step(step, reduce)
        if step == when:
            watched.monitor.check_values(step)
    return sorted(brief(watched.findings))


@pytest.mark.parametrize("when", [1, 2, 3])
@pytest.mark.parametrize(("reduce", "kind"), [(nothing, "missing-reduce"), (averaged, "averaged-partial")])
def test_a_comparison_of_values_hides_no_fault(reduce: Reduce, kind: str, when: int) -> None:
    """A check before a save, while a fault is still being confirmed, changes nothing about it."""
    expected = [(kind, "p0", 1), (kind, "p1", 1)]
    assert run_ranks(2, values_between, reduce, when) == [expected] * 2


def second_call(rank: int) -> list[tuple[str, str, int]]:
    """Three steps in which the finalizer runs twice: the second call sums what is complete."""
    watched = rig([normal(1, 30)], [None])
    for step in range(1, 4):
        watched.source.gradients = [normal(100 * step + rank, 30)]
        watched.step(step, summed)
        watched.monitor.before_reduction(step, 2, WHOLE)
        summed(watched.source.gradients)
        watched.monitor.after_reduction()
    return brief(watched.findings)


def test_a_second_finalizer_call_is_judged_by_what_it_does() -> None:
    """The first sum of partials is right, the second is one too many."""
    assert run_ranks(2, second_call) == [[("double-reduce", "p0", 1)]] * 2


# ----------------------------------------------------- failures behind a collective, and for lack of memory


def failing(rank: int, what: str, at: tuple[int, ...], guard: str = "auto") -> tuple[list[int], int, bool]:
    """A missing reduction, so that tier 2 gathers; in some steps `what` fails on rank 1. Collectives by step."""
    watched = rig([normal(1, 30)], [None], Config(guard=guard))  # type: ignore[arg-type]
    places = {"reading back": (watched.monitor._readback, "start"), "memory": (watched.monitor._explainer, "_side")}
    counts = []
    for step in range(1, 9):
        watched.source.gradients = [normal(100 * step + rank, 30)]
        broken = mock.patch.object(*places[what], side_effect=MemoryError)
        before = watched.exchange.collectives
        with broken if step in at and rank == 1 else contextlib.nullcontext():
            watched.step(step)
        counts.append(watched.exchange.collectives - before)
    return counts, watched.guard.errors, watched.monitor.watching


def failing_exit(rank: int, then: bool) -> tuple[list[int], bool]:  # noqa: FBT001 - an argument of a rank
    """As above, on the exit side of step 3 alone, and, if `then`, at every read-back after it."""
    watched = rig([normal(1, 30)], [None])
    readback = watched.monitor._readback
    start, calls, counts = readback.start, [], []

    def flaky(buffer: torch.Tensor) -> Any:
        calls.append(buffer)
        if rank == 1 and (len(calls) == 6 or (then and len(calls) > 6)):
            raise MemoryError
        return start(buffer)

    with mock.patch.object(readback, "start", flaky):
        for step in range(1, 9):
            watched.source.gradients = [normal(100 * step + rank, 30)]
            before = watched.exchange.collectives
            watched.step(step)
            counts.append(watched.exchange.collectives - before)
    return counts, watched.monitor.watching


@pytest.mark.parametrize("guard", ["before_update", "deferred"])
@pytest.mark.parametrize("at", [(3,), (3, 4, 5, 6, 7, 8)])
def test_a_rank_that_cannot_read_what_came_back_takes_all_off_together(guard: str, at: tuple[int, ...]) -> None:
    """It knows less than its peers from then on: no rank is left waiting, in that step or later, once or for good."""
    (counts, _, watching), (others, errors, others_watching) = run_ranks(2, failing, "reading back", at, guard)
    assert counts == others
    assert counts[4:] == [0, 0, 0, 0]
    assert (watching, others_watching, errors > 0) == (False, False, True)


@pytest.mark.parametrize("then", [False, True])
def test_the_exit_side_alone_may_be_the_one_that_cannot_be_read(then: bool) -> None:  # noqa: FBT001 - parametrised
    """The next entry says so to everyone, and whoever cannot read that knows what it said."""
    (counts, watching), (others, others_watching) = run_ranks(2, failing_exit, then)
    assert counts == others
    assert counts[4:] == [0, 0, 0, 0]
    assert (watching, others_watching) == (False, False)


def test_without_memory_for_it_nobody_gathers() -> None:
    """The rank that has none says so before anyone waits for it; one check is void and the next is as before."""
    (counts, errors, watching), (others, other_errors, others_watching) = run_ranks(2, failing, "memory", (3,))
    assert counts == others
    assert counts[1:4] == [6, 2, 6]
    assert (errors, other_errors, watching, others_watching) == (0, 1, True, True)


def presence_comes_back(rank: int) -> list[str]:
    """A parameter is frozen in step 3 on every rank; then rank 1 cannot work out its flags; then all is as before."""
    watched = rig([normal(1, 30), normal(2, 30)], [None, None])
    for step in range(1, 8):
        both = [normal(step, 30), normal(step + 50, 30)]
        watched.source.gradients = [both[0], None] if step == 3 else [*both]
        broken = mock.patch("tpwatch.presence.presence_flags", side_effect=MemoryError)
        with broken if step == 3 and rank == 1 else contextlib.nullcontext():
            watched.step(step)
    return [f.kind for f in watched.findings]


def test_flags_that_could_not_be_worked_out_are_not_remembered() -> None:
    """Half of them would say, from the next step on, that gradients are missing which are all there."""
    assert run_ranks(2, presence_comes_back) == [[], []]
