"""The order of work on two streams, with doubles for CUDA's streams and events; `tests/gpu` runs the real ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tpwatch.exchange import Layout, ReadBack

CPU = torch.device("cpu")


@dataclass
class Event:
    """Double for an event: knows the stream it was recorded on."""

    log: list[str]
    stream: str

    def synchronize(self) -> None:
        """The host waits."""
        self.log.append(f"host waits for {self.stream}")


@dataclass
class Stream:
    """Double for a stream: writes down what it is told."""

    log: list[str]
    name: str
    device: torch.device = field(default=CPU)

    def wait_stream(self, other: Stream) -> None:
        """What comes behind here runs once `other` has come so far."""
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> Event:
        """An event behind what there is so far."""
        self.log.append(f"event on {self.name}")
        return Event(self.log, self.name)

    def wait_event(self, event: Event) -> None:
        """What comes behind here runs once the event has."""
        self.log.append(f"{self.name} waits for the event on {event.stream}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> tuple[ReadBack, list[str]]:
    """A read-back with a side stream, and what happens on both streams."""
    log: list[str] = []
    readback, training = ReadBack(Layout(1), CPU), Stream(log, "training")
    readback._side = Stream(log, "side")  # type: ignore[assignment]

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        log.append(f"copy on {stream.name}")
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: training)
    monkeypatch.setattr(torch.cuda, "stream", on)
    return readback, log


def test_the_copy_goes_by_the_side_and_behind_the_collective(streams: tuple[ReadBack, list[str]]) -> None:
    """The side stream first waits for what the training stream has done to the buffer; then it copies."""
    readback, log = streams
    buffer = torch.ones(2, Layout(1).half, dtype=torch.float64)
    pending = readback.start(buffer)
    assert log == ["side waits for training", "copy on side", "event on side"]
    assert torch.equal(pending.wait(), buffer)
    assert log[3:] == ["host waits for side"]


def test_a_buffer_is_packed_again_behind_its_copy(streams: tuple[ReadBack, list[str]]) -> None:
    """The training stream waits, for the copy of this buffer and no other; the host waits for nothing."""
    readback, log = streams
    one, other = (torch.zeros(2, Layout(1).half, dtype=torch.float64) for _ in range(2))
    readback.let_go(one)
    assert log == []
    readback.start(one)
    log.clear()
    readback.let_go(other)
    assert log == []
    readback.let_go(one)
    assert log == ["training waits for the event on side"]


def test_what_has_not_arrived_is_not_ready(streams: tuple[ReadBack, list[str]]) -> None:
    """Asked without a call into CUDA."""
    readback, log = streams
    pending = readback.start(torch.ones(2, Layout(1).half, dtype=torch.float64))
    log.clear()
    assert pending.ready()
    pending.host[1, 3] = torch.nan
    assert not pending.ready()
    assert log == []


def test_on_the_cpu_there_is_nothing_to_wait_for() -> None:
    """Copied at once."""
    readback = ReadBack(Layout(1), CPU)
    buffer: Any = torch.ones(2, Layout(1).half, dtype=torch.float64)
    pending = readback.start(buffer)
    assert pending.ready()
    assert torch.equal(pending.wait(), buffer)
    readback.let_go(buffer)
