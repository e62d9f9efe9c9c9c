"""Attaching over real gloo processes: everyone watches the same rows, or nobody watches anything."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpwatch
from tests.dist._parts import Gradients, Toy, ToyAdapter, normal
from tpwatch import session
from tpwatch.errors import ConfigError, ReplicaFault
from tpwatch.records import Finding, Rule
from tpwatch.watch import Watch

Ranks = Callable[..., list[Any]]

NAMES = ["first", "second", "third", "fourth"]
TIMEOUT = 20.0


class Warnings(logging.Handler):
    """Collects what the `tpwatch` logger says above information."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message."""
        self.said.append(record.getMessage())


def toy(names: list[str] = NAMES, size: int = 20) -> Toy:
    """Build the same toy on every rank."""
    rules: list[Rule] = ["sum"] * len(names)
    return Toy(list(names), [normal(i, size) for i in range(len(names))], rules)


def attach(model: Toy, out: str, *, fails_in: str = "", **knobs: Any) -> Watch:
    """Attach through the public entry, with the toy's adapter in place of a framework's."""
    knobs = {"out": out, "handshake_timeout": TIMEOUT, **knobs}
    with mock.patch.object(session, "choose", return_value=ToyAdapter(fails_in=fails_in)):
        return tpwatch.attach(model, None, knobs)


def partials(model: Toy, rank: int, step: int) -> Gradients:
    """Gradients that differ between ranks, in the shapes of the model."""
    return [normal(1000 * step + 10 * rank, *p.shape).to(p.dtype) for p in model.parameters]


def stopped_at(watch: Watch, model: Toy, rank: int, steps: int, gradients: Callable[..., Gradients] = partials) -> int:
    """Train so many steps; the step at which the run is stopped, or 0."""
    try:
        for step in range(1, steps + 1):
            model.train(gradients(model, rank, step))
    except ReplicaFault as fault:
        return fault.step
    finally:
        watch.abandon()
    return 0


def counted(model: Toy, steps: Iterable[int]) -> Iterator[int]:
    """The same steps, of which the host says which one is under way."""
    for model.iteration in steps:
        yield model.iteration


def checked(watch: Watch, model: Toy, rank: int, steps: Iterable[int]) -> list[int]:
    """Train these steps; those that are checked."""
    found = []
    for step in steps:
        model.train(partials(model, rank, step))
        if watch.last_report and watch.last_report.step == step:
            found.append(step)
    return found


# ---------------------------------------------------------------------------- plans that differ


def reshape(model: Toy) -> None:
    """Give the second parameter another shape of as many elements."""
    model.parameters[1] = model.parameters[1].view(4, 5)


def recast(model: Toy) -> None:
    """Give the third parameter another dtype."""
    model.parameters[2] = model.parameters[2].bfloat16()


def remark(model: Toy) -> None:
    """Give the fourth parameter another mark."""
    model.rules[3] = "none"


def drop(model: Toy) -> None:
    """Leave out the second parameter."""
    for attribute in (model.names, model.parameters, model.rules):
        del attribute[1]


def add(model: Toy) -> None:
    """Have one parameter more than the others."""
    model.names.append("fifth")
    model.parameters.append(normal(4, 20))
    model.rules.append("sum")


def swap(model: Toy) -> None:
    """Build the middle two in another order."""
    model.names[1:3] = reversed(model.names[1:3])
    model.parameters[1:3] = reversed(model.parameters[1:3])


CHANGES: dict[str, tuple[Callable[[Toy], None], str, str, list[str]]] = {
    "missing": (drop, "second", "missing on rank 1", ["first", "third", "fourth"]),
    "extra": (add, "fifth", "present on rank 1 only", NAMES),
    "order": (swap, "third", "order: rank 1 has it where the leader has second", NAMES),
    "shape": (reshape, "second", "shape: (4, 5) on rank 1, (20,) on the leader", ["first", "third", "fourth"]),
    "dtype": (recast, "third", "dtype: bfloat16 on rank 1, float32 on the leader", ["first", "second", "fourth"]),
    "mark": (remark, "fourth", "rule: none on rank 1, sum on the leader", ["first", "second", "third"]),
}
"""What rank 1 does differently; the first difference, as named; and what is watched all the same."""


