"""Sinks cannot hold up the training thread, each other, or the end of the process."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.commands import run_python
from tpwatch.config import Config
from tpwatch.export import Health, Place, Sink
from tpwatch.export.fanout import Fanout
from tpwatch.export.jsonl import RunLog
from tpwatch.export.sinks import Loss

EVENTS = 20


class Keeps:
    """Keeps everything."""

    def __init__(self, place: Place | None = None) -> None:
        """Remember on which thread it was built."""
        del place
        self.events: list[Mapping[str, Any]] = []
        self.threads = {threading.current_thread()}
        self.closed = 0

    def write(self, event: Mapping[str, Any]) -> None:
        """Keep one event."""
        self.events.append(event)
        self.threads.add(threading.current_thread())

    def close(self) -> None:
        """Count."""
        self.closed += 1
        self.threads.add(threading.current_thread())


class Raises(Keeps):
    """Fails at every third event, and at the end."""

    def write(self, event: Mapping[str, Any]) -> None:
        """Fail, or keep."""
        if event["step"] % 3 == 0:
            raise ZeroDivisionError
        super().write(event)

    def close(self) -> None:
        """Fail."""
        raise ZeroDivisionError


class Waits(Keeps):
    """Waits until it is let go at the first event."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self.gate = gate
        self.reached = threading.Event()

    def write(self, event: Mapping[str, Any]) -> None:
        """Wait, then keep."""
        self.reached.set()
        self.gate.wait()
        super().write(event)


class Vandal(Keeps):
    """Changes what it is given."""

    def write(self, event: Mapping[str, Any]) -> None:
        """Empty the event."""
        event["differing"].clear()
        super().write(event)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A place with an empty health."""
    return Place(Config(), tmp_path, "tp-0", Health())


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """A gate that is open at the end of the test, so that no thread outlives it."""
    gate = threading.Event()
    yield gate
    gate.set()


def fan(place: Place, sinks: Mapping[str, Sink], **options: Any) -> Fanout:
    """A fan-out to sinks that are built already."""
    return Fanout({name: lambda _place, sink=sink: sink for name, sink in sinks.items()}, place, **options)


def hand_over(fanout: Fanout, count: int = EVENTS) -> None:
    """Hand over `count` events, steps from 1."""
    for step in range(1, count + 1):
        fanout.hand_over(json.dumps({"event": "check", "step": step, "differing": {"param": 1}}))


def steps(sink: Keeps) -> list[int]:
    """The steps of the events that a sink kept."""
    return [event["step"] for event in sink.events]


def test_every_sink_gets_every_event_in_order_on_its_own_thread(place: Place) -> None:
    """Two sinks, two threads, neither of them this one; built, called and closed on the same."""
    sinks: list[Keeps] = []

    def build(place: Place) -> Keeps:
        sinks.append(Keeps(place))
        return sinks[-1]

    fanout = Fanout({"a": build, "b": build}, place)
    hand_over(fanout)
    fanout.close()
    assert [steps(sink) for sink in sinks] == [list(range(1, EVENTS + 1))] * 2
    assert [sink.closed for sink in sinks] == [1, 1]
    threads = [sink.threads for sink in sinks]
    assert [len(t) for t in threads] == [1, 1]
    assert len({threading.current_thread()}.union(*threads)) == 3


def test_one_that_raises_loses_its_own_events(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """Counted, logged once for each place, and the neighbour is complete."""
    bad, good = Raises(), Keeps()
    fanout = fan(place, {"bad": bad, "good": good})
    hand_over(fanout)
    with caplog.at_level(logging.WARNING, "tpwatch"):
        fanout.close()
    assert steps(bad) == [s for s in range(1, EVENTS + 1) if s % 3]
    assert steps(good) == list(range(1, EVENTS + 1))
    assert place.health.losses == {"bad": Loss(errors=6 + 1), "good": Loss()}
    said = [record.getMessage() for record in caplog.records]
    assert sum("failed at an event" in line for line in said) <= 1
    assert "tpwatch: sink bad failed 7 times and dropped 0 events; the event file has them all" in said


def test_one_that_waits_loses_its_own_events(
    place: Place, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its queue fills, the rest is dropped and counted, and the neighbour is complete."""
    monkeypatch.setattr("tpwatch.export.fanout.LOOK_IN", 0.005)
    slow, good = Waits(gate), Keeps()
    fanout = fan(place, {"slow": slow, "good": good}, capacity=5)
    hand_over(fanout, 1)
    assert slow.reached.wait(5)
    for step in range(2, EVENTS + 1):
        fanout.hand_over(json.dumps({"event": "check", "step": step}))
        wait_for(lambda step=step: len(good.events) == step)
    assert place.health.losses == {"slow": Loss(dropped=EVENTS - 1 - 5), "good": Loss()}
    gate.set()
    fanout.close()
    assert steps(slow) == [1, 2, 3, 4, 5, 6]
    assert steps(good) == list(range(1, EVENTS + 1))


def wait_for(condition: Any, seconds: float = 5.0) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition never held"
        time.sleep(0.001)


def test_handing_over_never_waits(place: Place, gate: threading.Event) -> None:
    """Not even if a sink is stuck and its queue is full: 10,000 events in far less than one wait would take."""
    slow = Waits(gate)
    fanout = fan(place, {"slow": slow}, capacity=5)
    began = time.perf_counter()
    hand_over(fanout, 10_000)
    assert time.perf_counter() - began < 2.0
    assert place.health.losses["slow"].dropped >= 10_000 - 7


