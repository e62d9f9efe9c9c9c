"""One rank fails, or knows less than its peers, right in front of a collective: nobody is left alone in it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpwatch
from tests.dist._harness import run_ranks
from tests.dist._parts import Gradients, Toy, ToyAdapter, normal, rig, summed
from tests.dist.test_session import attach, counted, partials, stopped_at, toy
from tpwatch import handshake, job, session
from tpwatch.config import Config
from tpwatch.errors import ReplicaFault
from tpwatch.gate import Gate

Ranks = Callable[..., list[Any]]
SHORT = 2.0
"""Seconds that ranks wait in the store for one that does not come."""


# ------------------------------------------------------------------------------- meetings of the job


def meetings(rank: int, out: str, trainable: list[int]) -> list[int]:
    """Steps at which each rank of a resumed run meets the job; only the groups in `trainable` have replicas."""
    model = toy()
    watch = {} if rank in trainable else {"include": ["nothing"]}
    watching = attach(model, out, on_fault="abort", warmup=3, interval=10, watch=watch)
    met = []
    real = watching._stop._job.meet  # type: ignore[union-attr]
    watching._stop._job.meet = lambda step, *rest: (met.append(step), real(step, *rest))[1]  # type: ignore[union-attr]
    for step in counted(model, range(101, 125)):
        model.train(partials(model, rank, step))
    watching.abandon()
    return met


@pytest.mark.parametrize("trainable", [[0, 1], []], ids=["watched", "nothing to watch"])
def test_groups_with_nothing_to_watch_meet_at_the_same_steps(
    trainable: list[int], tmp_path: Path, gloo_ranks: Ranks
) -> None:
    """Whether a step has a meeting depends on configuration and step number, not on what a group has to watch."""
    steps = [101, 102, 103, 110, 120]
    assert gloo_ranks(2, meetings, str(tmp_path), trainable, timeout=60) == [steps, steps]


def say_nothing(rank: int, out: str) -> list[int]:
    """The steps that both ranks end, where one cannot put its word into the vector at the second."""
    model, ended = toy(), []
    watch = attach(model, out, on_fault="abort")
    real = job.Job._fill

    def fails(self: job.Job, word: job.Word) -> None:
        if rank == 1 and model.updates == 1:
            raise MemoryError
        real(self, word)

    with mock.patch.object(job.Job, "_fill", fails):
        for step in range(1, 5):
            model.train(partials(model, rank, step))
            ended.append(step)
    watch.abandon()
    return ended


def test_a_word_that_cannot_be_said_is_missed_by_nobody(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """The rank comes to the meeting all the same: it is a collective over the whole job."""
    assert gloo_ranks(2, say_nothing, str(tmp_path), timeout=30) == [[1, 2, 3, 4]] * 2


def telling(rank: int, out: str) -> tuple[list[int], list[int], dict[str, int]]:
    """A job that nothing can stop: step of the view after each step, steps waited in, and the last counts."""
    model, waited = toy(), []
    model.rules[2] = "none"
    watch = attach(model, out, job_wide=True, patience=2)
    stop = watch._stop
    assert stop is not None
    real = stop._job.meet
    stop._job.meet = lambda *word: (waited.append(word[0]), real(*word))[1]  # type: ignore[method-assign]
    heard = []
    for step in range(1, 5):
        model.train(partials(model, rank, step))
        heard.append(watch.job_view.step if watch.job_view else 0)
    watch.finish()
    view = watch.job_view
    return [*heard, view.step if view else 0], waited, dict(view.counts) if view else {}


def test_a_meeting_that_only_tells_is_waited_for_by_nobody(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """It is heard at the next one, and the last one at the end."""
    expected = ([0, 1, 2, 3, 4], [], {"missing-reduce": 1})
    assert gloo_ranks(2, telling, str(tmp_path), timeout=40) == [expected, expected]


def leader_fails(rank: int, out: str) -> tuple[str, int]:
    """How a run ends whose fault the leader of the group cannot judge."""
    model = toy()
    model.rules = ["none"] * 4
    watch = attach(model, out, on_fault="abort", max_errors=9)
    monitor = watch.monitor
    assert monitor is not None
    real = monitor._observe

    def observe(check: Any, *rest: Any) -> Any:
        if rank == 0 and check.at.step == 3:
            raise MemoryError
        return real(check, *rest)

    monitor._observe = observe  # type: ignore[method-assign]
    try:
        for step in range(1, 9):
            model.train(partials(model, rank, step))
    except ReplicaFault as fault:
        return "stopped", fault.step
    finally:
        watch.abandon()
    return "not stopped", watch.last_step


def test_a_stop_does_not_depend_on_the_leader_alone(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """Whoever has confirmed the fault can ask for the stop."""
    assert gloo_ranks(2, leader_fails, str(tmp_path), timeout=40) == [("stopped", 3)] * 2


# ------------------------------------------------------------------------------------ checks of a group


def slow(rank: int, failing: int) -> tuple[list[int], int, int]:
    """Collectives a step while checks are too slow, steps where the gradients were summed, and the interval.

    The verdict of rank `failing` fails in the check that would stretch it.
    """
    config = Config(max_overhead=1e-9, warmup=0, handshake_timeout=SHORT)
    watched, counts, right = rig([normal(1, 30)], [None], config), [], 0
    monitor = watched.monitor
    for step in range(2, 19):
        watched.source.gradients = [normal(100 * step + rank, 30)]
        if rank == failing and monitor.pace.slow:
            monitor._observe = mock.Mock(side_effect=MemoryError)  # type: ignore[method-assign]
        before = watched.exchange.collectives
        watched.step(step, summed)
        counts.append(watched.exchange.collectives - before)
        expected = normal(100 * step, 30) + normal(100 * step + 1, 30)
        right += torch.allclose(watched.source.gradients[0], expected)  # type: ignore[arg-type]
    return counts, right, monitor.pace.interval


def test_the_interval_is_stretched_on_all_ranks_or_none() -> None:
    """The rank whose verdict failed does not know of it: its peers stay with it, and all go off together."""
    (one, right, interval), (other, right_too, interval_too) = run_ranks(2, slow, 1, timeout=20)
    assert one == other
    assert one[-4:] == [0, 0, 0, 0]
    assert right == right_too == len(one)
    assert interval == interval_too == 1


def test_the_interval_is_stretched_where_all_agree() -> None:
    """The counterpart: from the ninth check on, every second step."""
    (one, right, interval), other = run_ranks(2, slow, -1, timeout=20)
    assert (one, right, interval) == other
    assert interval > 1
    assert 0 in one
    assert right == len(one)


def unread(rank: int) -> list[int]:
    """Collectives a step; at the second, one rank has no gradient and the other cannot read that."""
    watched = rig([normal(1, 30), normal(2, 30)], [None, None], Config(handshake_timeout=SHORT))
    counts = []
    for step in range(1, 5):
        absent = rank == 0 and step == 2
        watched.source.gradients = [normal(100 * step + rank, 30), None if absent else normal(step, 30)]
        broken = mock.patch.object(watched.monitor._readback, "start", side_effect=MemoryError)
        before = watched.exchange.collectives
        if rank == 1 and step == 2:
            with broken:
                watched.monitor.before_reduction(step, 1, frozenset({0}))
            summed(watched.source.gradients[:1])
            watched.monitor.after_reduction()
        else:
            watched.step(step, lambda gradients: summed(gradients[:1]))
        counts.append(watched.exchange.collectives - before)
    return counts


def test_absent_ranks_are_asked_for_by_all_or_none() -> None:
    """A rank that could not read the entry side knows of no absence: there is no gather, and all go off together."""
    one, other = run_ranks(2, unread, timeout=20)
    assert one == other
    assert one[1] == 4  # two sides with what the first parameter's verdict needs behind each: not the fifth
    assert one[-1] == 0


def void(rank: int) -> list[bool]:
    """Whether a rank watches after each step; in the second, one can neither seal the exit side nor read it back."""
    watched = rig([normal(1, 30)], [None])
    monitor, on = watched.monitor, []
    for step in range(1, 5):
        watched.source.gradients = [normal(9 * step + rank, 30)]
        monitor.before_reduction(step, 1, frozenset({0}))
        summed(watched.source.gradients)
        with ExitStack() as broken:
            if rank == 1 and step == 2:
                broken.enter_context(mock.patch.object(monitor._buffers, "seal", side_effect=MemoryError))
                broken.enter_context(mock.patch.object(monitor._readback, "start", side_effect=MemoryError))
            monitor.after_reduction()
        monitor.end_of_step()
        on.append(monitor.watching)
    return on


def test_a_rank_that_has_said_that_it_is_off_is_off() -> None:
    """Also where it could not read its own word back."""
    one, other = run_ranks(2, void, timeout=20)
    assert one == other == [True, False, False, False]


def load(rank: int, raises: int) -> int:
    """Collectives of a checkpoint's load that raises on one rank and is caught there."""
    watched = rig([normal(1, 30)], [None])
    gate = Gate(watched.monitor, None, Config(checkpoint="warn", handshake_timeout=SHORT), watched.guard)
    with suppress(KeyError), gate.loading(1):
        _ = {rank: "the optimizer state of this rank"}[rank if rank != raises else -1]
    return watched.exchange.collectives


