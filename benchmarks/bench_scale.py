"""What grows with what: parameters, ranks of a replica group, ranks of the job, memory.

    OMP_NUM_THREADS=1 python benchmarks/bench_scale.py [--smoke]

Measured:

- "scale_parameters": a check at two ranks against the number of parameters, of 16 and of 1,024 elements.
- "scale_group": a check of 1,000 parameters over 2 to 8 processes, beside its two all-reduces alone. More processes
  than cores wait for each other.
- "scale_world": a check in one process whose group of 8 to 10,000 ranks is torch's fake one: local work only.
- "scale_attach": the two meetings of all ranks at attach, through a real TCPStore; ranks are threads of one process.
- "scale_memory": building a monitor, and in the note the bytes it holds and its high-water mark.

Modelled, where this machine ends:

- An all-reduce of b bytes over p ranks takes 2 * ceil(log2 p) * alpha + 2 * (p - 1) / p * b / bandwidth: recursive
  halving and doubling, the best that is known for these sizes, without congestion. `LINKS` holds what is assumed; the
  first one is fitted to the all-reduces of this machine. A check is two of them, over its own replica group: groups
  work side by side, and the size of the job is not in the formula. "A group of 10,000" is the worst case, every
  parameter a replica on every rank.
- Attach takes time in proportion to the ranks, since one leader reads every rank's word: the time a rank took in the
  largest job measured is continued to 10,000. The threads share one interpreter lock with the leader, which real ranks
  do not, so this is an upper bound; but ranks that wait ask the store again and again, and the note says how many such
  questions it would have to answer.
"""

from __future__ import annotations

import gc
import math
import re
import statistics
import threading
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _harness import Subject, measure
from _ranks import Checks, Record, Replicas, checks, finish_together, import_megatron, launch, now, payload, smoke

from tpwatch.handshake import _POLL_LONGEST as LONGEST_POLL
from tpwatch.handshake import Meeting, default_store

COUNTS = (100, 300, 1000, 3000, 10000)
GROUPS = (2, 3, 4, 6, 8)
WORLDS = (8, 100, 1000, 10000)
STORE_RANKS = (8, 32, 128, 256)
ASKING, QUESTIONS = 4, 1000
LINKS = {"NVLink": (5e-6, 200e9), "InfiniBand 400 Gb/s": (10e-6, 40e9)}
"""Assumed latency of one message in seconds, and bandwidth per rank in bytes a second."""


def allreduce(ranks: int, size: int, alpha: float, bandwidth: float) -> float:
    """Modelled seconds of an all-reduce of `size` bytes over `ranks` ranks."""
    return 2 * math.ceil(math.log2(ranks)) * alpha + 2 * (ranks - 1) / ranks * size / bandwidth


# --- parameters, ranks of the group --------------------------------------------------------------


def parameters(rank: int, date: str, tiny: bool) -> None:  # noqa: FBT001
    """A check against the number of parameters."""
    note = (
        "TP2. The slope over the small ones is the cost of a parameter as such, over the large ones that of its bytes."
    )
    report = Record("scale_parameters", note, rank=rank, date=date, tiny=tiny)
    for numel in (16, 1024):
        subjects = []
        for count in (10, 20) if tiny else COUNTS:
            replicas = Replicas(count, numel)
            check = finish_together(checks(replicas, rank, 2))
            subjects.append(Subject(f"{count:,} parameters", check, replicas.nbytes + replicas.payload))
        report.case(f"a check, parameters of {numel:,} elements", subjects, rounds=1 if tiny else 15)


