"""What the user asked for, on every rank alike: who is told, how many faults stop a run, what time a check may take."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count, pairwise, repeat
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpwatch
from tests.dist._harness import run_ranks
from tests.dist._parts import ToyAdapter, normal, rig
from tests.dist.test_session import Warnings, attach, checked, notes, partials, stopped_at, toy
from tpwatch import session
from tpwatch.config import Config, Thresholds
from tpwatch.records import Finding
from tpwatch.watch import Watch

Ranks = Callable[..., list[Any]]
Listener = Callable[[Sequence[Finding]], None]

# ------------------------------------------------------------------------------------------ listeners


def train(rank: int, out: str, listeners: list[Listener], knobs: dict[str, Any]) -> tuple[Watch, list[str], int]:
    """Nine steps: `first` is never reduced, `second` not from step 4 on; the watch, warnings, and updates."""
    model, warnings, logger = toy(), Warnings(), logging.getLogger("tpwatch")
    watch = attach(model, out, **knobs)
    for listener in listeners:
        watch.on_finding(listener)
    logger.addHandler(warnings)
    try:
        for step in range(1, 10):
            model.rules = ["none", "none" if step > 3 else "sum", "sum", "sum"]
            model.train(partials(model, rank, step))
    finally:
        logger.removeHandler(warnings)
    return watch, warnings.said, model.updates


def listening(rank: int, out: str, knobs: dict[str, Any]) -> tuple[list[list[str]], list[str], int]:
    """Parameters that a listener was told of, call by call; those recorded; and lines logged."""
    heard: list[list[str]] = []
    watch, said, _ = train(rank, out, [lambda new: heard.append([f.parameter for f in new])], knobs)
    found = [f.parameter for f in watch.findings]
    watch.finish()
    return heard, found, len(said)


BOTH = [["first"], ["second"]]


@pytest.mark.parametrize(
    ("knobs", "heard", "lines"),
    [
        ({"on_fault": "callback"}, BOTH, 0),
        ({"on_fault": "callback", "guard": "deferred"}, BOTH, 0),
        ({"on_fault": "log"}, BOTH, 0),
        ({"on_fault": "warn"}, BOTH, 2),
        ({"on_fault": "callback", "policies": {"*@second": "warn"}}, BOTH, 1),
        ({"on_fault": "warn", "policies": {"*@first": "ignore"}}, [["second"]], 1),
        ({"on_fault": "ignore"}, [], 0),
    ],
    ids=str,
)
def test_a_listener_hears_of_every_finding_once_on_every_rank(
    knobs: dict[str, Any], heard: list[list[str]], lines: int, tmp_path: Path, gloo_ranks: Ranks
) -> None:
    """When it is new and unless it is ignored; the group's first rank logs what is to be logged; all is recorded."""
    results = gloo_ranks(2, listening, str(tmp_path), knobs, timeout=60)
    assert results == [(heard, ["first", "second"], lines), (heard, ["first", "second"], 0)]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert sorted(f["parameter"] for f in summary["findings"]) == ["first", "second"]


def listening_badly(rank: int, out: str, max_errors: int) -> dict[str, Any]:
    """One listener raises every time, the one behind it does not."""
    heard: list[str] = []
    bad = mock.Mock(side_effect=MemoryError("of the listener"))
    knobs = {"on_fault": "callback", "max_errors": max_errors}
    watch, said, updates = train(rank, out, [bad, lambda new: heard.extend(f.parameter for f in new)], knobs)
    result = {"called": bad.call_count, "heard": heard, "errors": watch._guard.errors, "on": watch.enabled}
    watch.finish()
    return result | {"lines": [line for line in said if "listener" in line], "updates": updates}


