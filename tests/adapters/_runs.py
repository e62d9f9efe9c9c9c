"""Runs of the lab as a user would start them, and of scripts under torchrun, with a timeout on each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpwatch.lab import catalog
from tpwatch.lab.launch import Job, _environment, _free_port, launch, run_directory

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    """How the processes of one run ended."""

    codes: list[int | None]
    """Exit code by rank; None: still running at the timeout, and killed."""
    seconds: list[float]
    """When each rank ended, from the start."""
    output: str = field(repr=False)


def train(job: Job) -> dict[str, dict[str, Any]]:
    """Run a job of the lab; the summaries of its run directories, by entry."""
    code = launch(job, subprocess.DEVNULL)
    if code:
        message = f"the lab ended with exit code {code}"
        raise AssertionError(message)
    return {name: summary(run_directory(job, name)) for name in job.faults}


def summary(directory: Path) -> dict[str, Any]:
    """`summary.json` of a run directory."""
    found: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return found


def events(directory: Path, kind: str) -> list[dict[str, Any]]:
    """All events of one kind, of all replica groups, in file order."""
    lines = [line for path in sorted(directory.glob("events.*.jsonl")) for line in path.read_text().splitlines()]
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def causes(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The findings that are a cause, by parameter."""
    return {f["parameter"]: f for f in found["findings"] if f["role"] == "cause"}


def faulty(name: str, watched: list[str]) -> dict[str, int]:
    """The parameters that are at fault by construction, with the first step at which each is exercised."""
    return catalog.get(name).first_steps(watched)


def watched(directory: Path) -> list[str]:
    """Names of the replicas that a run watched."""
    return [name for event in events(directory, "start") for name in event["names"]]


PORTS: list[int] = []
"""Ports handed out by `rank_environment`: the ranks of one world share one."""


def rank_environment(rank: int, world: int) -> dict[str, str]:
    """Environment of one rank of a world on loopback; rank 0 opens a new world."""
    if rank == 0:
        PORTS.append(_free_port())
    return {"PYTHONPATH": str(ROOT), **_environment(rank, world, PORTS[-1])}


def ranks(
    command: list[str],
    world: int,
    *,
    env: list[dict[str, str]] | None = None,
    timeout: float = 90.0,
) -> Ended:
    """Run one Python command per rank, each with its own environment.

    Kill what outlives the timeout.
    """
    port, started = _free_port(), time.monotonic()
    extra = env or [{} for _ in range(world)]
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, "PYTHONPATH": str(ROOT), **_environment(rank, world, port), **extra[rank]},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    seconds = [timeout] * world
    while time.monotonic() - started < timeout and any(p.poll() is None for p in processes):
        time.sleep(0.05)
        for rank, process in enumerate(processes):
            if process.poll() is not None and seconds[rank] == timeout:
                seconds[rank] = time.monotonic() - started
    codes = [p.poll() for p in processes]
    for process in processes:
        process.kill()
    return Ended(codes, seconds, "".join(p.communicate()[0] for p in processes))


def worker(name: str, out: Path, steps: int = 6, *options: str, tp: int = 2) -> list[str]:
    """Command line of one lab process."""
    return [
        "-m",
        "tpwatch.lab.worker",
        f"--fault={name}",
        f"--tp={tp}",
        f"--steps={steps}",
        f"--out={out}",
        *options,
    ]
