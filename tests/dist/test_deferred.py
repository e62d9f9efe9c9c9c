"""Deferred reading: the same verdicts as at once, one step later, and a word before a hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import pytest

from tests.dist._harness import run_ranks
from tests.dist._parts import Gradients, Reduce, Rig, averaged, normal, rig, summed
from tpwatch.config import Config
from tpwatch.lookout import POLL_SECONDS, Lookout

Guarded = Literal["before_update", "deferred"]

PATIENT_SECONDS = 10.0
"""How long a test waits for the lookout, which polls every few milliseconds."""


def nothing(_gradients: Gradients) -> None:
    """Reduce nothing."""


# --------------------------------------------------------------------------- the same, one step later


def driven(rank: int, guard: Guarded, reduce: Reduce, absent: int | None) -> dict[str, Any]:
    """Six steps of copies and partials; what is known after each, and at the end."""
    watched = rig([normal(1, 30), normal(2, 3000), normal(3, 30)], [None] * 3, Config(guard=guard))
    known = []
    for step in range(1, 7):
        last = None if rank == absent else normal(step, 30)
        watched.source.gradients = [
            normal(step, 30),
            normal(100 * step + rank, 3000),
            last,
        ]
        watched.step(step, lambda gradients: reduce(gradients[1:2]))
        known.append([f.to_json() for f in watched.findings])
    watched.monitor.catch_up()
    known.append([f.to_json() for f in watched.findings])
    checks = [(step, report.collectives) for step, report in watched.memo.of("check")]
    watched.monitor.close()
    return {"known": known, "checks": checks, "collectives": watched.exchange.collectives}


@pytest.mark.parametrize("reduce", [nothing, averaged, summed])
def test_deferred_findings_are_the_prompt_ones_one_step_later(reduce: Reduce) -> None:
    """Same findings with the same steps, ranks and numbers; known when the next step begins."""
    for prompt, late in zip(
        run_ranks(2, driven, "before_update", reduce, None),
        run_ranks(2, driven, "deferred", reduce, None),
        strict=True,
    ):
        assert late["known"][0] == []
        assert late["known"][1:] == prompt["known"][:-1]
        assert late["checks"] == prompt["checks"] == [(step, 2) for step in range(1, 7)]
        assert late["collectives"] == prompt["collectives"]
        assert bool(prompt["known"][-1]) == (reduce is not summed)


def test_deferred_presence_is_the_prompt_one_one_step_later() -> None:
    """A gradient that one of two ranks lacks is judged the same way, without an extra gather."""
    for prompt, late in zip(
        run_ranks(2, driven, "before_update", summed, 1),
        run_ranks(2, driven, "deferred", summed, 1),
        strict=True,
    ):
        assert late["known"][0] == []
        (at_once,), (later,) = prompt["known"][-1], late["known"][-1]
        for key in ("kind", "parameter", "first_step", "last_step", "count", "evidence"):
            assert later[key] == at_once[key]
        assert late["collectives"] == prompt["collectives"] - 1


def caught_up(rank: int) -> list[tuple[str, int]]:
    """Two deferred steps and a catch-up; which call made which check known."""
    watched = rig([normal(1, 30)], [normal(2, 30)], Config(guard="deferred"))
    log: list[tuple[str, int]] = []

    def note(where: str) -> None:
        log.append((where, len(watched.memo.of("check"))))

    del rank
    note("start")
    watched.step(1, lambda _g: note("inside 1"))
    note("after 1")
    watched.step(2, lambda _g: note("inside 2"))
    note("after 2")
    watched.monitor.catch_up()
    note("caught up")
    watched.monitor.catch_up()
    note("again")
    watched.monitor.close()
    return log


def test_results_are_read_at_a_fixed_place() -> None:
    """Check k is read when step k + 1 enters its reduction, or on demand: on every rank alike."""
    assert (
        run_ranks(2, caught_up)
        == [
            [
                ("start", 0),
                ("inside 1", 0),
                ("after 1", 0),
                ("inside 2", 1),
                ("after 2", 1),
                ("caught up", 2),
                ("again", 2),
            ]
        ]
        * 2
    )


def asked(rank: int) -> list[tuple[int, int]]:
    """Drive four deferred steps and catch up; how many findings ask for a stop, inside and after."""
    watched = rig([normal(1, 30)], [None], Config(guard="deferred", on_fault="abort"))
    inside, after = [], []
    for step in range(1, 5):
        watched.source.gradients = [normal(100 * step + rank, 30)]
        watched.step(step, lambda _g: inside.append(len(watched.monitor.stopping)))
        after.append(len(watched.monitor.stopping))
    watched.monitor.close()
    return list(zip(inside, after, strict=True))


def test_deferred_faults_ask_for_a_stop_one_step_later() -> None:
    """The fault of step 3 asks on every rank on its way into the reduction of step 4."""
    assert run_ranks(3, asked) == [[(0, 0), (0, 0), (0, 0), (1, 1)]] * 3


# ------------------------------------------------------------------------- a word before the hang


def wait_for(condition: Callable[[], bool]) -> bool:
    """Wait until it holds, or for `PATIENT_SECONDS`."""
    deadline = time.monotonic() + PATIENT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS / 4)
    return True


def hanging(rank: int, absent: tuple[int, ...]) -> list[tuple[int, str, str, list[int]]]:
    """The framework's reduction of step 2 blocks until the finding is written; what was written."""
    watched = rig([normal(1, 30), normal(2, 30)], [None, None], Config(guard="deferred"))
    watched.source.gradients = [normal(3, 30), normal(4, 30)]
    watched.step(1)
    watched.source.gradients = [normal(3, 30), None if rank in absent else normal(4, 30)]
    written: list[tuple[int, str, str, list[int]]] = []

    def blocked(_gradients: Gradients) -> None:
        wait_for(lambda: bool(watched.memo.of("finding")))
        written.extend(
            (step, f.kind, f.parameter, f.evidence["absent_ranks"]) for step, f in watched.memo.of("finding")
        )

    watched.step(2, blocked)
    watched.monitor.close()
    return written