def test_a_listener_that_raises_is_counted_and_said_once_and_not_passed_on(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """On the rank it raises on; the next listener is told all the same, and training goes on."""
    for result in gloo_ranks(2, listening_badly, str(tmp_path), 3, timeout=60):
        (line,) = result.pop("lines")
        assert line.startswith("tpwatch internal error in a listener (training is not affected")
        assert result == {"called": 2, "heard": ["first", "second"], "errors": 2, "on": True, "updates": 9}


def test_a_listener_that_raises_too_often_ends_the_watching_on_all_ranks(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """As any internal error does, at its limit: off, after the first finding here, and not stopped."""
    for result in gloo_ranks(2, listening_badly, str(tmp_path), 1, timeout=60):
        assert (result["called"], result["on"], result["updates"]) == (1, False, 9)


# ----------------------------------------------------------------------------------------- max_faults


def faulty(rank: int, out: str, groups: int, max_faults: int) -> int:
    """Two parameters in the job are never reduced, over one replica group or one each in two; the step of the stop."""
    world = dist.get_world_size()
    size = world // groups
    members = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    model = toy()
    model.group = members[rank // size]
    model.rules[: 2 // groups] = ["none"] * (2 // groups)
    with mock.patch.object(session, "choose", return_value=ToyAdapter()):
        knobs = {"out": out, "on_fault": "abort", "max_faults": max_faults}
        watch = tpwatch.attach(model, None, knobs, groups={"tp": model.group})
    return stopped_at(watch, model, rank, 6)


@pytest.mark.parametrize("groups", [1, 2], ids=["in one group", "in two groups"])
@pytest.mark.parametrize(("max_faults", "stop"), [(1, 3), (2, 3), (3, 0)], ids=["1", "2 of 2", "2 of 3"])
def test_so_many_faults_stop_the_run_and_no_fewer(
    groups: int, max_faults: int, stop: int, tmp_path: Path, gloo_ranks: Ranks
) -> None:
    """Counted over the whole job; every rank stops at the same step, or none does."""
    world = 2 * groups
    assert gloo_ranks(world, faulty, str(tmp_path), groups, max_faults, timeout=60) == [stop] * world


# ---------------------------------------------------------------------------------------- time budget


def clocked(rank: int, out: str, max_overhead: float) -> list[int]:
    """Train forty steps in which a clock runs for rank 1 only, and only inside tpwatch; the steps that are checked."""
    model = toy()
    watch = attach(model, out, max_overhead=max_overhead)
    monitor = watch.monitor
    assert monitor is not None
    ticks: Iterator[int] = count(1) if rank == 1 else repeat(0)
    monitor.parts = replace(monitor.parts, clock=lambda: float(next(ticks)))
    found = checked(watch, model, rank, range(1, 41))
    watch.finish()
    return found


def test_checks_that_are_too_slow_on_one_rank_become_rarer_on_all(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """Both stretch at the same step, again and again while it is too much, and a note says how far."""
    fast, slow = gloo_ranks(2, clocked, str(tmp_path), 0.01, timeout=60)
    assert fast == slow
    gaps = [after - before for before, after in pairwise(slow)]
    assert gaps == sorted(gaps)
    assert set(gaps) == {1, 2, 4}
    said = [note for note in notes(tmp_path) if "of step time" in note]
    assert len(said) == 2
    assert "more than 1.00% of step time: every 2 steps" in said[0]
    assert "every 4 steps" in said[1]


def test_checks_within_the_budget_stay_as_they_are(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """The same clock and a budget that it keeps to: every step is checked, and nothing said."""
    assert gloo_ranks(2, clocked, str(tmp_path), 1.0, timeout=60) == [list(range(1, 41))] * 2
    assert notes(tmp_path) == []


# ------------------------------------------------------------------------------- floor of a threshold


def floored(rank: int, floor: float) -> float:
    """Copies that differ in one element, 0.125 on one rank and 0.25 on the other; the relative difference reported."""
    value = torch.ones(20)
    value[0] = 0.125 * (rank + 1)
    watched = rig([value], [normal(1, 20)], Config(thresholds=Thresholds(rel_floor=floor)))
    for step in (1, 2, 3):
        watched.step(step)
    return max(report.max_rel for _, report in watched.memo.of("check"))


@pytest.mark.parametrize(("floor", "max_rel"), [(0.25, 0.0), (0.2499, 0.5)])
def test_what_is_no_larger_than_the_floor_has_no_relative_difference(floor: float, max_rel: float) -> None:
    """The larger of the two values decides; one that is as large as `rel_floor` is left out."""
    assert run_ranks(2, floored, floor) == [max_rel] * 2


# ------------------------------------------------------------------------------------------- defaults


def with_defaults(rank: int, out: str, size: int) -> int:
    """One parameter of so many elements, never reduced; no knob is set but the action. The step of the stop."""
    model = toy(["only"], size)
    model.rules = ["none"]
    return stopped_at(attach(model, out, on_fault="abort"), model, rank, 6)


@pytest.mark.parametrize(("size", "stop"), [(1024, 3), (1025, 4)])
def test_by_default_three_checks_decide_and_small_tensors_are_gathered_whole(
    size: int, stop: int, tmp_path: Path, gloo_ranks: Ranks
) -> None:
    """Up to 1,024 elements are compared themselves; beyond it sketches of three gathers must agree, one step later."""
    assert gloo_ranks(2, with_defaults, str(tmp_path), size, timeout=60) == [stop] * 2
