"""A thread that waits for read-backs: it tells what has arrived, once, and never waits for what has not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from tpwatch.lookout import POLL_SECONDS, Lookout

PATIENCE = 10.0
"""Seconds after which a test gives up; none takes a tenth of it."""


class Parcel:
    """Something on its way that arrives when the test says so."""

    def __init__(self, content: str, *, here: bool = False) -> None:
        self.content = content
        self.here = here
        self.asked = 0
        self.asked_twice = threading.Event()

    def ready(self) -> bool:
        """Say whether it is here, and remember the question."""
        self.asked += 1
        if self.asked > 1:
            self.asked_twice.set()
        return self.here

    @property
    def host(self) -> str:
        """Hand it over; a lookout that asks too early would hang on a real one."""
        assert self.here, "waited for what has not arrived"
        return self.content


class Log:
    """Remembers what it was told, and on which thread."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.threads: set[threading.Thread] = set()
        self.news = threading.Semaphore(0)

    def __call__(self, content: str) -> None:
        """Be told."""
        self.told.append(content)
        self.threads.add(threading.current_thread())
        self.news.release()

    def wait(self) -> None:
        """Wait for the next thing it is told."""
        assert self.news.acquire(timeout=PATIENCE), "nothing was told"


def lookouts() -> list[threading.Thread]:
    """Threads of lookouts that are alive."""
    return [thread for thread in threading.enumerate() if thread.name == "tpwatch-lookout"]


@pytest.fixture
def lookout() -> Iterator[Lookout]:
    """A lookout that is closed at the end and leaves no thread behind."""
    before = lookouts()
    one = Lookout()
    yield one
    one.close()
    assert lookouts() == before


def test_what_has_arrived_is_told(lookout: Lookout) -> None:
    """Its content is handed to the one who asked."""
    log = Log()
    lookout.watch(Parcel("entry", here=True), log)
    log.wait()
    assert log.told == ["entry"]


def test_what_is_on_its_way_is_told_when_it_arrives(lookout: Lookout) -> None:
    """Not before, however often the lookout has looked; and once."""
    log, parcel = Log(), Parcel("entry")
    lookout.watch(parcel, log)
    assert parcel.asked_twice.wait(PATIENCE)
    assert log.told == []
    parcel.here = True
    log.wait()
    asked = parcel.asked
    time.sleep(3 * POLL_SECONDS)
    assert log.told == ["entry"]
    assert parcel.asked == asked


def test_a_late_one_does_not_keep_others_waiting(lookout: Lookout) -> None:
    """They are told as they arrive, not in the order they were sent."""
    log, late = Log(), Parcel("late")
    lookout.watch(late, log)
    lookout.watch(Parcel("early", here=True), log)
    log.wait()
    assert log.told == ["early"]
    late.here = True
    log.wait()
    assert log.told == ["early", "late"]


def test_telling_happens_on_one_thread_of_its_own(lookout: Lookout) -> None:
    """The training thread may be hanging in a reduction."""
    log = Log()
    for content in "abc":
        lookout.watch(Parcel(content, here=True), log)
    for _ in range(3):
        log.wait()
    (thread,) = log.threads
    assert thread is not threading.current_thread()
    assert thread.daemon, "a job that ends does not wait for its lookout"


def test_watching_returns_before_anything_is_told(lookout: Lookout) -> None:
    """Who has sent something goes on with its own work meanwhile."""
    returned, told = threading.Event(), threading.Event()
    in_time: list[bool] = []

    def tell(_content: str) -> None:
        in_time.append(returned.wait(PATIENCE / 10))
        told.set()

    lookout.watch(Parcel("entry", here=True), tell)
    returned.set()
    assert told.wait(PATIENCE)
    assert in_time == [True]


def test_no_thread_before_it_is_needed() -> None:
    """A run whose results are read at once never starts one."""
    before = threading.active_count()
    lookout = Lookout()
    assert threading.active_count() == before
    lookout.close()
    lookout.close()


def test_closing_forgets_what_is_on_its_way() -> None:
    """After `close` nothing is told any more, also if it arrives; closing twice is one closing."""
    lookout, log, parcel = Lookout(), Log(), Parcel("entry")
    lookout.watch(parcel, log)
    assert parcel.asked_twice.wait(PATIENCE)
    lookout.close()
    lookout.close()
    parcel.here = True
    time.sleep(3 * POLL_SECONDS)
    assert log.told == []