def differing(rank: int, change: str, out: str, on_fault: str) -> dict[str, Any]:
    """Train five steps with a model that rank 1 has built differently; `first` is never reduced."""
    model = toy()
    model.rules = ["sum"] * 4
    if rank == 1:
        CHANGES[change][0](model)
    watch = attach(model, out, on_fault=on_fault)
    at_once = [(f.kind, f.parameter, f.observed) for f in watch.findings]
    # The toy's own reduction would pair different tensors too: this is about the watch.
    model.rules = ["none"] * len(model.names)
    for step in range(1, 6):
        model.train(partials(model, rank, step))
    plan = watch.monitor.parts.plan if watch.monitor else None
    result = {
        "enabled": watch.enabled,
        "at_once": at_once,
        "watched": [r.name for r in plan.replicas] if plan else [],
        "named": sorted(f.parameter for f in watch.findings if f.kind == "missing-reduce"),
        "collectives": watch.last_report.collectives if watch.last_report else 0,
    }
    watch.finish()
    return result


@pytest.mark.parametrize("change", list(CHANGES))
def test_a_rank_with_another_plan_is_a_finding_not_a_hang(change: str, tmp_path: Path, gloo_ranks: Ranks) -> None:
    """The first difference is named, and what all ranks have in common is watched as usual."""
    _, parameter, what, common = CHANGES[change]
    for result in gloo_ranks(3, differing, change, str(tmp_path), "warn", timeout=60):
        assert result["enabled"]
        assert result["at_once"] == [("replica-layout", parameter, what)]
        assert result["watched"] == common
        assert result["named"] == sorted(common)
        assert result["collectives"] == 2
    summary = json.loads((tmp_path / "summary.json").read_text())
    layout = [f for f in summary["findings"] if f["kind"] == "replica-layout"]
    assert [(f["parameter"], f["observed"]) for f in layout] == [(parameter, what)]
    assert summary["verdict"] == "faults"


def refused(rank: int, out: str) -> tuple[str, int]:
    """Train a differing model with `on_fault: abort`; what is raised, and updates until then."""
    model = toy()
    if rank == 1:
        drop(model)
    watch = attach(model, out, on_fault="abort")
    try:
        model.train(partials(model, rank, 1))
    except ReplicaFault as stop:
        return f"{stop.findings[0].kind} at step {stop.step}", model.updates
    finally:
        watch.abandon()
    return "nothing", model.updates


def test_abort_stops_on_a_layout_that_differs(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """Before the framework's reduction pairs what does not match, and before the first update."""
    results = gloo_ranks(2, refused, str(tmp_path), timeout=60)
    assert results == [("replica-layout at step 1", 0)] * 2


# --------------------------------------------------------------------- ranks that cannot or will not


def disagreeing(rank: int, how: str, out: str) -> dict[str, Any]:
    """Attach while rank 1 is off, different or broken; then train two steps."""
    warnings = Warnings()
    logger = logging.getLogger("tpwatch")
    logger.addHandler(warnings)
    model, odd, started = toy(), rank == 1, time.monotonic()
    try:
        if how == "version" and odd:
            with mock.patch.object(tpwatch, "__version__", "0.0.odd"):
                watch = attach(model, out)
        elif how == "missing" and odd:
            watch = Watch(tpwatch.Config(), mock.Mock(), reason="never attached")
        elif how == "late" and odd:
            time.sleep(1.0)
            watch = attach(model, out, handshake_timeout=0.5)
        else:
            knobs: dict[str, Any] = {"handshake_timeout": 0.5} if how in ("missing", "late") else {}
            if odd:
                knobs |= {"enabled": {"enabled": False}, "config": {"patience": 7}}.get(how, {})
            fails_in = how if odd and how in ("examine", "source", "install") else ""
            watch = attach(model, out, fails_in=fails_in, **knobs)
    finally:
        logger.removeHandler(warnings)
    waited = time.monotonic() - started
    for step in (1, 2):
        model.train(partials(model, rank, step))
    expected = toy()
    for step in (1, 2):
        everyone = [partials(expected, r, step) for r in range(dist.get_world_size())]
        for i, parameter in enumerate(expected.parameters):
            total = everyone[0][i].clone()
            for other in everyone[1:]:
                total += other[i]
            parameter.sub_(0.01 * total)
    return {
        "enabled": watch.enabled,
        "reason": watch.reason,
        "warnings": len(warnings.said),
        "waited": waited,
        "hooked": model.watch is not None,
        "trained": all(
            torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters, expected.parameters, strict=True)
        ),
    }


