"""Ranks of a benchmark as forked processes, replicas for them to watch, and a report that only rank 0 writes.

A benchmark imports what it needs and then forks, so that a rank costs no second import of torch. Nothing but imports
may happen before: no process group, no thread.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _harness import Report, Result, Subject, measure

from tpwatch._guard import Guard
from tpwatch.config import Config
from tpwatch.diagnose import Diagnosis
from tpwatch.discover import Candidate
from tpwatch.exchange import HEADER, Exchange
from tpwatch.export.recorder import Silent
from tpwatch.fingerprint import choose
from tpwatch.fingerprint.layout import HEAD
from tpwatch.handshake import Assembly
from tpwatch.monitor import Monitor
from tpwatch.parts import Parts
from tpwatch.records import ReplicaSpec, WatchPlan

CPU = torch.device("cpu")
WHOLE = frozenset({0})
POINTS = 3
"""Observation points of a check: values, gradients before, gradients after the reduction."""

SETTLED = 8
"""Checks after which a healthy parameter is settled and costs no more Python."""


def smoke(description: str | None) -> bool:
    """Read the command line: `--smoke` runs everything once, tiny, and records nothing."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, one round, nothing recorded")
    return bool(parser.parse_args().smoke)


def now() -> str:
    """The date that all cases of one run share."""
    return dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")


class Record(Report):
    """A report that all ranks take part in and rank 0 writes; a smoke run leaves no line in the CSV."""

    def __init__(self, benchmark: str, note: str, *, rank: int = 0, date: str = "", tiny: bool = False) -> None:
        """Start a run; reports of one benchmark with the same `date` belong together."""
        self._rank = rank
        if rank == 0:
            super().__init__(benchmark, note, **({"path": Path(os.devnull)} if tiny else {}))
            print(note)
            self._date = date or self._date

    def case(self, name: str, subjects: Sequence[Subject], rounds: int = 11, calls: int = 1) -> dict[str, Result]:
        """As `Report.case`; ranks other than 0 do the same work and return nothing."""
        if self._rank == 0:
            return super().case(name, subjects, rounds, calls)
        measure(subjects, rounds, calls)
        return {}

    def add(
        self, name: str, times: Mapping[str, list[float]], moved: Mapping[str, int], base: str = ""
    ) -> dict[str, Result]:
        """As `Report.add`, on rank 0."""
        return super().add(name, times, moved, base) if self._rank == 0 else {}


# --- ranks -------------------------------------------------------------------------------------


