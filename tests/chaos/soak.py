r"""Soak: thousands of checks on a small model over two gloo ranks; memory, file handles and threads must stay flat.

    python -m tests.chaos.soak [--checks 20000] [--faulty] [--guard deferred] [--out DIR]

Prints, for the rank that writes and its peer, what each holds after every twentieth of the checks. The model is that of
the chaos runs, watched through the public entry; `--faulty` leaves one gradient unsummed for the whole run.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.chaos._events import Diary, Events
from tests.chaos._hosts import build
from tests.chaos._schedule import LONG, Scenario

ROWS = 20


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds after so many checks."""

    checks: int
    memory_kib: int
    """Anonymous memory that is resident: what was allocated, without the pages of libraries that come and go."""
    files: int
    threads: int
    directory_kib: int
    """Size of the run directory."""
    seconds: float


def held(checks: int, out: Path, started: float) -> Held:
    """Look at this process, after a garbage collection."""
    gc.collect()
    status = Path("/proc/self/status").read_text().splitlines()
    resident = next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))
    files, threads = (sum(1 for _ in Path("/proc/self", kind).iterdir()) for kind in ("fd", "task"))
    written = sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) // 1024
    return Held(checks, resident, files, threads, written, time.monotonic() - started)


def soak(rank: int, checks: int, out: str, faulty: bool, guard: str) -> list[Held]:  # noqa: FBT001 - called across processes
    """Train `checks` watched steps on one of two ranks; needs an initialised process group."""
    scenario = Scenario(faulty=faulty, steps=checks)
    training = build(scenario, Events(scenario, rank, Diary(Path(os.devnull))))
    run = Path(out, "run")
    watch = training.attach({"out": str(run), "guard": guard, "handshake_timeout": LONG})
    started, table = time.monotonic(), []
    for step in range(1, checks + 1):
        training.step(step)
        if step % max(1, checks // ROWS) == 0:
            table.append(held(step, run, started))
    report, found = watch.last_report, [f.kind for f in watch.findings]
    watch.finish()
    expected = ["missing-reduce"] if faulty else []
    if found != expected or report is None or report.step < checks - 1:
        message = f"watched up to {report and report.step} of {checks} checks, found {found}"
        raise AssertionError(message)
    return table


def growth(table: list[Held]) -> dict[str, int]:
    """What was held at the end, less what was held after the first half."""
    middle, last = asdict(table[len(table) // 2 - 1]), asdict(table[-1])
    return {key: last[key] - middle[key] for key in ("memory_kib", "files", "threads")}


def text(table: list[Held]) -> str:
    """The table for people."""
    head = f"{'checks':>8}{'MiB':>10}{'files':>7}{'threads':>9}{'run dir KiB':>13}{'seconds':>9}"
    rows = [
        f"{h.checks:>8}{h.memory_kib / 1024:>10.2f}{h.files:>7}{h.threads:>9}{h.directory_kib:>13}{h.seconds:>9.1f}"
        for h in table
    ]
    return "\n".join([head, *rows])


def main() -> None:
    """Fork two ranks, soak, print both tables; the exit code is that of the worse rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", type=int, default=20_000)
    parser.add_argument("--faulty", action="store_true", help="leave one gradient unsummed")
    parser.add_argument("--guard", choices=("before_update", "deferred"), default="before_update")
    parser.add_argument("--out", help="folder to keep the run directory in; by default a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tpwatch-soak-") as scratch:
        out = args.out or scratch
        peer = os.fork()
        rank = 0 if peer else 1
        torch.set_num_threads(1)
        meet = dist.FileStore(f"{scratch}/store", 2)
        dist.init_process_group("gloo", store=meet, rank=rank, world_size=2, timeout=timedelta(seconds=60))
        table = soak(rank, args.checks, out, args.faulty, args.guard)
        for turn in (0, 1):
            dist.barrier()
            if turn == rank:
                sys.stdout.write(f"rank {rank}\n{text(table)}\nsecond half: {growth(table)}\n")
                sys.stdout.flush()
        dist.barrier()
        dist.destroy_process_group()
        if not peer:
            os._exit(0)  # the folder is the other's to remove
        if os.waitpid(peer, 0)[1]:
            sys.exit(1)


if __name__ == "__main__":
    main()
