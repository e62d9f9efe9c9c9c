"""Starts the processes of lab runs on this machine, and leaves none behind.

Knows: which entries can share processes, and how a process learns its rank. Must not know: torch,
Megatron, what a run finds.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from tpwatch.lab import catalog

TIMED_OUT = 124
"""Exit code of a launch that ran past its time, as of timeout(1)."""

GRACE = 5.0
"""Seconds the other processes get to end by themselves once one has failed, or was told to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Entries of the catalogue to train in one layout."""

    faults: tuple[str, ...]
    """Names from the catalogue."""

    out: Path
    """Run directory of a single entry; of several, the directory that holds one for each."""

    tp: int = 2
    """Tensor-parallel size."""

    dp: int | None = None
    """Data-parallel size; by default each entry's own."""

    pp: int = 1
    """Pipeline-parallel size; each stage is as deep as the entry's model."""

    steps: int = 6
    """Training steps."""

    fixed: bool = False
    """Apply the upstream fix."""

    seed: int | None = None
    """Seed of weights and data; by default each entry's own."""

    config: Path | None = None
    """YAML configuration of tpwatch."""

    watch: bool = True
    """Attach tpwatch."""

    losses: Path | None = None
    """File for exact losses and hashes of the weights; for entries that share their processes."""

    timeout: float = 300.0
    """Seconds that one set of processes may take."""


def launch(job: Job, output: IO[bytes] | int | None = None) -> int:
    """Train all entries of `job`, one set of processes after the other; the first non-zero code.

    The processes write to `output` (by default this process's own). A set that fails does not keep
    the next from running. A code of `TIMED_OUT` says that a set was ended by its timeout.

    Raises:
        ConfigError: a name is not in the catalogue, or a size does not divide.
    """
    codes = []
    for names in pools(job):
        with workers(job, names, output) as running:
            codes.append(running.wait(job.timeout))
    return next((code for code in codes if code), 0)


def workers(job: Job, names: Sequence[str], output: IO[bytes] | int | None = None) -> Workers:
    """The processes of one of the `pools` of a job, not started yet."""
    return Workers(_command(job, names), _world(job, names[0]), output)


def pools(job: Job) -> list[tuple[str, ...]]:
    """Split the entries of a job into those that can share processes, in order of appearance.

    The number of ranks and Transformer Engine are fixed for a process; an entry that may wedge its
    processes gets its own.
    """
    shared: dict[object, list[str]] = {}
    for name in job.faults:
        entry = catalog.get(name)
        alone = name if entry.wedges and not job.fixed else ""
        key = (_world(job, name), entry.transformer_engine, alone)
        shared.setdefault(key, []).append(name)
    return [tuple(names) for names in shared.values()]


def missing(name: str) -> str:
    """What has to be installed before this entry can run; empty if nothing."""
    if importlib.util.find_spec("megatron") is None:
        return "megatron-core (extra lab)"
    entry = catalog.get(name)
    if entry.transformer_engine and importlib.util.find_spec("transformer_engine") is None:
        return "transformer-engine (extra lab-te)"
    return ""


def run_directory(job: Job, name: str) -> Path:
    """Where the run of one entry of a job is written."""
    return job.out / name if len(job.faults) > 1 else job.out


class Workers:
    """The processes of one run: started on entry, gone on exit, whatever happens between."""

    def __init__(self, command: Sequence[str], world: int, output: IO[bytes] | int | None = None) -> None:
        """Prepare `world` processes of the same command, which write to `output`."""
        self._command = list(command)
        self._world = world
        self._output = output
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Workers:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        port = _free_port()
        for rank in range(self._world):
            process = subprocess.Popen(  # noqa: S603 - our own module
                self._command,
                env={**os.environ, **_environment(rank, self._world, port)},
                stdin=subprocess.PIPE,  # closes when this process dies, and the worker with it
                stdout=self._output,
                stderr=self._output,
            )
            self.processes.append(process)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def poll(self) -> int | None:
        """The exit code once all have ended, or one has failed; None as long as they run."""
        codes = [process.poll() for process in self.processes]
        failed = next((code for code in codes if code), None)
        if failed is not None:
            return failed if failed > 0 else 128 - failed
        return None if None in codes else 0

    def wait(self, timeout: float) -> int:
        """Wait for the exit code, `TIMED_OUT` after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                return TIMED_OUT
            time.sleep(0.05)
        return code

    def stop(self) -> None:
        """End what still runs: let it finish, ask it to, make it, each after `GRACE` seconds.

        Those that a failed peer left in a collective would wait for it for ever.
        """
        if any(process.poll() for process in self.processes):
            self._wait_for_all()
        for process in self.processes:
            process.terminate()
        self._wait_for_all()
        for process in self.processes:
            process.kill()
            process.wait()
            if process.stdin:
                process.stdin.close()

    def _wait_for_all(self) -> None:
        """Give the processes `GRACE` seconds, all of them together."""
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and None in [p.poll() for p in self.processes]:
            time.sleep(0.05)


def _world(job: Job, name: str) -> int:
    return catalog.get(name).at(job.tp, job.dp, pp=job.pp).world


def _command(job: Job, names: Sequence[str]) -> list[str]:
    """The command line of one process for some entries of a job."""
    out = run_directory(job, names[0]) if len(names) == 1 else job.out
    options: Mapping[str, object] = {
        "--fault": ",".join(names),
        "--tp": job.tp,
        "--dp": job.dp,
        "--pp": job.pp if job.pp > 1 else None,
        "--steps": job.steps,
        "--out": out,
        "--seed": job.seed,
        "--config": job.config,
        "--losses": job.losses,
    }
    flags = {"--end-with-stdin": True, "--fixed": job.fixed, "--no-watch": not job.watch}
    given = [f"{key}={value}" for key, value in options.items() if value is not None]
    chosen = [key for key, value in flags.items() if value]
    return [sys.executable, "-m", "tpwatch.lab.worker", *given, *chosen]


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What torch.distributed reads, on loopback; and no CUDA device, even where there is one."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