def import_megatron() -> None:
    """Import the adapter and with it Megatron-core, before the fork; without remarks on packages it does without."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("tpwatch.adapters.megatron")


def launch(world: int, work: Callable[..., Any], *args: Any, timeout: float = 3600.0) -> Any:  # noqa: ANN401
    """Run `work(rank, *args)` in `world` forked processes over gloo; return what rank 0 returned.

    Ends the program if a rank fails, or all have not ended after `timeout` seconds.
    """
    sys.stdout.flush()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    meet = {"init_method": f"tcp://127.0.0.1:{_free_port()}", "world_size": world}
    ranks = [context.Process(target=_rank, args=(r, meet, theirs, lambda r: work(r, *args))) for r in range(world)]
    for process in ranks:
        process.start()
    theirs.close()
    try:
        return _result(ours, ranks, time.monotonic() + timeout)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _rank(rank: int, meet: Mapping[str, Any], pipe: Connection, work: Callable[[int], Any]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", rank=rank, **meet)
    result = work(rank)
    dist.barrier()
    if rank == 0:
        pipe.send(result)
    dist.destroy_process_group()


def _result(pipe: Connection, ranks: Sequence[multiprocessing.process.BaseProcess], deadline: float) -> Any:  # noqa: ANN401
    while not pipe.poll(0.05):
        if any(process.exitcode for process in ranks):
            sys.exit("a rank failed")
        if time.monotonic() > deadline:
            sys.exit("the ranks did not end in time")
    return pipe.recv()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- replicas ----------------------------------------------------------------------------------


class Replicas:
    """`count` float32 parameters of `numel` elements with gradients, as Megatron-core lays them out."""

    def __init__(self, count: int, numel: int) -> None:
        """Values and gradients are the same on every rank: healthy replicas."""
        # Importing Megatron-core takes seconds, and has to wait for the stand-ins where those are used.
        from tpwatch.adapters.megatron_params import Parameter

        self.count, self.numel = count, numel
        self.parameters = [torch.nn.Parameter(torch.randn(numel)) for _ in range(count)]
        for parameter in self.parameters:
            parameter.main_grad = torch.randn(numel)
        self.found = [Parameter(p, 0, self._candidate(i)) for i, p in enumerate(self.parameters)]

    def _candidate(self, index: int) -> Candidate:
        return Candidate(
            name=f"layers.{index}.weight",
            shape=(self.numel,),
            dtype="float32",
            grad_start=0,
            grad_stop=self.numel,
            replicated=True,
            rule="none",
        )

    @property
    def nbytes(self) -> int:
        """Bytes that a check must read: every tensor once at each point."""
        return POINTS * 4 * self.count * self.numel

    @property
    def payload(self) -> int:
        """Bytes that a check sends to the all-reduces of both sides."""
        return 2 * payload(self.count)

    @property
    def points(self) -> list[list[torch.Tensor]]:
        """The tensors at each observation point."""
        values = [p.detach() for p in self.parameters]
        gradients = [p.main_grad for p in self.parameters]
        return [values, gradients, gradients]

    def monitor(self, rank: int, ranks: Sequence[int]) -> Monitor:
        """A monitor over the default group that watches these replicas through the Megatron-core adapter."""
        from tpwatch.adapters.megatron import MegatronSource

        specs = [
            ReplicaSpec(c.name, c.shape, c.dtype, c.grad_start, c.grad_stop, c.rule)
            for c in (p.candidate for p in self.found)
        ]
        plan, config = WatchPlan("tp", tuple(ranks), tuple(specs)), Config()
        parts = Parts(
            plan=plan,
            source=MegatronSource(self.found, None),
            exchange=Exchange(None),
            assembly=Assembly(1, ranks[rank], plan.ranks, config.handshake_timeout),
            group_rank=rank,
            fingerprinter=choose(CPU),
            diagnosis=Diagnosis(plan, config),
            recorder=Silent(),
            device=CPU,
        )
        return Monitor(parts, config, Guard(config.max_errors, debug=True))


def payload(count: int) -> int:
    """Bytes of the buffer of one side: 208 for each of `count` replicas, and the header."""
    return 2 * 8 * (count * (2 * HEAD + 3) + len(HEADER))


class Checks:
    """Whole checks of one monitor, one a call: both sides and the verdict; settled before the first is timed."""

    def __init__(self, monitor: Monitor) -> None:
        """Bring the monitor into its steady state. A collective."""
        self.monitor = monitor
        self._step = 0
        for _ in range(SETTLED):
            self()

    def __call__(self) -> None:
        """One checked step, without the step."""
        self._step += 1
        self.monitor.before_reduction(self._step, 1, WHOLE)
        self.monitor.after_reduction()
        self.monitor.end_of_step()
        if self.monitor.parts.diagnosis.findings or not self.monitor.watching:
            sys.exit("the replicas of a benchmark must be healthy")


def checks(replicas: Replicas, rank: int, world: int) -> Checks:
    """Checks of `replicas` over the default group of `world` ranks."""
    return Checks(replicas.monitor(rank, range(world)))


def finish_together(call: Callable[[], object]) -> Callable[[], None]:
    """`call` and a barrier: the work is done when the slowest rank has done it."""

    def both() -> None:
        call()
        dist.barrier()

    return both


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder for run directories, gone with the benchmark."""
    return tempfile.TemporaryDirectory(prefix="tpwatch-bench-")
