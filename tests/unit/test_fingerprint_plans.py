"""Plans are kept while they hold, rebuilt when they do not, and keep no tensor alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch

from tests.unit.test_fingerprint_parity import IMPLEMENTATIONS, disagreements, rows_of
from tpwatch.fingerprint import Fingerprinter
from tpwatch.fingerprint.layout import ROW
from tpwatch.fingerprint.native import NativeFingerprinter
from tpwatch.fingerprint.packed import PackedFingerprinter


@pytest.fixture(params=IMPLEMENTATIONS)
def fingerprinter(request: pytest.FixtureRequest) -> Fingerprinter:
    """Each implementation in turn."""
    return IMPLEMENTATIONS[request.param]()


def model() -> list[torch.Tensor | None]:
    """A few tensors of different kinds, one strided."""
    return [torch.randn(300), torch.randn(7, 9).t(), None, torch.randn(70_000).bfloat16()]


def changed_in_place(tensors: list[torch.Tensor | None]) -> None:
    """An optimizer step."""
    for tensor in tensors:
        if tensor is not None:
            tensor.add_(1)


def moved(tensors: list[torch.Tensor | None]) -> None:
    """A parameter gets a new storage."""
    parameter = tensors[0]
    if parameter is not None:
        parameter.data = parameter * 2


def resized(tensors: list[torch.Tensor | None]) -> None:
    """A parameter shrinks where it lies."""
    parameter = tensors[0]
    if parameter is not None:
        parameter.data = parameter[:100]


def transposed(tensors: list[torch.Tensor | None]) -> None:
    """A parameter changes its strides where it lies."""
    tensors[0] = torch.arange(12.0).view(3, 4)
    tensors[0].data = tensors[0].t()


def reshaped(tensors: list[torch.Tensor | None]) -> None:
    """A strided tensor gets another shape of the same size."""
    tensors[1] = torch.randn(21, 3).t()


def negated(tensors: list[torch.Tensor | None]) -> None:
    """The same bytes in the same order, to be read with the opposite sign."""
    parameter = tensors[0]
    if parameter is not None:
        tensors[0] = torch._neg_view(parameter)


def retyped(tensors: list[torch.Tensor | None]) -> None:
    """The same bytes become integers."""
    parameter = tensors[0]
    if parameter is not None:
        tensors[0] = parameter.view(torch.int32)


def disappeared(tensors: list[torch.Tensor | None]) -> None:
    """A parameter is frozen; another gets its first gradient."""
    tensors[0], tensors[2] = None, torch.randn(50)


def fewer(tensors: list[torch.Tensor | None]) -> None:
    """The list gets shorter."""
    del tensors[1]


CHANGES = (changed_in_place, moved, resized, transposed, reshaped, negated, retyped, disappeared, fewer)


@pytest.mark.parametrize("change", CHANGES)
def test_rows_follow_the_tensors(
    fingerprinter: Fingerprinter, change: Callable[[list[torch.Tensor | None]], None]
) -> None:
    """Whatever happened to the tensors since the last call, the rows are those of now."""
    tensors = model()
    out = torch.empty(len(tensors), ROW, dtype=torch.float64)
    rows_of(fingerprinter, tensors, out)
    change(tensors)
    rows = rows_of(fingerprinter, tensors, out[: len(tensors)])
    assert disagreements(tensors, rows) == []


def test_two_lists_in_turn(fingerprinter: Fingerprinter) -> None:
    """Values and gradients have their own plans; each call gets its own rows."""
    values, gradients = model(), [torch.randn(5), None]
    for _ in range(3):
        changed_in_place(values)
        assert disagreements(values, rows_of(fingerprinter, values)) == []
        assert disagreements(gradients, rows_of(fingerprinter, gradients)) == []


def test_no_tensor_is_kept_alive(fingerprinter: Fingerprinter) -> None:
    """A gradient that the trainer drops is freed, its storage included."""
    gradients: list[torch.Tensor | None] = [torch.randn(300), torch.randn(200_000), torch.ones(9, 9).t()]
    storages = [weakref.ref(g.untyped_storage()) for g in gradients if g is not None]
    tensors = [weakref.ref(g) for g in gradients if g is not None]
    rows_of(fingerprinter, gradients)
    gradients.clear()
    assert [ref() for ref in tensors] == [None] * 3
    assert [ref() for ref in storages] == [None] * 3


def test_the_pointer_table_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernel's table is built once for tensors that stay what they are."""
    built = []
    make = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *a, **k: built.append(1) or make(*a, **k))
    fingerprinter = NativeFingerprinter("cpu", "test")
    tensors = model()
    out = torch.empty(len(tensors), ROW, dtype=torch.float64)
    rows_of(fingerprinter, tensors, out)
    once = len(built)
    for _ in range(5):
        changed_in_place(tensors)
        rows_of(fingerprinter, tensors, out)
    assert len(built) == once


def test_the_packed_buffer_is_bounded() -> None:
    """However large the tensors, the shared buffer of the torch fallback stays at a MB."""
    fingerprinter = PackedFingerprinter("cpu", "test")
    rows_of(fingerprinter, [torch.zeros(3_000_000), *(torch.zeros(10) for _ in range(3000))])
    assert fingerprinter._buffer.numel() == 1 << 20


def test_lists_that_alternate_keep_their_plans(fingerprinter: Fingerprinter, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunks of a virtual pipeline, one after the other into the same buffer: after one round nothing is built."""
    plans = fingerprinter._plans
    built: list[int] = []
    build = plans._build
    monkeypatch.setattr(plans, "_build", lambda tensors: built.append(1) or build(tensors))
    whole = model() + model()
    lists = [whole, [*whole[:4], *[None] * 4], [*[None] * 4, *whole[4:]]]
    out = torch.empty(len(whole), ROW, dtype=torch.float64)
    for _ in range(4):
        for tensors in lists:
            changed_in_place(tensors)
            assert disagreements(tensors, rows_of(fingerprinter, tensors, out)) == []
    assert len(built) == len(lists)


def test_of_many_lists_those_used_last_are_kept(fingerprinter: Fingerprinter) -> None:
    """A presence that never repeats makes the plans neither grow without bound nor lose the one in steady use."""
    tensors: list[torch.Tensor | None] = [torch.ones(3) for _ in range(40)]
    out = torch.empty(len(tensors), ROW, dtype=torch.float64)
    rows_of(fingerprinter, tensors, out)
    (steady,) = fingerprinter._plans._kept
    for absent in range(40):
        rows_of(fingerprinter, [*tensors[:absent], None, *tensors[absent + 1 :]], out)
        rows_of(fingerprinter, tensors, out)
        assert fingerprinter._plans._kept[-1] is steady
    assert len(fingerprinter._plans._kept) == 8


def test_plans_of_many_buffers_are_forgotten() -> None:
    """A caller that always brings new buffers does not make the plans grow without bound."""
    fingerprinter = NativeFingerprinter("cpu", "test")
    outs = [torch.empty(1, ROW, dtype=torch.float64) for _ in range(50)]
    for out in outs:
        rows_of(fingerprinter, [torch.ones(3)], out)
    assert len(fingerprinter._plans._kept) <= 8