@pytest.mark.parametrize(("raises", "compared"), [(0, 1), (1, 1), (-1, 2)])
def test_a_load_that_fails_on_one_rank_is_compared_on_none(raises: int, compared: int) -> None:
    """Before it on all, behind it only if all come there."""
    assert run_ranks(2, load, raises, timeout=15) == [compared, compared]


# --------------------------------------------------------------------------------- around training


def goes_on(rank: int, out: str) -> list[str]:
    """A trainer that catches the fault of every step and goes on; what was done to the gradients of each update."""
    model = toy()
    model.rules = ["sum", "sum", "sum", "none"]
    watch = attach(model, out, on_fault="abort", patience=2)
    log = []
    for step in range(1, 7):
        with mock.patch.object(Toy, "finalize", autospec=True) as finalize:
            try:
                model.train(partials(model, rank, step))
                log.append("updated" if finalize.called else "updated with what was not reduced")
            except ReplicaFault:
                log.append("fault")
    watch.abandon()
    return log


def test_a_trainer_that_catches_the_fault_is_told_again_at_every_step(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """No update is ever made from gradients whose reduction tpwatch has left out."""
    expected = ["updated", *["fault"] * 5]
    assert gloo_ranks(2, goes_on, str(tmp_path), timeout=60) == [expected, expected]


def tries_again(rank: int, out: str) -> list[str]:
    """What is found where the optimizer's step is tried again after each fault."""
    model = toy()
    watch = attach(model, out, on_fault="abort", patience=2)
    model.rules[2] = "none"
    for step in range(1, 4):
        with suppress(ReplicaFault):
            model.train(partials(model, rank, step))
            continue
        for _ in range(3):
            with suppress(ReplicaFault):
                watch.gradients_ready()
    watch.abandon()
    return [f.kind for f in watch.findings]


def test_a_step_that_is_tried_again_has_not_skipped_its_finalizer(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """It ran before the first try."""
    assert gloo_ranks(2, tries_again, str(tmp_path), timeout=60) == [["missing-reduce"]] * 2


def left_out(rank: int, out: str) -> tuple[int, list[tuple[str, str, int]]]:
    """The step of the stop, and what was found, where a gradient is missing on one rank in the second step."""
    model = toy()
    model.rules = ["sum", "sum", "sum", "none"]
    watch = attach(model, out, on_fault="abort", patience=1, policies={"missing-reduce:*": "warn"})
    stopped = 0
    try:
        for step in range(1, 5):
            gradients = partials(model, rank, step)
            gradients[3] = None if step == 2 and rank == 1 else normal(step, 20)
            model.train(gradients)
    except ReplicaFault as fault:
        stopped = fault.step
    watch.abandon()
    return stopped, [(f.kind, f.parameter, f.first_step) for f in watch.findings]


def test_a_reduction_that_was_left_out_is_not_judged(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """What tpwatch itself has prevented is no fault of the framework."""
    expected = (2, [("grad-presence", "fourth", 2)])
    assert gloo_ranks(2, left_out, str(tmp_path), timeout=60) == [expected, expected]


def uneven(rank: int, out: str, max_faults: int) -> int:
    """The step at which a run stops whose second step has a gradient on one rank only."""
    model = toy()

    def gradients(model: Toy, rank: int, step: int) -> Gradients:
        whole = partials(model, rank, step)
        return [*whole[:3], None] if step == 2 and rank == 1 else whole

    return stopped_at(attach(model, out, on_fault="abort", max_faults=max_faults), model, rank, 4, gradients)


def test_what_training_does_not_survive_is_not_counted(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """Whatever `max_faults`: the framework's reduction would hang on a gradient that one rank does not have."""
    assert gloo_ranks(2, uneven, str(tmp_path), 5, timeout=40) == [2, 2]


def never_finalized(rank: int, out: str, interval: int) -> tuple[int, int]:
    """Collectives and notes of comparisons in twelve steps whose finalizer never runs."""
    model = toy()
    watch = attach(model, out, warmup=1, interval=interval)
    monitor = watch.monitor
    assert monitor is not None
    notes: list[str] = []
    real = monitor.ledger.note
    monitor.ledger.note = lambda step, text: (notes.append(text), real(step, text))[1]  # type: ignore[method-assign]
    for step in range(1, 13):
        model.train(partials(model, rank, step), finalizes=0)
    collectives = monitor.parts.exchange.collectives
    watch.detach()
    return collectives, sum("replicas compared once" in note for note in notes)


@pytest.mark.parametrize("interval", [1, 5, 10])
def test_a_comparison_that_is_noted_was_made(interval: int, tmp_path: Path, gloo_ranks: Ranks) -> None:
    """Once, at the first step behind the patience that is to be checked, and not before."""
    for collectives, notes in gloo_ranks(2, never_finalized, str(tmp_path), interval, timeout=40):
        assert notes == 1
        assert collectives >= 2


# ------------------------------------------------------------------------------ attaching and ending


def storeless(rank: int, out: str) -> tuple[bool, bool, list[str]]:
    """Whether a rank watches, whether its host is hooked, and which threads are left, if the store fails at the end."""
    model, before = toy(), set(threading.enumerate())
    real = handshake.Meeting.hold

    def hold(self: handshake.Meeting, payload: Any, *judge: Any) -> str:
        if self.name.startswith("ready") and rank == 1:
            message = "connection reset by peer"
            raise RuntimeError(message)
        return real(self, payload, *judge)

    with mock.patch.object(handshake.Meeting, "hold", hold):
        watch = attach(model, out, handshake_timeout=1.0, sinks=("tests.chaos._sinks:raises_at_write",))
    names = [thread.name for thread in threading.enumerate() if thread not in before and "tpwatch" in thread.name]
    return watch.enabled, model.watch is not None, names


def test_an_attach_that_fails_late_leaves_nothing_behind(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """The host's own objects are back, and no thread, port or file of tpwatch is left."""
    assert gloo_ranks(2, storeless, str(tmp_path), timeout=40) == [(False, False, [])] * 2


def speechless(rank: int, out: str) -> tuple[bool, bool]:
    """Whether a rank that cannot say its first words watches, and whether detaching lets go of the host."""
    model = toy()
    broken = mock.patch.object(session.Session, "_say", side_effect=OSError("planted"))
    if rank == 1:
        with broken:
            watch = attach(model, out)
    else:
        watch = attach(model, out)
    enabled = watch.enabled
    model.train(partials(model, rank, 1))
    watch.detach()
    return enabled, model.watch is not None


def test_what_goes_wrong_behind_the_last_meeting_undoes_nothing(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """From there on the other ranks rely on this one: the handle that it returns is that of the running watch."""
    assert gloo_ranks(2, speechless, str(tmp_path), timeout=40) == [(True, False)] * 2


def ended(rank: int, out: str) -> tuple[int, str]:
    """Internal errors of a watch that is finished after the process group was destroyed."""
    model = toy()
    watch = attach(model, out)
    for step in (1, 2, 3):
        model.train(partials(model, rank, step))
    dist.barrier()
    dist.destroy_process_group()
    watch.finish()
    return watch._guard.errors, watch._guard.last_error


def test_a_script_that_destroys_its_process_group_first_is_no_error(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """There is nobody left to compare with, and nothing to say about it."""
    assert gloo_ranks(2, ended, str(tmp_path), timeout=40) == [(0, "")] * 2


def again(rank: int, out: str) -> list[tuple[int, int]]:
    """Of two watches, how often gradients were reduced before the stop; in the first a rank fails on the way to it."""
    seen = []
    for run in (1, 2):
        model = toy()
        model.rules[3] = "none"
        watch = attach(model, f"{out}/{run}", on_fault="abort", handshake_timeout=SHORT)
        monitor = watch.monitor
        assert monitor is not None
        if run == 1 and rank == 1:
            monitor._presence.find_absent = mock.Mock(side_effect=MemoryError)  # type: ignore[method-assign]
        with mock.patch.object(Toy, "finalize", autospec=True) as finalize, suppress(ReplicaFault):
            for step in range(1, 4):
                gradients = partials(model, rank, step)
                gradients[3] = None if step == 2 and rank == 1 else normal(step, 20)
                model.train(gradients)
        seen.append((run, finalize.call_count))
        watch.abandon() if rank else watch.finish()
        dist.barrier()
    return seen


def test_what_a_rank_missed_in_one_watch_it_has_not_missed_in_the_next(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """Meetings are those of one attach: after another the ranks meet again, and leave out what would hang."""
    for seen in gloo_ranks(2, again, str(tmp_path), timeout=60):
        assert seen == [(1, 2), (2, 1)]


def two_sizes(rank: int, out: str) -> list[int]:
    """A trainer's own all-reduce over the job after every step, beside one group of two ranks and one of one."""
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    model = toy()
    model.group = groups[rank // 2]
    knobs = {"out": out, "on_fault": "abort", "warmup": 2, "interval": 10, "handshake_timeout": 10}
    watch = tpwatch.attach(model, None, knobs, groups={"tp": model.group})
    sums = []
    for step in counted(model, range(101, 115)):
        model.rules = ["none"] * 4 if rank == 2 else model.rules
        model.train(partials(model, rank, step))
        own = torch.ones(3)
        dist.all_reduce(own)
        sums.append(int(own[0]))
    watch.abandon()
    return sums


def test_the_trainers_own_collectives_are_not_met_by_ours(tmp_path: Path) -> None:
    """Pipeline stages of which one has no replicas: nobody meets alone, so nothing of the trainer's is mispaired."""
    with mock.patch.object(session, "choose", return_value=ToyAdapter()):
        assert run_ranks(3, two_sizes, str(tmp_path), timeout=40) == [[3] * 14] * 3
