"""From one training thread to many sinks, none of which can hold it up or hurt another.

Each sink has a lane: a bounded queue and a thread. The training thread appends an encoded line to each queue and goes
on; the thread looks in every now and then, decodes its own copy and calls the sink. A sink that raises or waits loses
its own events, counted in `Health`. Knows threads and queues, not what an event means.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from tpwatch._guard import Guard, say
from tpwatch.export.sinks import Factory, Loss, Place, Sink

CAPACITY = 8192
"""Events that a sink may be behind; what comes on top is dropped."""

LOOK_IN = 0.2
"""Seconds between two looks into a queue. Waking the thread at each event would cost the training thread a system call,
and often its processor: tens of microseconds, at times milliseconds, against a fraction of one for appending."""

PATIENCE = 5.0
"""Seconds that the end of a run waits for all sinks together."""


class Fanout:
    """The lanes of one group leader."""

    def __init__(self, factories: Mapping[str, Factory], place: Place, capacity: int = CAPACITY) -> None:
        """Start a thread for each factory; the sink is built there, so that a slow or failing one is no matter here."""
        self._lanes = [_Lane(name, factory, place, capacity) for name, factory in factories.items()]

    def hand_over(self, line: str) -> None:
        """Give every sink one event, encoded as in the event file. Never waits, never raises."""
        for lane in self._lanes:
            lane.put(line)

    def flush(self, patience: float = PATIENCE) -> None:
        """Wait until every sink has been given what was handed over so far, for `patience` seconds in all."""
        reached = [lane.mark() for lane in self._lanes]
        deadline = time.monotonic() + patience
        for mark in reached:
            mark.wait(max(0.0, deadline - time.monotonic()))

    def close(self, patience: float = PATIENCE) -> None:
        """Let every sink finish, for `patience` seconds in all; one that has not by then is left behind. Idempotent."""
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.stop()
        deadline = time.monotonic() + patience
        for lane in lanes:
            lane.conclude(deadline - time.monotonic())


class _Lane:
    """One sink, its queue and its thread."""

    def __init__(self, name: str, factory: Factory, place: Place, capacity: int) -> None:
        self.name = name
        self.loss = place.health.losses.setdefault(name, Loss())
        self._capacity = capacity
        # Appending is one step of the interpreter: no lock that a consumer could hold while it is interrupted.
        self._queue: deque[str | threading.Event] = deque()
        self._over = threading.Event()
        self._guard = _LaneGuard(name, self.loss)
        # A daemon: a sink that waits for ever must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, args=(factory, place), name=f"tpwatch-{name}", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        if len(self._queue) < self._capacity:
            self._queue.append(line)
        else:
            self.loss.dropped += 1

    def mark(self) -> threading.Event:
        """Set once the thread has worked off what is queued by now."""
        mark = threading.Event()
        self._queue.append(mark)
        return mark

    def stop(self) -> None:
        """Ask the thread to close the sink once it has worked off what is queued."""
        self._over.set()

    def conclude(self, patience: float) -> None:
        """Wait for the thread, and say what was lost."""
        self._thread.join(max(0.0, patience))
        if self._thread.is_alive():
            left = len(self._queue)
            say(
                logging.WARNING,
                "tpwatch: sink %s has not finished and is left behind; %d events queued",
                self.name,
                left,
            )
        if self.loss.errors or self.loss.dropped:
            lost = (self.name, self.loss.errors, self.loss.dropped)
            say(
                logging.WARNING,
                "tpwatch: sink %s failed %d times and dropped %d events; the event file has them all",
                *lost,
            )

    def _work(self, factory: Factory, place: Place) -> None:
        sink = self._guard.attempt("building it", factory, place).value
        over = False
        while not over:
            over = self._over.wait(LOOK_IN)
            self._work_off(sink)
        if sink is not None:
            self._guard.attempt("closing it", sink.close)

    def _work_off(self, sink: Sink | None) -> None:
        while self._queue:
            line = self._queue.popleft()
            if isinstance(line, threading.Event):
                line.set()
            elif sink is None:
                self.loss.errors += 1
            else:
                self._guard.attempt("an event", _write, sink, line)


def _write(sink: Sink, line: str) -> None:
    event: dict[str, Any] = json.loads(line)
    sink.write(event)


class _LaneGuard(Guard):
    """Counts every failure of one sink, logs the first of each type, and never trips."""

    def __init__(self, name: str, loss: Loss) -> None:
        super().__init__(limit=sys.maxsize)
        self._name = name
        self._loss = loss

    def note(self, what: str, error: Exception) -> None:
        """Count one failure; further ones of the same type are not logged."""
        self._loss.errors += 1
        self.last_error = f"{type(error).__name__}: {error}"
        key = f"{what}/{type(error).__name__}"
        if key not in self._logged:
            self._logged.add(key)
            say(
                logging.WARNING,
                "tpwatch: sink %s failed at %s: %s",
                self._name,
                what,
                self.last_error,
                exc_info=self.debug,
            )
