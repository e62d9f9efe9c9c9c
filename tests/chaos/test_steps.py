"""Steps are those of the trainer: read where they can be, said by the script, or counted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.dist._parts import ToySeams
from tests.dist.test_session import attach, partials, toy

Ranks = Callable[..., list[Any]]


def counted(rank: int, out: str, how: str) -> list[int]:
    """Train three steps of a run that goes on after step 100; the steps that were reported."""
    model = toy()
    own = (lambda seams: 101 + seams.toy.updates) if how == "read" else ToySeams.iteration
    watch = attach(model, out)
    reported = []
    for step in (1, 2, 3):
        if how == "said":
            watch.set_step(100 + step)
        with mock.patch.object(ToySeams, "iteration", own):
            model.train(partials(model, rank, step))
        reported.append(watch.last_report.step if watch.last_report else 0)
    watch.finish()
    return reported


@pytest.mark.parametrize(
    ("how", "steps"), [("read", [101, 102, 103]), ("said", [101, 102, 103]), ("counted", [1, 2, 3])]
)
def test_steps_are_those_of_the_trainer(how: str, steps: list[int], tmp_path: Path, gloo_ranks: Ranks) -> None:
    """On every rank of the group."""
    assert gloo_ranks(2, counted, str(tmp_path), how, timeout=60) == [steps] * 2


@pytest.mark.megatron
def test_megatrons_own_count_is_read_where_its_trainer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`args.curr_iteration` counts the iterations that are done; Megatron-core alone has none."""
    from tpwatch.adapters.megatron import MegatronSeams

    seams: Any = SimpleNamespace()
    assert MegatronSeams.iteration(seams) is None
    trainer = ModuleType("double of megatron.training.global_vars")
    vars(trainer)["_GLOBAL_ARGS"] = SimpleNamespace(curr_iteration=41)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", trainer)
    assert MegatronSeams.iteration(seams) == 42
