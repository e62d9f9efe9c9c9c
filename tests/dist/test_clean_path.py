"""What a check of healthy replicas costs in memory: no copy of a parameter or gradient, no growth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.dist._parts import Gradients, Rig, normal, rig
from tpwatch.config import Config
from tpwatch.fingerprint import availability
from tpwatch.fingerprint.reference import _BLOCK

Ranks = Callable[..., list[Any]]

NATIVE = {name: (usable, why) for name, usable, why in availability("cpu")}["native"]

BIG = 3 * 2**20
"""Elements of each big tensor: 12 MB in float32, six times the block that the reference reads."""

COPIES = ("aten::copy_", "aten::clone", "aten::contiguous", "aten::_to_copy", "aten::cat")


@dataclass(frozen=True)
class Cost:
    """What the profiler saw of one checked step on one rank."""

    copied: int
    """Elements of the largest operand of a copy."""
    largest: int
    """Bytes of the largest single allocation."""
    kept: int
    """Bytes allocated less bytes freed."""


def big_rig(fingerprint: str, steps: int) -> Rig:
    """A monitor of big tensors of several dtypes that has done `steps` steps."""
    parameters = [
        normal(1, BIG),
        normal(2, BIG // 1024, 1024).bfloat16(),
        normal(3, 17),
    ]
    gradients: Gradients = [normal(4, BIG), normal(5, BIG // 1024, 1024).bfloat16(), normal(6, 17)]
    watched = rig(parameters, gradients, Config(fingerprint=fingerprint))
    for step in range(1, steps + 1):
        watched.step(step)
    return watched


def cost_of(call: Callable[[], None]) -> Cost:
    """Profile a call."""
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, record_shapes=True, profile_memory=True) as profiled:
        call()
    copied, largest, kept = 0, 0, 0
    for event in profiled.events():
        if event.name in COPIES:
            sizes = [torch.Size(s).numel() for s in event.input_shapes if s]
            copied = max([copied, *sizes])
        # Every allocation and release is charged to the innermost operation, or to "[memory]".
        largest = max(largest, event.self_cpu_memory_usage)
        kept += event.self_cpu_memory_usage
    return Cost(copied, largest, kept)


def checked_step(rank: int, fingerprint: str) -> tuple[Cost, list[str], int]:
    """Profile the second step; its cost, the findings, and the collectives."""
    del rank
    watched = big_rig(fingerprint, 1)
    before = watched.exchange.collectives
    cost = cost_of(lambda: watched.step(2))
    kinds = [f.kind for f in watched.findings]
    return cost, kinds, watched.exchange.collectives - before


@pytest.mark.skipif(not NATIVE[0], reason=NATIVE[1])
def test_the_compiled_kernel_copies_nothing(gloo_ranks: Ranks) -> None:
    """No copy and no allocation on the clean path is anywhere near the size of a tensor."""
    for cost, findings, collectives in gloo_ranks(2, checked_step, "native", timeout=60):
        assert (findings, collectives) == ([], 2)
        assert cost.copied < 1000
        assert cost.largest < 10_000
        assert cost.kept < 10_000


def test_the_reference_copies_no_tensor(gloo_ranks: Ranks) -> None:
    """It reads block by block: temporaries of a block in float64, none of a tensor."""
    for cost, findings, collectives in gloo_ranks(2, checked_step, "reference", timeout=60):
        assert (findings, collectives) == ([], 2)
        assert cost.copied <= _BLOCK * 4 < BIG  # a block of float32, as bytes
        assert cost.largest <= _BLOCK * 8 < BIG * 4  # a block in float64
        assert cost.kept < 10_000


def test_the_batched_fallback_copies_no_tensor(gloo_ranks: Ranks) -> None:
    """Its staging buffer is kept from step to step and smaller than a tensor."""
    for cost, findings, collectives in gloo_ranks(2, checked_step, "packed", timeout=60):
        assert (findings, collectives) == ([], 2)
        assert cost.copied < BIG
        assert cost.largest < BIG * 4
        assert cost.kept < 10_000


def growth(rank: int, guard: str) -> list[int]:
    """Bytes kept by each of six steps after the fourth, of many small replicas."""
    del rank
    parameters = [normal(i, 64) for i in range(200)]
    gradients: Gradients = [normal(1000 + i, 64) for i in range(200)]
    watched = rig(parameters, gradients, Config(guard=guard))
    for step in range(1, 5):
        watched.step(step)
    kept = [cost_of(lambda s=step: watched.step(s)).kept for step in range(5, 11)]
    watched.monitor.close()
    return kept


@pytest.mark.parametrize("guard", ["before_update", "deferred"])
def test_memory_does_not_grow_with_steps(guard: str, gloo_ranks: Ranks) -> None:
    """What a steady step allocates it gives back."""
    for kept in gloo_ranks(2, growth, guard, timeout=60):
        assert abs(sum(kept)) < 2048


def clones_are_seen(rank: int) -> Cost:
    """Profile a step around which someone does copy a big gradient."""
    del rank
    watched = big_rig("packed", 1)
    held: list[torch.Tensor] = []

    def step() -> None:
        watched.step(2)
        held.append(watched.source.parameters[0].clone())

    return cost_of(step)


def test_the_measurement_sees_a_copy(gloo_ranks: Ranks) -> None:
    """The counterpart of the tests above: one clone of one tensor shows in all three numbers."""
    (cost,) = gloo_ranks(1, clones_are_seen, timeout=60)
    assert cost.copied >= BIG
    assert cost.largest >= BIG * 4
    assert cost.kept >= BIG * 4


def released(rank: int) -> list[bool]:
    """Whether gradients can be freed after a prompt, a deep and a deferred step."""
    import weakref

    free = []
    for guard, apart in (("before_update", 0.0), ("before_update", 1.0), ("deferred", 1.0)):
        watched = rig([normal(1, 64)], [None], Config(guard=guard))
        for step in (1, 2):
            watched.source.gradients = [normal(step, 64) + apart * rank]
            watched.step(step)
        gradient = weakref.ref(watched.source.gradients[0])  # type: ignore[type-var]
        watched.source.gradients = [None]
        free.append(gradient() is None)
        watched.monitor.close()
    return free


def test_no_gradient_is_kept_alive(gloo_ranks: Ranks) -> None:
    """After the step the framework's gradients are free to go, flagged or not, read or not."""
    assert gloo_ranks(2, released, timeout=60) == [[True] * 3] * 2
