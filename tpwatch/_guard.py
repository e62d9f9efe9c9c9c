"""The one failure boundary: every call from a training loop into tpwatch goes through here.

A monitor must never hurt the job it watches: an internal error is counted, logged once, and after
`limit` of them the guard trips. A tripped guard does not stop its rank from joining collectives
(that would hang the peers): the monitor reads `tripped`, says so in the header of the next buffer,
and all ranks stop together.

This is the only file that catches `Exception`. It knows nothing of what it guards.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, ParamSpec, TypeVar

from tpwatch.errors import ReplicaFault, printable

logger = logging.getLogger("tpwatch")

P = ParamSpec("P")
T = TypeVar("T")


def say(level: int, text: str, *args: object, exc_info: BaseException | bool | None = None) -> None:
    """Log one line, wherever training may be waiting for it: a log handler of the job's own that raises raises here.

    `args` that are no numbers, and the traceback, are escaped: names of models are in them, and read on terminals.
    """
    with suppress(Exception):  # there is nowhere left to say so
        shown = tuple(arg if isinstance(arg, (int, float)) else printable(str(arg)) for arg in args)
        if not isinstance(exc_info, BaseException):
            logger.log(level, text, *shown, exc_info=exc_info)
        elif logger.isEnabledFor(level):
            whole = (type(exc_info), exc_info, exc_info.__traceback__)
            record = logger.makeRecord(logger.name, level, __file__, 0, text, shown, whole)
            lines = "".join(traceback.format_exception(exc_info)).rstrip().split("\n")
            record.exc_text = "\n".join(map(printable, lines))  # a formatter takes what it finds there
            logger.handle(record)


class Outcome(Generic[T]):
    """Result of one guarded call: `ok` and `value`, or the exception in `error`."""

    __slots__ = ("error", "ok", "value")

    def __init__(self, value: T | None, error: Exception | None) -> None:
        """Hold the value of a call that worked, or the error of one that did not."""
        self.ok = error is None
        self.value = value
        self.error = error


class Guard:
    """Counts internal errors of one Watch and trips after `limit`.

    Lets only `ReplicaFault` through.

    With `debug` (environment `TPWATCH_DEBUG=1`) internal errors propagate, for development.
    """

    def __init__(self, limit: int, *, debug: bool = False) -> None:
        """Start untripped; `limit` is `Config.max_errors`."""
        self.limit = limit
        self.debug = debug
        self.errors = 0
        self.last_error = ""
        self._logged: set[str] = set()

    @property
    def tripped(self) -> bool:
        """True once `limit` internal errors were counted."""
        return self.errors >= self.limit

    def trip(self) -> None:
        """Give up: what failed cannot be made good by trying again."""
        self.errors = max(self.errors, self.limit)

    def attempt(self, what: str, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Outcome[T]:
        """Call `fn`.

        An internal error becomes a counted, once-logged outcome instead of an exception.
        """
        try:
            return Outcome(fn(*args, **kwargs), None)
        except ReplicaFault:
            raise
        except Exception as error:
            if self.debug:
                raise
            self.note(what, error)
            return Outcome(None, error)

    def note(self, what: str, error: Exception) -> None:
        """Count one internal error; log it the first time this place and type of error are seen."""
        self.errors += 1
        self.last_error = f"{what}: {type(error).__name__}: {error}"
        key = f"{what}/{type(error).__name__}"
        if key in self._logged:
            return
        self._logged.add(key)
        left = self.limit - self.errors
        after = f"disabled after {left} more" if left > 0 else "tpwatch will disable itself on all ranks"
        text = "tpwatch internal error in %s (training is not affected; %s)"
        say(logging.WARNING, text, what, after, exc_info=error)


def shield(fn: Callable[..., Any], *args: Any) -> tuple[bool, Any]:
    """Call `fn`; return `(True, result)` or `(False, exception)`.

    For command-line edges, where an exit code follows.
    """
    try:
        return True, fn(*args)
    except Exception as error:
        return False, error
