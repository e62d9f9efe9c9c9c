"""Fifty steps of real Megatron-core are the same to the last bit with tpwatch, without it, and with it now and then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.chaos._judge import broken, story, unchanged
from tests.chaos._runs import Nurseries, Run
from tests.chaos._schedule import Scenario

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(240)]

STEPS = 50

TRAININGS = {
    "fp32": Scenario(host="megatron", steps=STEPS),
    "bf16": Scenario(host="megatron", steps=STEPS, precision="bf16"),
    "fp32-distributed": Scenario(host="megatron", steps=STEPS, dp=2, distributed_optimizer=True),
    "bf16-distributed": Scenario(host="megatron", steps=STEPS, dp=2, distributed_optimizer=True, precision="bf16"),
}
"""Each precision with Megatron's own optimizer (bf16 keeps FP32 masters) and with the one that shards."""


def watched(chaos: Nurseries, training: Scenario, **event: object) -> tuple[Run, Run]:
    """The training with tpwatch and the same without."""
    scenario = replace(training, config={"handshake_timeout": 60.0}, **event)
    return chaos.run(scenario), chaos.unwatched(scenario)


@pytest.mark.parametrize("name", TRAININGS)
def test_watched_training_is_bit_identical(name: str, chaos: Nurseries) -> None:
    """Every loss and every weight on every rank, over fifty checked steps."""
    run, plain = watched(chaos, TRAININGS[name])
    assert not broken(run, plain), story(run)
    assert [len(run.steps(rank)) for rank in run.ranks] == [STEPS] * run.scenario.world
    assert run.steps(0)[STEPS]["reported"] == STEPS
    assert plain.steps(0)[STEPS]["reported"] == 0


@pytest.mark.parametrize("name", TRAININGS)
def test_detaching_and_attaching_again_changes_no_bit(name: str, chaos: Nurseries) -> None:
    """Watched, two steps unwatched, watched again."""
    run, plain = watched(chaos, TRAININGS[name], kind="reattached", point="all-ranks", step=25)
    assert not broken(run, plain), story(run)
    on = [step for step in range(1, STEPS + 1) if run.steps(0)[step]["on"]]
    assert on == [step for step in range(1, STEPS + 1) if step not in (25, 26)]


def test_precisions_and_seeds_do_differ(chaos: Nurseries) -> None:
    """Equal losses mean something: another precision has others, and they change from step to step."""
    fp32, bf16 = (chaos.unwatched(TRAININGS[name]) for name in ("fp32", "bf16"))
    assert list(unchanged(fp32, bf16))
    losses = [note["loss"] for note in fp32.steps(0).values()]
    assert len(set(losses)) == STEPS
