"""Parameters that come into a model after attach are noticed once, at no cost to steps in which nothing comes."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch.nn.modules import module as modules

from tpwatch.adapters import megatron_changes
from tpwatch.adapters.megatron_changes import NAMED, Changes


@pytest.fixture
def model() -> torch.nn.Sequential:
    """Two layers."""
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))


@pytest.fixture
def changes(model: torch.nn.Sequential) -> Iterator[Changes]:
    """What looks after it."""
    made = Changes([model])
    yield made
    made.remove()


def test_nothing_is_said_of_a_model_that_stays(model: torch.nn.Sequential, changes: Changes) -> None:
    """Other values, other storage, another gradient: the parameters are the same."""
    model[0].weight.data = model[0].weight.data.clone()
    model[0].weight.grad = torch.ones(2, 2)
    assert changes.look() == ""


def test_a_parameter_and_a_module_are_noticed_once(model: torch.nn.Sequential, changes: Changes) -> None:
    """Wherever in the model, and also where a module brings its own parameters along."""
    model[0].extra = torch.nn.Parameter(torch.ones(1))
    model.append(torch.nn.Linear(1, 1, bias=False))
    assert changes.look().endswith("the model as it is): 0.extra, 2.weight")
    assert changes.look() == ""


def test_what_takes_the_place_of_another_is_called_replaced(model: torch.nn.Sequential, changes: Changes) -> None:
    """The name is known, the tensor is not."""
    model[1].bias = torch.nn.Parameter(torch.zeros(2))
    assert changes.look().startswith("replaced after attach and not watched")
    assert changes.look() == ""


def test_a_replaced_parameter_that_is_gone_hides_no_other(model: torch.nn.Sequential, changes: Changes) -> None:
    """A tensor may get the address of one that has been freed."""
    for _ in range(20):
        model[1].bias = torch.nn.Parameter(torch.zeros(2))
        gc.collect()
        assert changes.look().endswith(": 1.bias")


def test_of_many_only_some_are_named(model: torch.nn.Sequential, changes: Changes) -> None:
    """A note is one line."""
    for i in range(NAMED + 3):
        model[0].register_parameter(f"p{i}", torch.nn.Parameter(torch.ones(1)))
    assert changes.look().endswith(f"0.p{NAMED - 1} and 3 more")


def test_another_model_is_none_of_our_business(changes: Changes) -> None:
    """Modules are built all over the process."""
    torch.nn.Linear(3, 3)
    assert changes.look() == ""


def test_a_step_in_which_nothing_came_does_not_walk_the_model(
    changes: Changes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large model has thousands of parameters."""
    monkeypatch.setattr(megatron_changes, "named_parameters", pytest.fail)
    assert changes.look() == ""


def test_torch_is_left_as_it_was(model: torch.nn.Sequential) -> None:
    """The hooks are gone with the one who looks."""
    before = [dict(modules._global_parameter_registration_hooks), dict(modules._global_module_registration_hooks)]
    Changes([model]).remove()
    assert [modules._global_parameter_registration_hooks, modules._global_module_registration_hooks] == before