@pytest.mark.parametrize("absent", [(1,), (0, 3)])
def test_the_lookout_writes_the_finding_while_training_is_blocked(absent: tuple[int, ...]) -> None:
    """The training thread sits in the framework's reduction: the name, step and ranks are on disk."""
    expected = [(2, "grad-presence", "p1", list(absent))]
    assert run_ranks(4, hanging, absent) == [expected] * 4


def foretold(rank: int) -> list[int]:
    """Three steps with an absent gradient that block for a while: steps the lookout wrote in."""
    watched = rig([normal(1, 30)], [None], Config(guard="deferred"))
    watched.source.gradients = [None if rank == 1 else normal(4, 30)]
    written: list[int] = []
    for step in range(1, 4):

        def blocked(_gradients: Gradients, s: int = step) -> None:
            before = len(watched.memo.of("finding"))
            if s == 1:
                wait_for(lambda: bool(watched.memo.of("finding")))
            else:
                time.sleep(5 * POLL_SECONDS)
            written.extend([s] * (len(watched.memo.of("finding")) - before))

        watched.step(step, blocked)
    watched.monitor.close()
    return written


def test_the_lookout_says_it_once() -> None:
    """A fault that lasts is foretold in its first step; the training thread keeps the count."""
    assert run_ranks(2, foretold) == [[1], [1]]


def unmatched(rank: int) -> list[Any]:
    """Deferred, with a rank that fails in step 1: what the lookout writes about the void step."""
    watched = rig([normal(1, 30)], [normal(2, 30)], Config(guard="deferred"))
    watched.source.failing_looks = int(rank == 1)
    watched.step(1, lambda _g: time.sleep(5 * POLL_SECONDS))
    watched.monitor.close()
    return watched.memo.of("finding")


def test_the_lookout_draws_nothing_from_a_void_buffer() -> None:
    """A zeroed buffer looks like an absent gradient; its flag says that it means nothing."""
    assert run_ranks(2, unmatched) == [[], []]


def stale(rank: int) -> tuple[list[Any], Rig]:
    """Ask the lookout about a check that the training thread has already concluded."""
    watched = rig([normal(1, 30)], [None], Config(guard="deferred"))
    watched.source.gradients = [None if rank == 1 else normal(2, 30)]
    monitor = watched.monitor
    watched.step(1)
    check = monitor._pending
    monitor.catch_up()
    monitor.close()
    before = len(watched.memo.of("finding"))
    if check is None or check.entry is None:
        return [], watched
    monitor._presence._foretold.clear()
    monitor._foretell(check, check.entry.wait())
    return watched.memo.of("finding")[before:], watched


def test_the_lookout_leaves_concluded_checks_alone() -> None:
    """Its host buffer may by then hold a later step."""
    for late, watched in run_ranks(2, stale):
        assert late == []
        assert [f.kind for f in watched.findings] == ["grad-presence"]


# ---------------------------------------------------------------------------------- the lookout itself


class Parcel:
    """Something on its way that arrives when told."""

    def __init__(self) -> None:
        self.arrived = threading.Event()

    def ready(self) -> bool:
        """True if it has arrived."""
        return self.arrived.is_set()

    @property
    def host(self) -> str:
        """Return the content."""
        return "content"


def test_lookout_tells_once_and_on_its_own_thread() -> None:
    """Nothing before the arrival, one call after it, and not on the caller's thread."""
    lookout, parcel, told = Lookout(), Parcel(), []
    lookout.watch(parcel, lambda content: told.append((content, threading.current_thread().name)))
    time.sleep(3 * POLL_SECONDS)
    assert told == []
    parcel.arrived.set()
    assert wait_for(lambda: bool(told))
    time.sleep(3 * POLL_SECONDS)
    lookout.close()
    assert told == [("content", "tpwatch-lookout")]


def test_lookout_watches_several_at_once() -> None:
    """One that never arrives does not hold up another."""
    lookout, never, parcel, told = Lookout(), Parcel(), Parcel(), []
    lookout.watch(never, told.append)
    lookout.watch(parcel, told.append)
    parcel.arrived.set()
    assert wait_for(lambda: bool(told))
    lookout.close()
    assert told == ["content"]


def test_closed_lookout_forgets() -> None:
    """What arrives after the end is not told, and closing twice is closing once."""
    lookout, parcel, told = Lookout(), Parcel(), []
    lookout.watch(parcel, told.append)
    lookout.close()
    lookout.close()
    parcel.arrived.set()
    time.sleep(3 * POLL_SECONDS)
    assert told == []
    assert "tpwatch-lookout" not in [t.name for t in threading.enumerate() if t is lookout._thread]


def test_an_unused_lookout_has_no_thread() -> None:
    """Prompt mode never needs one."""
    lookout = Lookout()
    lookout.close()
    assert lookout._thread is None
