"""A short soak: what a process holds does not grow with the number of checks.

The long one is a program, `tests/chaos/soak.py`; its figures are in docs/reliability.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.soak import Held, growth, soak
from tests.dist._harness import RankPool

CHECKS = 1500

LEAK = 16384
"""Bytes a check that the counterpart keeps: 12 MiB over the second half, where 1 MiB is allowed."""

MEMORY_KIB = 1024
"""Growth allowed over the second half, in KiB: of the allocator, not of tpwatch. A leak of one event line a check,
some 800 bytes, would show as 600."""


def leaky(rank: int, checks: int, out: str) -> list[Held]:
    """The same soak in a process that keeps something at every check."""
    from tests.chaos import _hosts

    kept: list[bytearray] = []
    normal = _hosts.normal

    def keep(*args: Any, **kwargs: Any) -> Any:
        kept.append(bytearray(LEAK))
        return normal(*args, **kwargs)

    _hosts.normal = keep
    try:
        return soak(rank, checks, out, faulty=False, guard="before_update")
    finally:
        _hosts.normal = normal


@pytest.fixture
def fresh_ranks() -> Iterator[Callable[..., list[Any]]]:
    """As `gloo_ranks`, in new processes: one that ran other tests has free memory in which a leak would not show."""
    pool = RankPool()
    yield pool.run
    pool.close()


@pytest.mark.parametrize(("faulty", "guard"), [(False, "before_update"), (True, "deferred")], ids=str)
def test_checks_leave_nothing_behind(
    faulty: bool,  # noqa: FBT001 - a parameter of the test
    guard: str,
    tmp_path: Path,
    fresh_ranks: Callable[..., list[Any]],
) -> None:
    """Prompt and healthy, deferred with a fault that lasts: no growth over the second half, on both ranks."""
    for table in fresh_ranks(2, soak, CHECKS, str(tmp_path), faulty, guard, timeout=90):
        grown = growth(table)
        assert grown["files"] == grown["threads"] == 0, table
        assert grown["memory_kib"] <= MEMORY_KIB, table


def test_a_leak_would_show(tmp_path: Path, fresh_ranks: Callable[..., list[Any]]) -> None:
    """The counterpart of the test above: what is kept at every check is seen."""
    for table in fresh_ranks(2, leaky, CHECKS, str(tmp_path), timeout=90):
        assert growth(table)["memory_kib"] > MEMORY_KIB
