"""The failure boundary between tpwatch and a training loop."""

from __future__ import annotations

import logging

import pytest

from tests.unit._report_runs import HOSTILE
from tests.unit._samples import finding
from tpwatch._guard import Guard, say, shield
from tpwatch.errors import ReplicaFault


def fail(message: str = "broken") -> None:
    """Raise what an internal error might raise."""
    raise ValueError(message)


def fail_otherwise() -> None:
    """Raise another type of error."""
    message = "key"
    raise KeyError(message)


def test_a_call_that_works_hands_its_value_through() -> None:
    """Arguments go in, the value comes out, nothing is counted."""
    guard = Guard(3)
    outcome = guard.attempt("adding", lambda a, *, b: a + b, 1, b=2)
    assert (outcome.ok, outcome.value, outcome.error, guard.errors) == (True, 3, None, 0)


def test_a_call_that_returns_none_is_ok() -> None:
    """None is a value; only an error makes a call fail."""
    assert Guard(3).attempt("nothing", lambda: None).ok


def test_an_internal_error_becomes_an_outcome() -> None:
    """The caller goes on, with the error at hand and counted."""
    guard = Guard(3)
    outcome = guard.attempt("packing", fail, "no memory")
    assert (outcome.ok, outcome.value, guard.errors) == (False, None, 1)
    assert isinstance(outcome.error, ValueError)
    assert guard.last_error == "packing: ValueError: no memory"


def test_it_trips_at_the_limit_and_not_before() -> None:
    """`limit` errors trip the guard, one less does not."""
    guard = Guard(2)
    guard.attempt("a", fail)
    assert not guard.tripped
    guard.attempt("b", fail)
    assert guard.tripped


def test_a_success_does_not_forgive_errors() -> None:
    """Errors are counted over the whole run, not in a row."""
    guard = Guard(2)
    guard.attempt("a", fail)
    guard.attempt("a", lambda: None)
    guard.attempt("a", fail)
    assert guard.tripped


def test_a_tripped_guard_still_calls() -> None:
    """A tripped rank has to go on joining collectives until all stop together."""
    guard = Guard(1)
    guard.attempt("a", fail)
    assert guard.attempt("a", lambda: 5).value == 5


def test_the_same_error_is_logged_once_but_counted_each_time(caplog: pytest.LogCaptureFixture) -> None:
    """A place that fails at every step must not fill the log of the job."""
    guard = Guard(10)
    for message in ("one", "two", "three"):
        guard.attempt("packing", fail, message)
    assert len(caplog.records) == 1
    assert guard.errors == 3
    assert guard.last_error.endswith("three")


@pytest.mark.parametrize(("what", "fn"), [("sending", fail), ("packing", fail_otherwise)])
def test_another_place_or_type_is_logged_too(caplog: pytest.LogCaptureFixture, what: str, fn: type[None]) -> None:
    """Errors are the same only if they come from the same place and are of the same type."""
    guard = Guard(10)
    guard.attempt("packing", fail)
    guard.attempt(what, fn)
    assert len(caplog.records) == 2


def test_the_log_line_says_where_that_training_is_safe_and_what_comes(caplog: pytest.LogCaptureFixture) -> None:
    """A warning with the traceback: what failed, that the job is unharmed, how many more are tolerated."""
    guard = Guard(2)
    guard.attempt("packing", fail)
    guard.attempt("sending", fail)
    first, second = caplog.records
    assert first.levelno == logging.WARNING
    assert first.exc_info is not None
    assert "packing" in first.message
    assert "training is not affected" in first.message
    assert "disabled after 1 more" in first.message
    assert "disable itself on all ranks" in second.message


@pytest.mark.parametrize("debug", [False, True])
def test_a_replica_fault_passes_uncounted(debug: bool) -> None:  # noqa: FBT001 - a parametrised value
    """Stopping the run is what the user asked for, not an internal error."""
    guard = Guard(1, debug=debug)
    fault = ReplicaFault([finding()], 3)

    def stop() -> None:
        raise fault

    with pytest.raises(ReplicaFault) as caught:
        guard.attempt("acting", stop)
    assert caught.value is fault
    assert guard.errors == 0


def test_with_debug_an_internal_error_propagates(caplog: pytest.LogCaptureFixture) -> None:
    """A developer sees the error where it happens; it is neither counted nor logged."""
    guard = Guard(1, debug=True)
    with pytest.raises(ValueError, match="broken"):
        guard.attempt("packing", fail)
    assert not guard.tripped
    assert not caplog.records


def test_an_interrupt_is_not_an_internal_error() -> None:
    """Ctrl-C belongs to the user, and reaches the training loop."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    guard = Guard(1)
    with pytest.raises(KeyboardInterrupt):
        guard.attempt("packing", interrupt)
    assert guard.errors == 0


def test_guards_do_not_share_what_they_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Each Watch speaks for itself."""
    for _ in range(2):
        Guard(3).attempt("packing", fail)
    assert len(caplog.records) == 2


def test_shield_tells_a_result_from_an_error() -> None:
    """Command-line edges get a result or the exception, and choose the exit code."""
    assert shield(max, 1, 2) == (True, 2)
    ok, error = shield(fail, "no file")
    assert not ok
    assert isinstance(error, ValueError)


class Refusing(logging.Handler):
    """A log handler of the host that raises."""

    def emit(self, record: logging.LogRecord) -> None:
        """Raise, as a handler should not."""
        raise OSError(record.getMessage())


def test_a_log_handler_that_raises_raises_into_nobodys_training() -> None:
    """The line is lost, and that is all."""
    logger, handler = logging.getLogger("tpwatch"), Refusing()
    logger.addHandler(handler)
    try:
        with pytest.raises(OSError, match="said to it"):
            logger.warning("said to it")
        say(logging.WARNING, "said to %s", "it")
        assert Guard(1).attempt("packing", fail).value is None
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("name", ["bad\x1b[2J\nrm", *HOSTILE])
def test_names_cannot_repaint_the_terminal_that_shows_the_log(caplog: pytest.LogCaptureFixture, name: str) -> None:
    """Each is on the one line it belongs to, as text or as an error says it; numbers stay numbers."""
    say(logging.WARNING, "step %d, %.1f: %s, %s", 3, 0.5, name, OSError(name))
    assert caplog.records[0].getMessage().isprintable()
    assert caplog.records[0].getMessage().startswith("step 3, 0.5: ")
    assert name.encode("unicode_escape").decode()[:8] in caplog.records[0].getMessage()


@pytest.mark.parametrize("name", ["bad\x1b[2J\nrm", *HOSTILE])
def test_a_traceback_cannot_repaint_it_either(caplog: pytest.LogCaptureFixture, name: str) -> None:
    """An internal error may be about a parameter of any name."""
    Guard(3).attempt("packing", fail, name)
    assert "Traceback" in caplog.text
    assert "ValueError: " in caplog.text
    assert all(line.isprintable() for line in caplog.text.split("\n"))
