"""The harness reports a rank that raises, dies or hangs, instead of hanging with it."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from tests.dist._harness import RankFailure, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

# Far below any timeout that is set, far above what a loaded machine needs to notice.
SOON_SECONDS = 15.0


def reduced_maximum(rank: int, scale: int) -> float:
    """Return the maximum of `rank * scale` over all ranks, by a real all-reduce."""
    tensor = torch.tensor([float(rank * scale)])
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def subgroup_sum(rank: int) -> float:
    """Return the sum of ranks over the pair of ranks that this rank belongs to."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=groups[rank // 2])
    return float(tensor)


def raise_on_last(rank: int) -> None:
    """Raise on the last rank while the others wait for it in a collective."""
    if rank == dist.get_world_size() - 1:
        message = "the planted fault"
        raise ValueError(message)
    dist.barrier()


def die_on_first(rank: int) -> None:
    """Leave without a word on rank 0 while the others wait for it."""
    if rank == 0:
        os._exit(7)
    dist.barrier()


def miss_a_collective(rank: int) -> None:
    """Join a collective that rank 0 never joins."""
    if rank == 0:
        time.sleep(3600)
    dist.barrier()


def process_id(rank: int) -> int:
    """Return the process that runs this rank."""
    del rank
    return os.getpid()


def torchrun_environment(rank: int) -> tuple[str, ...]:
    """Return what torchrun would have told this rank."""
    del rank
    return tuple(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))


def test_threads_return_results_in_rank_order() -> None:
    """Every thread gets its rank, and a closure may carry the arguments."""
    assert run_ranks(4, lambda rank: (rank, dist.get_rank())) == [(i, i) for i in range(4)]


def test_threads_reduce_over_all_ranks() -> None:
    """A collective over threads really combines the ranks."""
    assert run_ranks(3, reduced_maximum, 10) == [20.0, 20.0, 20.0]


def test_threads_have_subgroups() -> None:
    """Process groups of some of the ranks work."""
    assert run_ranks(4, subgroup_sum) == [1.0, 1.0, 5.0, 5.0]


def test_failing_thread_fails_the_caller_soon() -> None:
    """One raising rank ends the run with its traceback although the others wait for it."""
    started = time.monotonic()
    with pytest.raises(RankFailure, match="the planted fault") as caught:
        run_ranks(4, raise_on_last, timeout=600)
    assert time.monotonic() - started < SOON_SECONDS
    assert list(caught.value.reasons) == [3]


def test_threads_work_after_a_failure() -> None:
    """A failed run leaves nothing behind that the next one trips over."""
    with pytest.raises(RankFailure):
        run_ranks(2, raise_on_last)
    assert run_ranks(2, reduced_maximum, 1) == [1.0, 1.0]


def test_hanging_threads_are_reported() -> None:
    """Ranks that wait for one that never comes are named when the time is up."""
    with pytest.raises(RankFailure, match=r"not back after 0\.5 s") as caught:
        run_ranks(2, miss_a_collective, timeout=0.5)
    assert set(caught.value.reasons) == {0, 1}


def test_processes_reduce_over_gloo(gloo_ranks: Callable[..., list[Any]]) -> None:
    """Two processes combine their values through a real process group."""
    assert gloo_ranks(2, reduced_maximum, 10) == [10.0, 10.0]


def test_processes_are_reused(gloo_ranks: Callable[..., list[Any]]) -> None:
    """A second run starts no new process and still has a working group."""
    first = gloo_ranks(2, process_id)
    assert gloo_ranks(2, process_id) == first
    assert os.getpid() not in first


def test_processes_see_the_environment_of_torchrun(gloo_ranks: Callable[..., list[Any]]) -> None:
    """A script that reads its rank from the environment finds it."""
    assert gloo_ranks(2, torchrun_environment) == [("0", "0", "2"), ("1", "1", "2")]


@pytest.mark.parametrize(
    ("fn", "blamed", "reason"),
    [
        (raise_on_last, 1, "the planted fault"),
        (die_on_first, 0, "died with exit code 7"),
    ],
)
def test_failing_process_fails_the_caller_soon(
    gloo_ranks: Callable[..., list[Any]], fn: Callable[..., None], blamed: int, reason: str
) -> None:
    """A rank that raises or dies is blamed within seconds, and the next run works."""
    gloo_ranks(2, process_id)  # starting processes is not what is timed
    started = time.monotonic()
    with pytest.raises(RankFailure, match=reason) as caught:
        gloo_ranks(2, fn, timeout=600)
    assert time.monotonic() - started < SOON_SECONDS
    assert blamed in caught.value.reasons
    assert gloo_ranks(2, reduced_maximum, 3) == [3.0, 3.0]


def test_hanging_processes_are_reported(gloo_ranks: Callable[..., list[Any]]) -> None:
    """Ranks that are not back when the time is up are named, and the caller goes on."""
    gloo_ranks(2, process_id)
    with pytest.raises(RankFailure, match="not back after 2 s"):
        gloo_ranks(2, miss_a_collective, timeout=2)
