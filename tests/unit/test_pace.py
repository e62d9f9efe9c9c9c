"""How often a group checks, and how it slows down where checks cost too much."""

from __future__ import annotations

from typing import Any

import pytest

from tpwatch.config import Config
from tpwatch.pace import LONGEST, WINDOW, Pace


def spent(check: float, step: float = 1.0, times: int = WINDOW, **knobs: Any) -> Pace:
    """A pace after `times` checks that took `check` seconds, each after a step of `step` seconds."""
    pace = Pace(Config(**{"max_overhead": 0.25, "interval": 1, **knobs}))
    for _ in range(times):
        pace.spend(check, step)
    return pace


@pytest.mark.parametrize(
    "knobs", [{}, {"interval": 7}, {"interval": 4, "warmup": 0}, {"interval": 5, "start_step": 93}]
)
def test_unstretched_the_configured_schedule_holds(knobs: dict[str, int]) -> None:
    """Warm-up, interval and start step decide, as `Config.checked` says."""
    config = Config(**knobs)  # type: ignore[arg-type]
    pace, steps = Pace(config), range(config.start_step + 1, config.start_step + 60)
    assert [pace.due(s) for s in steps] == [config.checked(s, config.start_step) for s in steps]


def test_warm_up_then_interval() -> None:
    """Ten steps of warm-up, then every twentieth step."""
    pace = Pace(Config(warmup=10, interval=20))
    assert [s for s in range(1, 61) if pace.due(s)] == [*range(1, 11), 20, 40, 60]


def test_slow_past_the_budget_only() -> None:
    """A cost of exactly the budget is within it; the next larger one is not."""
    assert not spent(0.25).slow
    assert spent(0.2500001).slow


def test_not_slow_before_the_window_is_full() -> None:
    """A few expensive checks, as at a start, are no trend."""
    assert not spent(10.0, times=WINDOW - 1).slow
    assert spent(10.0, times=WINDOW).slow


def test_one_slow_check_among_cheap_ones_is_no_reason() -> None:
    """The cost is averaged over the window, so a page fault does not stretch anything."""
    pace = spent(0.125, times=WINDOW - 1)
    pace.spend(1.0, 1.0)
    assert not pace.slow


def test_old_checks_leave_the_window() -> None:
    """Expensive checks are forgotten once a window of cheap ones has followed."""
    pace = spent(10.0)
    for _ in range(WINDOW):
        pace.spend(0.0, 1.0)
    assert not pace.slow


def test_without_a_budget_never_slow() -> None:
    """Unset, `max_overhead` lets checks cost what they cost."""
    assert not spent(10.0, max_overhead=None).slow


def test_a_check_stands_for_all_steps_of_its_interval() -> None:
    """At every fourth step, a check may take four times as much of one step."""
    assert not spent(1.0, interval=4).slow
    assert spent(1.01, interval=4).slow


def test_a_step_of_unknown_length_is_left_out() -> None:
    """The first step has no time; a check after it says nothing about the share."""
    assert not spent(10.0, step=0.0).slow


def test_stretching_doubles_the_interval() -> None:
    """Each stretch halves the checks, and says so with the new interval and the budget."""
    pace = spent(1.0, interval=3)
    note = pace.stretch()
    assert pace.interval == 6
    assert "every 6 steps" in note
    assert "25.00%" in note


def test_stretching_ends_the_warm_up() -> None:
    """Only multiples of the new interval are due, within the first steps too."""
    pace = spent(1.0, interval=1, warmup=10)
    pace.stretch()
    assert [s for s in range(1, 9) if pace.due(s)] == [2, 4, 6, 8]


def test_after_a_stretch_the_window_fills_anew() -> None:
    """Costs of the old interval are no evidence about the new one."""
    pace = spent(10.0)
    pace.stretch()
    assert not pace.slow


def test_a_stretched_pace_can_be_slow_again() -> None:
    """Costs that are still too high stretch once more, by the budget of the longer interval."""
    pace = spent(10.0)
    pace.stretch()
    for _ in range(WINDOW):
        pace.spend(0.51, 1.0)
    assert pace.slow


def test_the_interval_is_bounded() -> None:
    """However slow, the group is checked every `LONGEST` steps, and stops asking for less."""
    pace = Pace(Config(max_overhead=0.01))
    for _ in range(20):
        pace.stretch()
    assert pace.interval == LONGEST
    for _ in range(WINDOW):
        pace.spend(1e6, 1.0)
    assert not pace.slow


def test_ranks_that_stretch_together_stay_together() -> None:
    """The schedule depends on the number of stretches, not on what was spent here."""
    slow, fast = spent(10.0), spent(0.0)
    for pace in (slow, fast):
        pace.stretch()
    assert [slow.due(s) for s in range(100)] == [fast.due(s) for s in range(100)]
