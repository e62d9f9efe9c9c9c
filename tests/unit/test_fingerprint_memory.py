"""What cannot be read is an ordinary error: never the end of the trainer, never a wrong row."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.unit.test_fingerprint_parity import IMPLEMENTATIONS, disagreements, rows_of
from tpwatch.errors import UnreadableTensor
from tpwatch.fingerprint import Fingerprinter, plans
from tpwatch.fingerprint.layout import CHUNK, ROW
from tpwatch.fingerprint.native import NativeFingerprinter
from tpwatch.fingerprint.reference import ReferenceFingerprinter

MAKERS = {**IMPLEMENTATIONS, "reference": lambda: ReferenceFingerprinter("cpu", "test")}


@pytest.fixture(params=MAKERS)
def fingerprinter(request: pytest.FixtureRequest) -> Fingerprinter:
    """Each implementation in turn, the specification too."""
    return MAKERS[request.param]()


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the whole": lambda x: x,
    "with an offset": lambda x: x[1000:3000],
    "transposed": lambda x: x[2000:].view(64, -1).t(),
    "every other": lambda x: x[8::2],
    "complex and conjugate": lambda x: torch.view_as_complex(x.view(-1, 2)).conj(),
    "bytes": lambda x: x.view(torch.uint8)[5:],
}


def buffer() -> torch.Tensor:
    """A gradient buffer of more than one chunk."""
    return torch.randn(CHUNK + 2000)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_freed_storage_is_an_error_each_time_until_it_is_back(
    fingerprinter: Fingerprinter, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Gradient buffers are offloaded under their views: before the first row, or after many."""
    whole = buffer()
    tensors = [torch.ones(5), None, view(whole)]
    out = torch.empty(len(tensors), ROW, dtype=torch.float64)
    size = whole.untyped_storage().nbytes()
    for _ in range(2):
        whole.untyped_storage().resize_(0)
        for _ in range(2):
            with pytest.raises(UnreadableTensor, match="holds 0 bytes"):
                rows_of(fingerprinter, tensors, out)
        whole.untyped_storage().resize_(size)
        whole.normal_()
        for _ in range(2):
            assert disagreements(tensors, rows_of(fingerprinter, tensors, out)) == []


@pytest.mark.parametrize("view", [lambda x: x[3000:], lambda x: x.view(2, -1).t()[:, :2], lambda x: x[8::9]])
def test_a_storage_that_is_too_small_is_an_error(
    fingerprinter: Fingerprinter, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """A part of it is not enough, however the elements lie."""
    whole = buffer()
    tensors = [view(whole)]
    rows_of(fingerprinter, tensors)
    whole.untyped_storage().resize_(whole.nbytes - 64)
    with pytest.raises(UnreadableTensor, match=f"{whole.nbytes} are needed"):
        rows_of(fingerprinter, tensors)


def test_views_that_repeat_elements_need_no_more_than_there_is(fingerprinter: Fingerprinter) -> None:
    """An expanded scalar has more elements than its storage."""
    tensors = [torch.ones(1).expand(5000), torch.ones(3, 1).expand(3, 7), torch.empty(0)]
    assert disagreements(tensors, rows_of(fingerprinter, tensors)) == []


def test_a_tensor_on_another_device_is_an_error(fingerprinter: Fingerprinter) -> None:
    """It is named, with both devices."""
    out = torch.empty(1, ROW, dtype=torch.float64)
    rows_of(fingerprinter, [torch.ones(1000)], out)
    with pytest.raises(UnreadableTensor, match=r"float32 \(10, 100\).* on meta, not on cpu"):
        rows_of(fingerprinter, [torch.ones(10, 100, device="meta")], out)


def test_a_tensor_without_memory_of_its_own_is_an_error(fingerprinter: Fingerprinter) -> None:
    """Subclasses that wrap other tensors say that they hold bytes, and have none."""

    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
            return NotImplemented

    hollow = torch.Tensor._make_wrapper_subclass(Wrapper, (10,), dtype=torch.float32, device="cpu")
    with pytest.raises(UnreadableTensor, match="no memory"):
        rows_of(fingerprinter, [hollow])


def test_elements_smaller_than_a_byte_are_an_error(fingerprinter: Fingerprinter) -> None:
    """Two to a byte: there are fewer bytes than elements."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them deprecated
        packed = torch.empty(10, dtype=torch.quint4x2)
    with pytest.raises(UnreadableTensor, match="holds 5 bytes, 10 are needed"):
        rows_of(fingerprinter, [packed])


def test_memory_is_asked_for_only_where_something_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """All at first, then what has another address, then nothing."""
    asked: list[int] = []
    require = plans.require_memory
    monkeypatch.setattr(plans, "require_memory", lambda ts, device: asked.append(len(ts)) or require(ts, device))
    fingerprinter = NativeFingerprinter("cpu", "test")
    tensors: list[torch.Tensor | None] = [torch.ones(10), None, torch.ones(9, 9).t(), torch.ones(11)]
    out = torch.empty(len(tensors), ROW, dtype=torch.float64)
    for step in range(6):
        if step == 3:
            tensors[3] = torch.ones(11)
        rows_of(fingerprinter, tensors, out)
    assert asked == [4, 1]


def test_a_plan_that_could_not_be_pointed_is_pointed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure between seeing new addresses and writing them down leaves no old address to be read."""
    fingerprinter = NativeFingerprinter("cpu", "test")
    out = torch.empty(1, ROW, dtype=torch.float64)
    first = torch.ones(100)
    rows_of(fingerprinter, [first], out)
    second = torch.full((100,), 2.0)
    point = fingerprinter._plans._point

    def fail(plan: Any, found: list[int]) -> None:
        point(plan, found)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(fingerprinter._plans, "_point", fail)
        with pytest.raises(MemoryError):
            rows_of(fingerprinter, [second], out)
    assert disagreements([first], rows_of(fingerprinter, [first], out)) == []