def test_handing_over_costs_microseconds(place: Place) -> None:
    """Half of the calls take less than 50 (measured: about 3), with a sink at work beside."""
    fanout = fan(place, {"good": Keeps()})
    line = json.dumps({"event": "check", "step": 1, "differing": {"param": 1}})
    taken = []
    for _ in range(1001):
        began = time.perf_counter()
        fanout.hand_over(line)
        taken.append(time.perf_counter() - began)
        time.sleep(0.0002)
    fanout.close()
    assert sorted(taken)[500] < 50e-6


def test_the_end_waits_for_a_stuck_sink_no_longer_than_its_patience(
    place: Place, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named, and one beside it is closed all the same."""
    slow, good = Waits(gate), Keeps()
    fanout = fan(place, {"slow": slow, "good": good})
    hand_over(fanout)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, "tpwatch"):
        fanout.close(patience=0.3)
    assert time.monotonic() - began < 2.0
    assert good.closed == 1
    assert "sink slow has not finished and is left behind" in caplog.text


STUCK = """
import time, threading
from pathlib import Path
from tpwatch.config import Config
from tpwatch.export import Place
from tpwatch.export.fanout import Fanout

class Stuck:
    def write(self, event):
        threading.Event().wait()
    def close(self):
        pass

fanout = Fanout({"stuck": lambda place: Stuck()}, Place(Config(), Path("."), "tp-0"))
fanout.hand_over('{"event": "note"}')
if CLOSE:
    fanout.close(patience=0.2)
"""


@pytest.mark.parametrize("close", [True, False])
def test_a_process_with_a_stuck_sink_ends(close: bool) -> None:  # noqa: FBT001
    """Whether or not it said goodbye to its sinks."""
    done = run_python("-c", STUCK.replace("CLOSE", str(close)), timeout=20)
    assert done.returncode == 0, done.stderr


def test_one_that_cannot_be_built_costs_its_own_events(place: Place) -> None:
    """A missing package, say: counted, and the neighbour is complete."""

    def build(_place: Place) -> Sink:
        message = "no such package"
        raise ImportError(message)

    good = Keeps()
    fanout = Fanout({"bad": build, "good": lambda _place: good}, place)
    hand_over(fanout)
    fanout.close()
    assert place.health.losses == {"bad": Loss(errors=1 + EVENTS), "good": Loss()}
    assert len(good.events) == EVENTS


def test_what_one_does_to_an_event_the_other_does_not_see(place: Place) -> None:
    """Each gets a copy of its own."""
    vandal, good = Vandal(), Keeps()
    fanout = fan(place, {"vandal": vandal, "good": good})
    hand_over(fanout)
    fanout.close()
    assert all(event["differing"] == {"param": 1} for event in good.events)


def test_closing_twice_is_harmless(place: Place) -> None:
    """Detach and the end of the process may both do it; what comes later goes nowhere."""
    good = Keeps()
    fanout = fan(place, {"good": good})
    fanout.close()
    fanout.close()
    hand_over(fanout)
    assert (good.closed, good.events) == (1, [])


def test_sinks_get_what_the_event_file_gets(place: Place, tmp_path: Path) -> None:
    """Line for line, also the line that a full disk refuses."""
    good = Keeps()
    fanout = fan(place, {"good": good})
    log = RunLog(tmp_path, "tp-0", "x", fanout.hand_over)
    log.note(1, "first")
    log.status(2, ["a"], [float("inf")])  # type: ignore[list-item]
    log.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        log.note(3, "refused")
    fanout.close()
    assert good.events[:2] == [json.loads(line) for line in log.path.read_text().splitlines()]
    assert steps(good) == [1, 2, 3]


def test_flushing_waits_until_every_sink_has_what_was_handed_over(place: Place) -> None:
    """Also a slow one; both go on afterwards."""

    class Slow(Keeps):
        def write(self, event: Mapping[str, Any]) -> None:
            time.sleep(0.02)
            super().write(event)

    slow, good = Slow(), Keeps()
    fanout = fan(place, {"slow": slow, "good": good})
    hand_over(fanout)
    fanout.flush()
    assert steps(slow) == steps(good) == list(range(1, EVENTS + 1))
    hand_over(fanout, 1)
    fanout.close()
    assert steps(slow) == steps(good) == [*range(1, EVENTS + 1), 1]
    assert place.health.losses == {"slow": Loss(), "good": Loss()}


def test_flushing_waits_for_a_stuck_sink_no_longer_than_its_patience(place: Place, gate: threading.Event) -> None:
    """For several together, and the neighbours have everything; one that was never built is not waited for."""

    def build(_place: Place) -> Sink:
        raise ImportError

    stuck = {f"stuck{i}": (lambda _place: Waits(gate)) for i in range(4)}
    good = Keeps()
    fanout = Fanout({**stuck, "good": lambda _place: good, "bad": build}, place)
    hand_over(fanout)
    began = time.monotonic()
    fanout.flush(patience=0.5)
    assert 0.5 <= time.monotonic() - began < 1.5
    assert len(good.events) == EVENTS
    assert place.health.losses["bad"].errors == 1 + EVENTS
