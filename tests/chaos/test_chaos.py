"""Seeded faults in real processes: whatever happens to one rank, tpwatch keeps its promises.

A profile of runs is part of the ordinary suite. The nightly one is larger, and any single run can be repeated:

    TPWATCH_TEST_CHAOS=nightly python -m pytest tests/chaos/test_chaos.py
    TPWATCH_TEST_CHAOS=plain-17,megatron-3 python -m pytest tests/chaos/test_chaos.py
"""

from __future__ import annotations

import os

import pytest

from tests.chaos._judge import broken, story
from tests.chaos._runs import Nurseries
from tests.chaos._schedule import LONG, SHORT, Scenario, profile


def _parameter(scenario: Scenario) -> object:
    marks = [pytest.mark.megatron] if scenario.host == "megatron" else []
    words = "-".join(filter(None, (scenario.name, scenario.kind, scenario.point)))
    return pytest.param(scenario, id=words, marks=marks)


KNOWN = {
    "a buffer that cannot be sealed": Scenario(
        dp=2, kind="inner-error", point="seal", rank=3, step=5, config={"guard": "deferred", "handshake_timeout": LONG}
    ),
    "a group that is off at the end": Scenario(
        dp=2, kind="inner-error", point="observe", rank=0, step=2, config={"handshake_timeout": LONG}
    ),
    "a result that one rank cannot read": Scenario(
        kind="inner-error", point="readback", rank=1, step=3, config={"handshake_timeout": LONG}
    ),
    "no memory for a gather": Scenario(
        kind="inner-error", point="memory", rank=1, step=2, faulty=True, config={"handshake_timeout": LONG}
    ),
    "the store is gone before an attach": Scenario(
        kind="killed", point="before-attach", rank=0, config={"handshake_timeout": SHORT}
    ),
    "the store is gone in the middle of an attach": Scenario(
        kind="killed", point="in-attach", rank=0, config={"handshake_timeout": SHORT}
    ),
}
"""Runs that once broke a promise, or nearly."""


@pytest.mark.parametrize("name", KNOWN)
def test_what_went_wrong_once_does_not_again(name: str, chaos: Nurseries) -> None:
    """The same promises, for runs that are kept whatever the schedule becomes."""
    scenario = KNOWN[name]
    run = chaos.run(scenario)
    wrong = broken(run, chaos.unwatched(scenario))
    assert run.fired
    assert not wrong, "\n".join([*wrong, story(run)])


@pytest.mark.parametrize("scenario", [_parameter(s) for s in profile(os.environ.get("TPWATCH_TEST_CHAOS", ""))])
def test_promises_hold(scenario: Scenario, chaos: Nurseries) -> None:
    """No hang, the trainer's own end, ranks that act together, readable events, no invented finding, the same bits."""
    plain = chaos.unwatched(scenario)
    run = chaos.run(scenario)
    wrong = broken(run, plain)
    assert not wrong, "\n".join([*wrong, story(run)])
