"""What the adapter remembers between checks, it forgets as soon as the host changes anything."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from tpwatch.exchange import OUTSIDE

pytestmark = pytest.mark.megatron

WHOLE = frozenset({0})


def source(*parameters: torch.nn.Parameter, owned: int = 4) -> Any:
    """A source of parameters of chunk 0, of whose gradients this rank owns the first `owned` elements."""
    from tpwatch.adapters.megatron import MegatronSource
    from tpwatch.adapters.megatron_params import Parameter
    from tpwatch.discover import Candidate

    facts = {"shape": (4,), "dtype": "float32", "replicated": True, "rule": "sum"}
    return MegatronSource(
        [Parameter(p, 0, Candidate(str(i), grad_start=0, grad_stop=owned, **facts)) for i, p in enumerate(parameters)],
        None,
    )


def parameter(*, main_grad: bool = True) -> torch.nn.Parameter:
    """A parameter of four elements, with DDP's gradient or without."""
    made = torch.nn.Parameter(torch.zeros(4))
    if main_grad:
        made.main_grad = torch.ones(4)
    return made


def test_gradients_are_those_of_the_buffer_each_time() -> None:
    """Two looks in a row hand out the very tensor that DDP reduces."""
    watched = parameter()
    kept = source(watched)
    for _ in range(2):
        look = kept.look(WHOLE)
        assert look.gradients[0] is watched.main_grad
        assert list(look.present) == [1.0]


def test_another_buffer_is_seen() -> None:
    """After DDP has been rebuilt the old buffer means nothing."""
    watched = parameter()
    kept = source(watched)
    kept.look(WHOLE)
    watched.main_grad = torch.full((4,), 2.0)
    assert kept.look(WHOLE).gradients[0] is watched.main_grad


def test_a_gradient_that_vanishes_is_absent() -> None:
    """`main_grad = None` is no gradient, and no reason to fall back on `.grad`."""
    watched = parameter()
    watched.grad = torch.ones(4)
    kept = source(watched)
    kept.look(WHOLE)
    watched.main_grad = None
    look = kept.look(WHOLE)
    assert (look.gradients, list(look.present)) == ([None], [0.0])


def test_freezing_and_thawing_are_seen() -> None:
    """A frozen parameter has no gradient although its buffer is there."""
    watched = parameter()
    kept = source(watched)
    present = []
    for trainable in (True, False, True):
        watched.requires_grad_(trainable)
        present += kept.look(WHOLE).present
    assert present == [1.0, 0.0, 1.0]


def test_another_scope_is_seen() -> None:
    """A finalizer call that does not handle the chunk has nothing to show."""
    kept = source(parameter())
    present = [*kept.look(WHOLE).present, *kept.look(frozenset({1})).present, *kept.look(WHOLE).present]
    assert present == [1.0, OUTSIDE, 1.0]


def test_scopes_that_alternate_are_looked_at_once() -> None:
    """The chunks of a virtual pipeline take turns; each has its look from the first round on."""
    kept = source(parameter())
    scopes = (WHOLE, frozenset({1}), frozenset({0, 1}))
    first, second = ([kept.look(scope) for scope in scopes] for _ in range(2))
    assert all(a is b for a, b in zip(first, second, strict=True))


def test_a_parameter_that_is_frozen_now_and_then_is_looked_at_once_each_way() -> None:
    """Freezing and thawing in turn makes no new looks."""
    watched = parameter()
    kept = source(watched)
    looks = []
    for trainable in (True, False, True, False):
        watched.requires_grad_(trainable)
        looks.append(kept.look(WHOLE))
    assert looks[0] is looks[2]
    assert looks[1] is looks[3]


def test_looks_are_few_and_let_old_buffers_go() -> None:
    """However many scopes there are, few are kept, and none of them outlives the gradients it was made from."""
    watched = parameter()
    kept = source(watched)
    for chunk in range(1, 30):
        kept.look(frozenset({0, chunk}))
    assert len(kept._looks) <= 8
    old = weakref.ref(watched.main_grad)
    watched.main_grad = torch.ones(4)
    kept.look(WHOLE)
    gc.collect()
    assert old() is None


def test_a_buffer_that_is_taken_away_is_let_go() -> None:
    """Once DDP's attribute is gone, nothing here holds what it named."""
    watched = parameter()
    kept = source(watched)
    kept.look(WHOLE)
    old = weakref.ref(watched.main_grad)
    del watched.main_grad
    kept.look(WHOLE)
    gc.collect()
    assert old() is None


def test_a_plain_gradient_is_read_anew_and_let_go() -> None:
    """Outside DDP every step makes a new `.grad`; the old one must be free to go."""
    watched = parameter(main_grad=False)
    watched.grad = torch.ones(4)
    kept = source(watched, parameter())
    kept.look(WHOLE)
    old = weakref.ref(watched.grad)
    watched.grad = torch.full((4,), 2.0)
    gc.collect()
    assert old() is None
    assert kept.look(WHOLE).gradients[0] is watched.grad


def test_only_the_owned_part_of_a_gradient_is_looked_at() -> None:
    """A sharded optimizer reduces into its own slice only."""
    watched = parameter()
    (gradient,) = source(watched, owned=3).look(WHOLE).gradients
    assert gradient.data_ptr() == watched.main_grad.data_ptr()
    assert gradient.shape == (3,)


def test_a_swapped_storage_is_read_anew() -> None:
    """`param.data = ...` leaves the parameter and replaces what it holds."""
    watched, other = parameter(), parameter()
    kept = source(watched, other)
    before = list(kept.values())
    watched.data = torch.full((4,), 3.0)
    after = kept.values()
    assert after[0].tolist() == [3.0] * 4
    assert after[1] is before[1]
