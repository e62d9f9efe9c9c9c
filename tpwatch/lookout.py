"""A thread that waits for read-backs the training thread must not wait for.

In deferred mode a gradient that is missing on one rank makes the framework's own reduction hang,
and with it the training thread, before anything was said. The lookout polls the read-back of the
entry side and calls back when it has arrived. It never touches a collective, a device queue or the
training state. Knows events, not what they carry.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

POLL_SECONDS = 0.02

T_co = TypeVar("T_co", covariant=True)


class Arriving(Protocol[T_co]):
    """Something on its way."""

    def ready(self) -> bool:
        """True if it has arrived; never waits."""
        ...

    @property
    def host(self) -> T_co:
        """The thing itself, once it is there."""
        ...


class Lookout:
    """One daemon thread, started when first needed.

    At most a few things are under way at a time.
    """

    def __init__(self) -> None:
        """No thread yet."""
        self._inbox: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, arriving: Arriving[T_co], tell: Callable[[T_co], object]) -> None:
        """Call `tell` on the lookout's thread once `arriving` is ready. `tell` must not raise."""

        def done() -> bool:
            if not arriving.ready():
                return False
            tell(arriving.host)
            return True

        self._inbox.put(done)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tpwatch-lookout", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop the thread; what has not arrived is forgotten. Idempotent."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        waiting: list[Callable[[], bool]] = []
        while not self._closed.wait(POLL_SECONDS):
            while not self._inbox.empty():
                waiting.append(self._inbox.get())
            waiting = [done for done in waiting if not done()]
