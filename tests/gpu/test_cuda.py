"""The monitor and its kernel on a device: rows, exchanges over gloo and NCCL, and a host that never waits.

`python -m pytest -m gpu tests/gpu` runs what needs a card. The tests of whole checks run on the CPU as well, so that
what they say of a card is code that has been run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist._parts import normal, rig, summed
from tests.unit import test_fingerprint_parity as parity
from tpwatch.config import Config
from tpwatch.fingerprint import choose
from tpwatch.fingerprint.layout import HEAD, ROW
from tpwatch.fingerprint.reference import VALUE_DTYPES

GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
STEPS = 6
REPLICAS = 20


def on_card(tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The same tensors on the card, with their strides and odd starts: whole storages are copied."""
    moved: list[torch.Tensor | None] = []
    for tensor in tensors:
        if tensor is None:
            moved.append(None)
            continue
        storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.detach().untyped_storage()).cuda()
        moved.append(storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
    return moved


@contextlib.contextmanager
def waiting_is_an_error(device: str) -> Iterator[None]:
    """On a card, raise where the host would wait for it; on the CPU there is nothing to wait for."""
    if device == "cpu":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ------------------------------------------------------------------------------------------- the kernel


@GPU
@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
@pytest.mark.parametrize("cases", [parity.of_every_size, parity.with_values, parity.of_awkward_layout])
def test_values_on_a_card_agree_with_the_reference(
    cases: Callable[[torch.dtype], Iterator[torch.Tensor]], dtype: torch.dtype
) -> None:
    """Integer columns bit for bit, the others within their bound, and the same from run to run."""
    host: list[torch.Tensor | None] = [None, *cases(dtype)]
    card, kernel = on_card(host), choose("cuda")
    rows = [torch.full((len(host), ROW), torch.nan, dtype=torch.float64, device="cuda") for _ in range(2)]
    for out in rows:
        kernel.rows(card, out)
    assert kernel.name == "triton"
    assert parity.disagreements(host, rows[0].cpu()) == []
    assert torch.equal(*rows)


@GPU
@pytest.mark.parametrize("dtype", parity.RAW_DTYPES, ids=str)
def test_raw_bytes_on_a_card_agree_with_the_reference(dtype: torch.dtype) -> None:
    """Integers, bool and float8 have the reference's hash and zeros elsewhere."""
    host: list[torch.Tensor | None] = list(parity.raw(dtype))
    out = torch.empty(len(host), ROW, dtype=torch.float64, device="cuda")
    choose("cuda").rows(on_card(host), out)
    assert torch.equal(out.cpu(), parity.reference_rows(host))


@pytest.mark.parametrize("device", DEVICES)
def test_fingerprints_never_wait(device: str) -> None:
    """Not even where storages move at every call, as gradients do."""
    kernel = choose(device)
    tensors: list[torch.Tensor | None] = [normal(i, 5000).to(device) for i in range(50)]
    out = torch.empty(len(tensors), ROW, dtype=torch.float64, device=device)
    head = torch.empty(len(tensors), HEAD + 4, dtype=torch.float64, device=device)[:, :HEAD]
    for number in range(6):
        # The first ones compile, and fill the caches of pinned memory.
        with waiting_is_an_error(device) if number > 2 else contextlib.nullcontext():
            kernel.rows(tensors, out, head)
        tensors = [t + 1 for t in tensors if t is not None]
    assert torch.isfinite(out).all()
    assert torch.equal(head, out[:, :HEAD])


# ---------------------------------------------------------------------------------------- whole checks


def deferred(rank: int, device: str, reduced: int) -> list[tuple[str, str, int]]:
    """Steps in deferred mode over gloo; only the first `reduced` partials are summed."""
    watched = rig(
        [normal(i, 40, dtype=torch.bfloat16).to(device) for i in range(4)], [None] * 4, Config(guard="deferred")
    )
    for step in range(1, STEPS + 1):
        watched.source.gradients = [normal(9 * step + 2 * i + rank, 40).to(device) for i in range(4)]
        watched.step(step, lambda gradients: summed(gradients[:reduced]))
    watched.monitor.catch_up()
    watched.monitor.close()
    return [(f.kind, f.parameter, f.first_step) for f in watched.findings]


@pytest.mark.parametrize("device", DEVICES)
def test_two_gloo_ranks_name_the_fault(device: str, gloo_ranks: Callable[..., list[Any]]) -> None:
    """One gradient of four is not summed: it alone is named, from step 1, on both ranks."""
    expected = [("missing-reduce", "p3", 1)]
    assert gloo_ranks(2, deferred, device, 3) == [expected, expected]


@pytest.mark.parametrize("device", DEVICES)
def test_two_healthy_gloo_ranks_are_left_in_peace(device: str, gloo_ranks: Callable[..., list[Any]]) -> None:
    """The counterpart: all are summed."""
    assert gloo_ranks(2, deferred, device, 4) == [[], []]


def alone(_rank: int, device: str) -> tuple[int | None, int, list[str]]:
    """Clean steps over a group of one, NCCL's on a card, where waiting is an error from the fourth step on."""
    group = dist.new_group(backend="nccl" if device == "cuda" else "gloo")
    parameters = [normal(i, 3000, dtype=torch.bfloat16).to(device) for i in range(REPLICAS)]
    watched = rig(parameters, [None] * REPLICAS, Config(guard="deferred"), group=group)
    fresh = [[normal(step * REPLICAS + i, 3000).to(device) for i in range(REPLICAS)] for step in range(STEPS)]
    for step in range(1, STEPS + 1):
        watched.source.gradients = list(fresh[step - 1])
        with waiting_is_an_error(device) if step > 3 else contextlib.nullcontext():
            watched.step(step, lambda gradients: summed(gradients, group))
    watched.monitor.catch_up()
    watched.monitor.close()
    report = watched.monitor.last_report
    return report and report.step, watched.guard.errors, [f.kind for f in watched.findings]


@pytest.mark.parametrize("device", DEVICES)
def test_the_clean_path_never_waits(device: str, gloo_ranks: Callable[..., list[Any]]) -> None:
    """Every step is checked, the last one too, and nothing on the way failed as a wait would have."""
    assert gloo_ranks(1, alone, device) == [(STEPS, 0, [])]
