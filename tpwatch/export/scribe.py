"""Work on files that training cannot wait for: a network file system may not answer for minutes, or ever again.

Done on threads of its own; the caller waits a bounded time. Knows threads and time, not what a line says.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from tpwatch._guard import say, shield
from tpwatch.export.eventfile import MOST_OWED, OWED, EventFile

PATIENCE = 2.0
"""Seconds that a step waits for its line: more than a healthy disk under load takes to write and force one, and little
against the minutes that its peers wait in their collectives."""

LEISURE = 10.0
"""Seconds for a file of its own where training stands still anyway: at attach, a save, an abort."""

MOST_WAITING = 1000
"""Lines that wait for a file system which does not answer; beyond it only those are taken that are `OWED`."""

T = TypeVar("T")


class Scribe:
    """Writes the lines of one event file on a thread of its own.

    While the file system answers, a line is in the file before `put` returns. That costs two switches between threads:
    50 to 115 us for a check instead of 25 to 65; a finding, forced to disk, takes its 2 to 3 ms as without (two cores,
    a local disk).
    """

    def __init__(self, file: EventFile) -> None:
        """Start the thread; from here on `file` is its own."""
        self._file = file
        # A daemon: a file system that never answers must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="tpwatch-scribe", daemon=True)
        self._inbox: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        self._last: Future[None] = Future()
        self._last.set_result(None)
        self._behind = False
        self._closed = False
        self._dropped = 0
        self._thread.start()

    @property
    def lost(self) -> int:
        """Lines that are not in the file and never will be."""
        return self._file.lost + self._dropped

    def put(self, event: str, line: str) -> None:
        """Have one line written, and wait for it, unless an earlier one is still waited for in vain.

        Raises:
            OSError: the file has been closed.
        """
        if self._closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if self._inbox.qsize() >= MOST_WAITING + (MOST_OWED if event in OWED else 0):
            self._dropped += 1
            return
        behind = self._behind and not self._last.done()
        missed, self._dropped = self._dropped, 0
        self._hand_over(partial(self._file.put, event, line, missed))
        self._behind = behind or not self.flush()
        if self._behind and not behind:
            text = "tpwatch: %s: no answer from the file system for %g s. Training goes on; events wait for it."
            say(logging.WARNING, text, self._file.path, PATIENCE)

    def flush(self) -> bool:
        """Wait for the last line, but not for ever; False if it is not in the file."""
        try:
            self._last.result(PATIENCE)
        except NotYet:
            return False
        return True

    def close(self) -> None:
        """Close the file behind the last line; if that takes too long, leave it to the thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._hand_over(self._file.close)
        self._inbox.put(None)
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            left = self._inbox.qsize() - 1  # with one in hand, without closing the file and the end of the thread
            text = "tpwatch: %s: no answer from the file system; %d events are left behind"
            say(logging.WARNING, text, self._file.path, left)
        else:
            self._last.result()

    def _hand_over(self, work: Callable[[], None]) -> None:
        self._last = Future()
        self._inbox.put((self._last, work))

    def _work(self) -> None:
        for done, work in iter(self._inbox.get, None):
            _settle(done, work)


def in_time(work: Callable[[], T], patience: float) -> T:
    """What `work` returns or raises, on a thread of its own.

    Raises:
        TimeoutError: it has done neither within `patience` seconds, and is left behind.
    """
    done: Future[T] = Future()
    threading.Thread(target=_settle, args=(done, work), name="tpwatch-file", daemon=True).start()
    try:
        return done.result(patience)
    except NotYet:
        raise TimeoutError(errno.ETIMEDOUT, f"no answer from the file system for {patience:g} s") from None


def _settle(done: Future[T], work: Callable[[], T]) -> None:
    ok, outcome = shield(work)
    if ok:
        done.set_result(outcome)
    else:
        done.set_exception(outcome)