def group(rank: int, world: int, date: str, tiny: bool) -> None:  # noqa: FBT001
    """A check over `world` processes, and its all-reduces alone."""
    report = Record("scale_group", "1,000 parameters of 4 KiB.", rank=rank, date=date, tiny=tiny)
    replicas = Replicas(20 if tiny else 1000, 1024)
    buffer = torch.zeros(payload(replicas.count) // 8, dtype=torch.float64)

    def exchange() -> None:
        for _ in range(2):
            dist.all_reduce(buffer, op=dist.ReduceOp.MAX)

    subjects = [
        Subject("a check", finish_together(checks(replicas, rank, world)), replicas.nbytes + replicas.payload),
        Subject("its two all-reduces", finish_together(exchange), replicas.payload),
    ]
    report.case(f"{world} processes", subjects, rounds=1 if tiny else 11)


# --- ranks of the job ----------------------------------------------------------------------------


def collectives(rank: int, date: str, tiny: bool) -> None:  # noqa: FBT001
    """Fit the model to this machine's all-reduces, and apply it elsewhere."""
    count = 20 if tiny else 3000
    subjects = []
    for size in (8, payload(count), 16 * payload(count)):
        buffer = torch.zeros(size // 8, dtype=torch.float64)
        call = lambda buffer=buffer: dist.all_reduce(buffer, op=dist.ReduceOp.MAX)  # noqa: E731
        subjects.append(Subject(f"{size:,} bytes", call, size))
    times = measure(subjects, rounds=1 if tiny else 51)
    small, *_, large = map(statistics.median, times.values())
    alpha, bandwidth = small / 2, subjects[-1].moved / max(large - small, 1e-9)
    fitted = f"Fitted to loopback: latency {alpha * 1e6:.0f} us, {bandwidth / 1e9:.2f} GB/s."
    assumed = "; ".join(f"{name}: {a * 1e6:.0f} us, {b / 1e9:.0f} GB/s" for name, (a, b) in LINKS.items())
    links = {"loopback": (alpha, bandwidth), **LINKS}
    note = f"{count:,} parameters: {payload(count):,} bytes a side. {fitted} Assumed: {assumed}."
    report = Record("scale_collectives", note, rank=rank, date=date, tiny=tiny)
    report.add("measured: one all-reduce, 2 ranks over loopback", times, {s.name: s.moved for s in subjects})
    times = {
        f"{name}, a group of {ranks:,}": [2 * allreduce(ranks, payload(count), *link)]
        for name, link in links.items()
        for ranks in (2, 8, 64, 10000)
    }
    sent = dict.fromkeys(times, 2 * payload(count))
    report.add("modelled: both all-reduces of a check", times, sent)


def local_work(date: str, tiny: bool) -> None:  # noqa: FBT001
    """A check in a group of any size, with a collective that does nothing."""
    from torch._C._distributed_c10d import FakeProcessGroup

    make = lambda _store, rank, size, _timeout: FakeProcessGroup._create_internal(rank, size)  # noqa: E731, SLF001
    dist.Backend.register_backend("fake", make, devices=["cpu"])
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=max(WORLDS))
    replicas = Replicas(20 if tiny else 1000, 1024)
    report = Record("scale_world", "1,000 parameters of 4 KiB, nothing is sent: local work.", date=date, tiny=tiny)
    moved = replicas.nbytes + replicas.payload
    subjects = [Subject(f"{ranks:,} ranks", checks(replicas, 0, ranks), moved) for ranks in WORLDS]
    report.case("a check on one rank of a group of", subjects, rounds=1 if tiny else 21)


def requests(_rank: int, each: int, rounds: int) -> list[float]:
    """Seconds that the job's store takes to answer every rank's `each` questions, all of them at once."""
    store = default_store()

    def ask() -> None:
        for _ in range(each):
            store.check(["tpwatch/nothing"])

    return measure([Subject("ask", finish_together(ask))], rounds)["ask"]


class Job:
    """Ranks of a job as threads, each with its own client of one TCPStore."""

    def __init__(self, size: int) -> None:
        """Connect them all."""
        self.size = size
        self._server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._stores = [dist.TCPStore("127.0.0.1", self._server.port, is_master=False) for _ in range(size)]
        self._round = 0

    def __call__(self) -> None:
        """The meetings that all ranks hold at attach: everybody's word, then "everybody is ready"."""
        self._round += 1
        threads = [threading.Thread(target=self._attach, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _attach(self, rank: int) -> None:
        hello = {"group": "tp-0", "failed": "", "version": "0", "config": "0" * 16, "out": "somewhere"}
        for name, word in (("attach", hello), ("ready", {"failed": ""})):
            meeting = Meeting(self._stores[rank], f"{name}/{self._round}", rank, range(self.size), 120.0)
            if reason := meeting.hold(word):
                raise RuntimeError(reason)
            if rank == 0 and name == "attach":
                meeting.payloads()


def attach(date: str, asked: list[float], tiny: bool) -> None:  # noqa: FBT001
    """Attach of a whole job, measured and continued; `asked`: seconds that a store took for `requests`."""
    jobs = {size: Job(size) for size in ((2, 4) if tiny else STORE_RANKS)}
    times = measure([Subject(f"{size} ranks", job) for size, job in jobs.items()], rounds=1 if tiny else 5)
    size = max(jobs)
    a_rank = statistics.median(times[f"{size} ranks"]) / size
    rate = ASKING * QUESTIONS / statistics.median(asked)
    polls = f"10,000 waiting ranks ask {10000 / LONGEST_POLL:,.0f} times a second, where a store answered {rate:,.0f}."
    note = f"Ranks are threads: an upper bound. {a_rank * 1e6:.0f} us a rank of {size}. {polls}"
    report = Record("scale_attach", note, date=date, tiny=tiny)
    report.add("measured: the meetings at attach", times, {})
    model = {f"{ranks:,} ranks": [a_rank * ranks] for ranks in (1000, 10000)}
    report.add("modelled: the meetings at attach", model, {})
    report.add("measured: the store", {f"{ASKING * QUESTIONS:,} questions, {ASKING} processes": asked}, {})


# --- memory --------------------------------------------------------------------------------------


def memory(_rank: int, count: int, traced: bool) -> dict[str, float]:  # noqa: FBT001
    """Bytes of one monitor of `count` parameters: those that it holds, and the most that it took in 30 checks.

    Python's own are traced; the peak of all memory is the kernel's high-water mark, taken without tracing.
    """
    Checks(Replicas(2, 16).monitor(0, (0, 1)))  # what is built once a process is not a monitor's
    replicas = Replicas(count, 16)
    tensors, begin = tensor_bytes(), resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    if traced:
        tracemalloc.start()
    started = time.perf_counter()
    monitor = replicas.monitor(0, (0, 1))
    seconds = time.perf_counter() - started
    check = Checks(monitor)
    held = tensor_bytes() - tensors
    for _ in range(30):
        check()
    gc.collect()
    now_held = tensor_bytes() - tensors
    python, python_peak = tracemalloc.get_traced_memory() if traced else (0, 0)
    return {
        "seconds": seconds, "held": held, "grown": now_held - held, "python": python, "python_peak": python_peak,
        "peak": resident("VmHWM") - begin,
    }  # fmt: skip


def tensor_bytes() -> int:
    """Bytes of the storages of all tensors alive."""
    gc.collect()
    storages = [t.untyped_storage() for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def resident(what: str) -> int:
    """`VmRSS` or `VmHWM` of this process, in bytes."""
    found = re.search(rf"{what}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) << 10 if found else 0


def say_memory(date: str, tiny: bool) -> None:  # noqa: FBT001
    """Measure each size in processes of its own."""
    times: dict[str, list[float]] = {}
    notes = []
    for count in (100, 200) if tiny else (1000, 10000):
        *runs, traced = [launch(1, memory, count, traced) for traced in [False] * (1 if tiny else 5) + [True]]
        notes.append(in_words(count, runs, traced))
        times[f"{count:,} parameters"] = [run["seconds"] for run in runs]
    report = Record("scale_memory", " ".join(notes), date=date, tiny=tiny)
    report.add("building a monitor", times, {})


def in_words(count: int, runs: Sequence[Mapping[str, Any]], traced: Mapping[str, Any]) -> str:
    """Bytes per replica, for the note."""
    peak = statistics.median(run["peak"] for run in runs)
    tensors, python, most = (traced[name] / count for name in ("held", "python", "python_peak"))
    return (
        f"{count:,} parameters: {tensors:,.0f} bytes a replica in tensors, {python:,.0f} in Python objects (most:"
        f" {most:,.0f}); the process grew by {peak / count:,.0f} at its high-water mark; 30 more checks added"
        f" {traced['grown']:,} bytes of tensors."
    )


def main() -> None:
    """Each part in processes of its own."""
    tiny, date = smoke(__doc__), now()
    import_megatron()
    launch(2, parameters, date, tiny)
    for world in (2,) if tiny else GROUPS:
        launch(world, group, world, date, tiny)
    launch(2, collectives, date, tiny)
    say_memory(date, tiny)
    asked = launch(ASKING, requests, QUESTIONS, 1 if tiny else 7)
    local_work(date, tiny)
    attach(date, asked, tiny)


if __name__ == "__main__":
    main()
