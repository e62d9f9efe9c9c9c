"""What is in the pictures: one faulty run, and a Prometheus, an Alertmanager and a collector that hear of it.

Knows the lab's launcher and the servers of the tests; not what is drawn.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml

from tests.export._servers import Receiver, Stack, fetch, receiver, stack, wait_until
from tpwatch.lab.launch import Workers

RUN = "pipeline-demo"
STEPS, ONSET = 100, 40
"""Steps of the run, and the one at which its fault begins."""

RANKS, GROUPS = 4, 2
LOG = "training.log"
PATIENCE = 300.0
"""Seconds that training may take on a busy machine."""


@dataclass(frozen=True)
class Scene:
    """The servers, and the run after its last step: its processes wait, its series go on."""

    stack: Stack
    directory: Path
    """Has the run directory and W&B's offline run."""
    collector: Receiver
    """What was sent by OTLP."""
    since: float
    """Unix time at which training began."""
    until: float
    """Unix time of the last step."""
    workers: Workers

    @property
    def run(self) -> Path:
        """The run directory."""
        return self.directory / RUN

    def ask(self, expression: str, *, now: bool) -> Sequence[Mapping[str, Any]]:
        """Series that Prometheus answers with, as of the last step or from the first to the last."""
        if now:
            path, times = "query", {"time": self.until}
        else:
            path, times = "query_range", {"start": self.since, "end": self.until, "step": 1.0}
        query = urlencode({"query": expression, **times})
        answer = json.loads(fetch(f"{self.stack.prometheus}/api/v1/{path}?{query}"))
        return list(answer["data"]["result"])

    def end_run(self) -> None:
        """Let the processes end in order.

        Raises:
            RuntimeError: one of them failed.
        """
        for process in self.workers.processes:
            if process.stdin:
                process.stdin.close()
        if code := self.workers.wait(60.0):
            raise _failure(self.directory, code)


@contextmanager
def scene(directory: Path) -> Iterator[Scene]:
    """Start the servers, train, and wait until Prometheus has the last step and Alertmanager has notified.

    Raises:
        RuntimeError: the run ended before its last step.
    """
    with ExitStack() as cleanup:
        servers = cleanup.enter_context(stack(directory))
        collector = cleanup.enter_context(receiver())
        config = directory / "tpwatch.yaml"
        config.write_text(yaml.safe_dump(_settings(servers, collector)))
        log = cleanup.enter_context((directory / LOG).open("wb"))
        arguments = (Path(__file__).with_name("trainer.py"), directory / RUN, config, STEPS, ONSET)
        workers = cleanup.enter_context(Workers([sys.executable, *map(str, arguments)], RANKS, log))

        def reached(step: int) -> bool:
            if (code := workers.poll()) is not None:
                raise _failure(directory, code)
            return len(servers.query(f"tpwatch_last_check_step >= {step}")) == GROUPS

        deadline = time.monotonic() + PATIENCE
        wait_until(lambda: reached(1), "the first step", deadline)
        since = time.time()
        wait_until(lambda: reached(STEPS), "the last step", deadline)
        until = time.time()
        wait_until(servers.hook.alerts, "a notification", deadline)
        yield Scene(servers, directory, collector, since, until, workers)


def _failure(directory: Path, code: int) -> RuntimeError:
    return RuntimeError(f"the run ended with {code}:\n{(directory / LOG).read_text()[-3000:]}")


def _settings(servers: Stack, collector: Receiver) -> Mapping[str, Any]:
    """Every sink on."""
    return {
        "on_fault": "log",
        "prometheus": {"enabled": True, "file_sd": str(servers.targets)},
        "wandb": {"enabled": True},
        "tensorboard": {"enabled": True},
        "otel": {"enabled": True, "endpoint": collector.url, "interval": 5.0},
    }
