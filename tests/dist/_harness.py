"""Run the ranks of a distributed test, as threads or as processes, so that a fault never hangs.

Two ways to run `fn(rank, *args)` once per rank, both with the default process group initialised
around the call and both returning the results in rank order:

* `run_ranks`: ranks are threads of this process over torch's threaded process group. Cheap
  (milliseconds), closures allowed; collectives copy in memory, so nothing about a transport is
  proven. Ranks share module globals and the random number generator.
* `RankPool.run`: ranks are processes over real gloo. Started once and reused, because importing
  torch takes seconds; `fn` must be a module-level function. Every run has its own store and
  its own process group.

When a rank raises, dies or does not come back in time, the caller gets one `RankFailure` that
carries the traceback of each failed rank, within seconds.

This is the only file that may import `torch.testing._internal`, which is private to torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

# How long the other ranks may take to fail for reasons of their own once one rank has failed.
GRACE_SECONDS = 1.0
# Importing torch on a busy two-core machine.
STARTUP_SECONDS = 90.0


class RankFailure(AssertionError):
    """One or more ranks raised, died or hung.

    Attributes:
        reasons: for each rank that is to blame, its traceback or what was seen instead.
    """

    def __init__(self, reasons: dict[int, str]) -> None:
        self.reasons = dict(sorted(reasons.items()))
        text = "\n".join(f"rank {rank}: {reason}" for rank, reason in self.reasons.items())
        super().__init__(text)


# --- ranks as threads --------------------------------------------------------------------------


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 20.0) -> list[Any]:
    """Run `fn(rank, *args)` once per rank as threads; return the results in rank order.

    Raises `RankFailure` if a rank raises, or is not back after `timeout` seconds. A rank that
    waits in a collective is woken; one that loops for ever is abandoned as a daemon thread.
    """
    results: dict[int, Any] = {}
    reasons: dict[int, str] = {}
    store = dist.HashStore()

    def run_one(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            results[rank] = fn(rank, *args)
            dist.destroy_process_group()
        except SystemExit:
            pass  # woken from a collective because another rank failed
        except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the caller
            reasons[rank] = traceback.format_exc()
            threaded.ProcessLocalGroup.exception_handle(error)

    with _threaded_world():
        _join_all([_start_rank(run_one, rank) for rank in range(world_size)], reasons, timeout)
    if reasons:
        raise RankFailure(reasons)
    return [results[rank] for rank in range(world_size)]


@contextlib.contextmanager
def _threaded_world() -> Iterator[None]:
    """Give every thread its own view of torch.distributed while the block runs."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # noqa: FBT003 - torch's signature
    threaded._install_threaded_pg()
    try:
        yield
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)  # noqa: FBT003 - as above


def _start_rank(target: Callable[[int], None], rank: int) -> threading.Thread:
    thread = threading.Thread(target=target, args=(rank,), name=f"rank {rank}", daemon=True)
    thread.start()
    return thread


def _join_all(threads: list[threading.Thread], reasons: dict[int, str], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    for thread in threads:
        # Once a rank has failed, the others were woken and have only the grace period left.
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(0.02)
            if reasons:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if not stuck:
        return
    threaded.ProcessLocalGroup.exception_handle(TimeoutError())
    if not reasons:
        reasons.update(dict.fromkeys(stuck, f"not back after {timeout:g} s"))
    for rank in stuck:
        threads[rank].join(GRACE_SECONDS)


# --- ranks as processes ------------------------------------------------------------------------


class RankPool:
    """Processes that are spawned once and run the ranks of one test after the other.

    The pool grows to the largest world asked for; a smaller world uses its first processes. After
    a failure the processes are killed and new ones are started by the next run, so that
    no test inherits a broken group.
    """

    def __init__(self) -> None:
        self._workers: list[_Worker] = []

    def run(self, world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Run `fn(rank, *args)` once per rank over gloo; return the results in rank order.

        `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` are set as torchrun sets
        them. Raises `RankFailure` if a rank raises, dies, or is not back after `timeout` seconds.
        """
        payload = pickle.dumps((fn, args))
        workers = self._ready_workers(world_size)
        # The store lives here, so that it outlives every rank.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank, worker in enumerate(workers):
            worker.pipe.send_bytes(pickle.dumps((rank, world_size, store.port, timeout, payload)))
        results, reasons = _collect(workers, timeout)
        if reasons:
            self.close()
            raise RankFailure(reasons)
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        """Kill the processes. The pool can be used again."""
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()
        self._workers = []

    def _ready_workers(self, count: int) -> list[_Worker]:
        if any(not worker.process.is_alive() for worker in self._workers):
            self.close()
        fresh = [_Worker() for _ in range(count - len(self._workers))]
        self._workers += fresh
        for worker in fresh:
            if not worker.pipe.poll(STARTUP_SECONDS):
                self.close()
                raise RankFailure({0: f"no process after {STARTUP_SECONDS:g} s"})
            worker.pipe.recv_bytes()
        return self._workers[:count]


class _Worker:
    """One spawned process and our end of its pipe."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()


def _collect(workers: list[_Worker], timeout: float) -> tuple[dict[int, Any], dict[int, str]]:
    """Read one answer per rank; stop soon after the first failure."""
    results: dict[int, Any] = {}
    reasons: dict[int, str] = {}
    waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
    deadline = time.monotonic() + timeout
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(waiting), left):
            rank = waiting.pop(pipe)  # type: ignore[call-overload]
            try:
                succeeded, value = pickle.loads(workers[rank].pipe.recv_bytes())  # noqa: S301 - our own worker
            except (EOFError, ConnectionResetError):
                workers[rank].process.join(GRACE_SECONDS)
                succeeded, value = False, f"died with exit code {workers[rank].process.exitcode}"
            if succeeded:
                results[rank] = value
                continue
            reasons[rank] = value
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    if waiting and not reasons:
        _dump_stacks([workers[rank] for rank in waiting.values()])
        reasons = dict.fromkeys(waiting.values(), f"not back after {timeout:g} s")
    return results, reasons


def _dump_stacks(workers: list[_Worker]) -> None:
    """Let hung ranks say on standard error where they are before they are killed."""
    for worker in workers:
        if worker.process.pid is not None:
            os.kill(worker.process.pid, signal.SIGUSR1)
    time.sleep(0.2)


def _serve(pipe: Connection) -> None:
    """Body of a worker process: answer runs until the pipe closes."""
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    pipe.send_bytes(b"ready")
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(_answer(request))


def _answer(request: bytes) -> bytes:
    """Run one request; the answer is (True, result) or (False, traceback), pickled."""
    try:
        rank, world_size, port, timeout, payload = pickle.loads(request)  # noqa: S301 - our own parent
        fn, args = pickle.loads(payload)  # noqa: S301 - as above
        with _gloo_world(rank, world_size, port, timeout):
            return pickle.dumps((True, fn(rank, *args)))
    except BaseException:  # noqa: BLE001 - whatever it is, it belongs to the caller
        return pickle.dumps((False, traceback.format_exc()))


@contextlib.contextmanager
def _gloo_world(rank: int, world_size: int, port: int, timeout: float) -> Iterator[None]:
    """The default process group of one run, and the environment torchrun would have set."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    yield
    # Not after an error: the other ranks may be inside a collective, and this process is killed.
    if dist.is_initialized():
        dist.destroy_process_group()
