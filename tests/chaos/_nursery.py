r"""Forks the ranks of chaos runs from a process that has imported everything once.

    python -m tests.chaos._nursery plain|megatron

One request a line on standard input, one answer a line on standard output. A rank is a process of its own with its own
exit, which may be a kill -9; one that outlives the limit says where it is, is killed and answered with null.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import logging
import os
import signal
import socket
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from tests.chaos._schedule import Scenario
from tests.chaos._trainer import Order, play


def main() -> None:
    """Serve until standard input closes; in a fork, be the rank instead."""
    _warm_up(sys.argv[1])
    _say({"ready": True})
    while line := sys.stdin.readline():
        order = _serve(json.loads(line))
        if order is not None:
            play(order)
            return


def _warm_up(host: str) -> None:
    """Import what every rank needs. Nothing may be started: a fork takes no threads along."""
    if host != "megatron":
        return
    warnings.simplefilter("ignore")  # the host's remarks about packages it does without
    logging.getLogger("megatron").setLevel(logging.ERROR)
    from tpwatch.lab import cpu

    cpu.install()
    for module in ("tpwatch.adapters.megatron", "tpwatch.lab.model", "tpwatch.lab.faults.per_layer_embedding"):
        importlib.import_module(module)


def _serve(request: dict[str, Any]) -> Order | None:
    """Start the ranks of one run and answer how they ended; in a rank, return its orders."""
    scenario = Scenario(**request["scenario"])
    out, port, started = Path(request["out"]), _free_port(), time.monotonic()
    pids: list[int] = []
    for rank in range(scenario.world):
        pid = os.fork()
        if not pid:
            _become_rank(out / f"rank{rank}.out")
            return Order(scenario, rank, port, out, request["watch"])
        pids.append(pid)
    codes = _wait_for(pids, started + request["limit"])
    _say({"codes": codes, "seconds": time.monotonic() - started})
    return None


def _become_rank(output: Path) -> None:
    """Let go of the nursery's streams: this process now writes to a file of its own."""
    faulthandler.register(signal.SIGUSR1)
    nothing, own = os.open(os.devnull, os.O_RDONLY), os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(nothing, 0)
    os.dup2(own, 1)
    os.dup2(own, 2)


def _wait_for(pids: list[int], deadline: float) -> list[int | None]:
    """Exit code of each process, negative for one ended by a signal; null for one that had to be killed."""
    codes: dict[int, int | None] = {}
    while len(codes) < len(pids) and time.monotonic() < deadline:
        for pid in set(pids) - set(codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    for ask, pause in ((signal.SIGUSR1, 0.3), (signal.SIGKILL, 0.0)):
        for pid in set(pids) - set(codes):
            os.kill(pid, ask)
        time.sleep(pause if len(codes) < len(pids) else 0.0)
    for pid in set(pids) - set(codes):
        os.waitpid(pid, 0)
    return [codes.get(pid) for pid in pids]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