REASONS = {
    "enabled": "rank 1: switched off",
    "version": "rank 1 has another version (0.0.odd)",
    "config": "rank 1 has another config",
    "examine": "rank 1: cannot attach: the planted fault of the adapter in examine",
    "source": "rank 1: building: LookupError: the planted fault of the adapter in source",
    "missing": "rank 1 did not answer",
    "late": "rank 1 did not answer",
}


@pytest.mark.parametrize("how", list(REASONS))
def test_one_rank_that_cannot_watch_keeps_all_off(how: str, tmp_path: Path, gloo_ranks: Ranks) -> None:
    """Same reason everywhere, no hook left behind, and training as if tpwatch did not exist."""
    results = gloo_ranks(3, disagreeing, how, str(tmp_path), timeout=60)
    for rank, result in enumerate(results):
        assert not result["enabled"]
        assert not result["hooked"]
        assert result["trained"]
        assert result["waited"] < TIMEOUT
        if not (how == "missing" and rank == 1):
            assert result["reason"].startswith(REASONS[how])
            assert result["reason"] == results[0]["reason"]
    assert results[0]["warnings"] >= 1
    assert results[2]["warnings"] == 0


def test_a_rank_that_cannot_be_hooked_keeps_all_off(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """Wrapping the seams is the last thing that can fail; a rank alone without them is fatal."""
    results = gloo_ranks(3, disagreeing, "install", str(tmp_path), timeout=15)
    assert [(r["enabled"], r["hooked"], r["trained"]) for r in results] == [(False, False, True)] * 3


# ----------------------------------------------------------------------------- a life of a watch


def lives(rank: int, out: str) -> dict[str, Any]:
    """Attach, train, detach, train, attach again, train with a fault."""
    model = toy()
    watch = attach(model, f"{out}/one")
    for step in (1, 2, 3):
        model.train(partials(model, rank, step))
    watch.detach()
    watch.detach()
    first = (watch.enabled, watch.last_step, [f.kind for f in watch.findings], model.watch)
    model.train(partials(model, rank, 4))
    again = attach(model, f"{out}/two", start_step=4)
    model.rules = ["none"] * 4
    for step in (5, 6, 7):
        model.train(partials(model, rank, step))
    again.finish()
    steps = sorted({(f.kind, f.first_step) for f in again.findings})
    return {"first": first, "last": (again.enabled, again.last_step, steps, model.watch)}


def test_attach_detach_attach(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """The second watch starts afresh, counts from where it is told, and lets go again."""
    for result in gloo_ranks(2, lives, str(tmp_path), timeout=60):
        assert result["first"] == (False, 3, [], None)
        assert result["last"] == (False, 7, [("missing-reduce", 5)], None)
    first, second = (json.loads((tmp_path / run / "summary.json").read_text()) for run in ("one", "two"))
    assert (first["verdict"], first["steps_checked"], first["findings"]) == ("clean", 3, [])
    assert (second["verdict"], second["steps_checked"]) == ("faults", 3)


def in_block(rank: int, out: str, ending: str) -> tuple[str, Any, list[str]]:
    """Use the watch as a context manager that ends one way or another."""
    model, raised = toy(), ""
    model.rules = ["none"] * 4
    try:
        with attach(model, out, on_fault="abort" if ending == "fault" else "warn") as watch:
            for step in (1, 2, 3):
                model.train(partials(model, rank, step))
            if ending == "error":
                {}["the planted fault of the script"]
    except (KeyError, ReplicaFault) as error:
        raised = type(error).__name__
    return raised, model.watch, sorted({f.kind for f in watch.findings})


@pytest.mark.parametrize(("ending", "raised"), [("normal", ""), ("error", "KeyError"), ("fault", "ReplicaFault")])
def test_a_block_lets_go_of_the_host_however_it_ends(
    ending: str, raised: str, tmp_path: Path, gloo_ranks: Ranks
) -> None:
    """And what was found until then is kept."""
    for result in gloo_ranks(2, in_block, str(tmp_path), ending, timeout=60):
        assert result == (raised, None, ["missing-reduce"])


def detached(rank: int, out: str) -> list[str]:
    """Three deferred steps with a fault, then a detach: what is known after it."""
    model = toy()
    model.rules = ["none"] * 4
    watch = attach(model, out, guard="deferred")
    for step in (1, 2, 3):
        model.train(partials(model, rank, step))
    watch.detach()
    return sorted({f.kind for f in watch.findings})


def test_detach_reads_the_check_that_is_still_on_its_way(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """Deferred mode loses no verdict at the end of a run."""
    assert gloo_ranks(2, detached, str(tmp_path), timeout=60) == [["missing-reduce"]] * 2


# -------------------------------------------------------------------------------------- stopping


def expected_values(world: int, rank: int, steps: int, rules: list[Rule]) -> list[torch.Tensor]:
    """What the toy's parameters are on `rank` after `steps` steps of its own reduction."""
    model = toy()
    for step in range(1, steps + 1):
        everyone = [partials(model, r, step) for r in range(world)]
        for i, parameter in enumerate(model.parameters):
            parts = [everyone[r][i] for r in (range(world) if rules[i] == "sum" else [rank])]
            parameter.sub_(0.01 * torch.stack([p for p in parts if p is not None]).sum(0))
    return model.parameters


def stopped(rank: int, out: str, knobs: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train with a first parameter that is never reduced; where it stops, and what the values are."""
    model = toy()
    model.rules[0] = "none"
    watch = attach(model, out, **knobs)
    saved: list[int] = []
    watch.save_before_abort(saved.append)
    stop = None
    try:
        for step in range(1, steps + 1):
            model.train(partials(model, rank, step))
    except ReplicaFault as fault:
        stop = fault.step
    expected = expected_values(dist.get_world_size(), rank, model.updates, model.rules)
    result = {
        "stop": stop,
        "updates": model.updates,
        "saved": saved,
        "named": [(f.kind, f.parameter) for f in watch.findings],
        "right": all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters, expected, strict=True)),
    }
    watch.abandon()
    return result


LATE = {"guard": "deferred", "warmup": 3, "interval": 5}


@pytest.mark.parametrize(
    ("knobs", "stop", "saved"),
    [
        ({"on_fault": "abort"}, 3, []),
        ({"on_fault": "abort", "guard": "deferred"}, 4, []),
        ({"on_fault": "checkpoint_then_abort"}, 3, [3]),
        ({"on_fault": "abort", **LATE}, 5, []),
        ({"policies": {"missing-reduce:*": "abort"}}, 3, []),
        ({"on_fault": "warn"}, None, []),
        ({"on_fault": "abort", "max_faults": 2}, None, []),
        ({"on_fault": "abort", "policies": {"*@first": "warn"}}, None, []),
    ],
    ids=str,
)
def test_all_ranks_stop_before_the_same_update(
    knobs: dict[str, Any], stop: int | None, saved: list[int], tmp_path: Path, gloo_ranks: Ranks
) -> None:
    """At the step that the policy says, and until then every update is the framework's own."""
    for result in gloo_ranks(3, stopped, str(tmp_path), knobs, 7, timeout=60):
        assert result["stop"] == stop
        assert result["updates"] == (7 if stop is None else stop - 1)
        assert result["saved"] == saved
        assert result["named"] == [("missing-reduce", "first")]
        assert result["right"]


def one_group_of_two(rank: int, out: str) -> tuple[int, int, list[str]]:
    """Two groups of two ranks; the second alone has a fault: stop, updates, kinds named."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = toy()
    mine, faulty = groups[rank // 2], rank >= 2
    with (
        mock.patch.object(Toy, "finalize", Toy.leave_alone if faulty else Toy.finalize),
        mock.patch.object(session, "choose", return_value=ToyAdapter()),
    ):
        watch = tpwatch.attach(model, None, {"out": out, "on_fault": "abort"}, groups={"tp": mine})
        model.group = mine
        try:
            for step in range(1, 8):
                model.train(partials(model, rank, step))
        except ReplicaFault as stop:
            return stop.step, model.updates, [f.kind for f in watch.findings]
        finally:
            watch.abandon()
    return 0, model.updates, []


def test_a_fault_of_one_group_stops_the_whole_job(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """The healthy group stops with it, at the same step, and has nothing of its own to say."""
    results = gloo_ranks(4, one_group_of_two, str(tmp_path), timeout=60)
    assert results == [(3, 2, [])] * 2 + [(3, 2, ["missing-reduce"] * 4)] * 2


# ------------------------------------------------------------------------------ finalizer protocol


def protocol(rank: int, out: str, what: str) -> dict[str, Any]:
    """Six steps in which the finalizer is skipped, called twice or replaced."""
    model = toy()
    model.rules = ["none"] * 4
    watch = attach(model, out)
    findings: list[list[Finding]] = []
    for step in range(1, 7):
        if what == "replaced" and step == 3:
            model.replaced = True
        finalizes = {"never": 0, "twice": 2}.get(what, 1)
        model.train(partials(model, rank, step), finalizes=finalizes)
        findings.append(watch.findings)
    collectives = watch.monitor.parts.exchange.collectives if watch.monitor else 0
    watch.finish()
    return {
        "named": [sorted({(f.kind, f.first_step) for f in step}) for step in findings],
        "collectives": collectives,
    }


def notes(out: Path) -> list[str]:
    """All notes of the run directory."""
    return list(json.loads((out / "summary.json").read_text())["notes"])


def test_a_finalizer_that_never_runs_is_named(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """At once, and after the patience the replicas are compared one time in its place."""
    for result in gloo_ranks(2, protocol, str(tmp_path), "never", timeout=60):
        assert result["named"][0] == [("finalize-skipped", 1)]
        assert result["collectives"] == 2
    assert any("never called" in note for note in notes(tmp_path))


def test_a_finalizer_that_runs_twice_is_noticed(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """Noted once; both calls are watched."""
    for result in gloo_ranks(2, protocol, str(tmp_path), "twice", timeout=60):
        assert ("missing-reduce", 1) in result["named"][-1]
    assert [n for n in notes(tmp_path) if "2 times in step 1" in n] != []


def test_a_replaced_finalizer_is_watched_again(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """The step of the replacement is lost, and said to be; from the next one on all is as before."""
    for result in gloo_ranks(2, protocol, str(tmp_path), "replaced", timeout=60):
        assert result["named"][1] == result["named"][2] == []
        assert result["named"][3] == [("missing-reduce", 1)]
    assert any("watched again from step 4" in note for note in notes(tmp_path))


def guarded(rank: int, out: str) -> tuple[int, bool]:
    """Train while everything inside the watch fails on rank 1: updates taken, still enabled."""
    model = toy()
    watch = attach(model, out, max_errors=2)
    if rank == 1 and watch.monitor:
        watch.monitor.parts.source.look = mock.Mock(side_effect=MemoryError)  # type: ignore[method-assign]
    for step in range(1, 6):
        model.train(partials(model, rank, step))
    watch.finish()
    return model.updates, watch.enabled


def test_nothing_but_a_replica_fault_gets_out(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """A monitor that fails in every step costs no step of training, on any rank."""
    assert gloo_ranks(2, guarded, str(tmp_path), timeout=60) == [(5, False)] * 2
    assert any("internal error" in note for note in notes(tmp_path))


def out_of_range(_rank: int, out: str, rank: int) -> str:
    """Name a rank that the job of two does not have; the error's text."""
    with pytest.raises(ConfigError) as error:
        attach(toy(), out, wandb={"enabled": True, "rank": rank})
    return str(error.value)


@pytest.mark.parametrize("rank", [2, -3])
def test_the_rank_that_logs_must_be_one_of_the_job(tmp_path: Path, gloo_ranks: Ranks, rank: int) -> None:
    """Else nothing would be logged, and nobody would say so."""
    for said in gloo_ranks(2, out_of_range, str(tmp_path), rank, timeout=60):
        assert f"wandb.rank = {rank}" in said
        assert "job of 2" in said


def alone_in_its_verdict(rank: int, out: str) -> tuple[list[float], int]:
    """A gradient that the framework does not reduce is missing on rank 1, whose verdict fails; the other is reduced."""
    model = toy(NAMES[:2])
    model.rules = ["sum", "none"]
    watch = attach(model, out, on_fault="abort", handshake_timeout=3.0, max_errors=9)
    if rank == 1 and watch.monitor:
        watch.monitor.parts.diagnosis.presence = mock.Mock(side_effect=MemoryError)  # type: ignore[method-assign]
    whole = torch.ones(20)
    try:
        model.train([whole * (rank + 1), None if rank == 1 else whole])
    except ReplicaFault as fault:
        watch.abandon()
        return (model.gradients[0] if model.gradients[0] is not None else whole)[:1].tolist(), fault.step
    watch.abandon()
    return [], 0


def test_a_reduction_is_left_out_by_all_ranks_of_a_group_or_by_none(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """One rank does not know that the run is about to be stopped: its peer has to reduce with it all the same."""
    for reduced, step in gloo_ranks(2, alone_in_its_verdict, str(tmp_path), timeout=60):
        assert (reduced, step) == ([3.0], 1)


def resumed(rank: int, out: str) -> list[int]:
    """The trainer counts from 100; checked steps, with a warm-up of three and every tenth step from then on."""
    model = toy()
    watch = attach(model, out, warmup=3, interval=10)
    found = checked(watch, model, rank, counted(model, range(101, 112)))
    watch.detach()
    return found


def test_a_resumed_run_has_its_warm_up_too(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """That is where faults of loading show."""
    assert gloo_ranks(2, resumed, str(tmp_path), timeout=60) == [[101, 102, 103, 110]] * 2


def captured(rank: int, out: str) -> list[tuple[str, int]]:
    """What is found where the host's reduction goes into a CUDA graph while a check is still on its way."""
    model = toy()
    model.rules[2] = "none"
    watch = attach(model, out, guard="deferred", patience=2)
    for step in (1, 2):
        model.train(partials(model, rank, step))
    watch.captured()
    watch.finish()
    return [(f.parameter, f.first_step) for f in watch.findings]


def test_a_check_under_way_when_the_finalizer_is_captured_is_read_at_the_end(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """Not before: nothing may be waited for while a graph is recorded."""
    assert gloo_ranks(2, captured, str(tmp_path), timeout=60) == [[("third", 1)], [("third", 1)]]
