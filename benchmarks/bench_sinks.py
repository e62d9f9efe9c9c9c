"""What training feels of the sinks: a GPT watched every step, without a sink and with every one of them on.

    OMP_NUM_THREADS=1 python benchmarks/bench_sinks.py [--smoke]

The model, the blocks that take turns and the two figures are those of `bench_step_overhead`. "every sink": Prometheus
(HTTP, scraped every 5 seconds, and a textfile), TensorBoard, OpenTelemetry to a collector on loopback, and Weights &
Biases (offline) in the run of a trainer that logs its loss every step. With Weights & Biases all ranks of the job meet
at every checked step; that is part of the price, and inside tpwatch's own calls only where they wait.

What the sinks do happens on threads of the process that trains: the interpreter's lock is what they compete for. The
collector and the scraper are a process of their own, which on a machine of two cores takes from both ranks.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import threading
import time
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist
from _harness import Subject, measure
from _ranks import POINTS, Record, launch, now, payload, scratch, smoke
from bench_step_overhead import SECOND, TIMED, TINY, WARM, Modes, Training, in_words

SCRAPE_SECONDS = 5.0
KNOBS = {"interval": 1, "deep_interval": 10}


class Collector(BaseHTTPRequestHandler):
    """Takes what OTLP sends and says yes."""

    def do_POST(self) -> None:
        """Read the request whole, as a collector would."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the overridden method
        """Say nothing."""


def backend(pipe: Connection, targets: Path) -> None:
    """A collector on a port of its own, told through the pipe, and a scraper of every target that shows up."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pipe.send(server.server_port)
    while True:
        time.sleep(SCRAPE_SECONDS)
        for path in targets.glob("*.json"):
            with suppress(OSError, ValueError, LookupError):  # gone since, or being written
                target = json.loads(path.read_text())[0]["targets"][0]
                urllib.request.urlopen(f"http://{target}/metrics", timeout=1).read()


@contextmanager
def backends(targets: Path) -> Iterator[int]:
    """The port of the collector, for as long as it lives."""
    ours, theirs = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=backend, args=(theirs, targets), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.kill()


def modes(folder: Path, port: int) -> Modes:
    """Without a sink, and with every one."""
    prometheus = {"enabled": True, "port": 0, "file_sd": str(folder / "targets"), "textfile": str(folder / "textfile")}
    sinks = {
        "prometheus": prometheus,
        "tensorboard": {"enabled": True},
        "otel": {"enabled": True, "endpoint": f"http://127.0.0.1:{port}", "interval": SCRAPE_SECONDS},
        "wandb": {"enabled": True, "rank": 0},
    }
    return {"every step": KNOBS, "every step, every sink": {**KNOBS, **sinks}}


class Logged:
    """A run whose trainer logs the loss of every step, on rank 0."""

    def __init__(self, run: Any, folder: Path) -> None:  # noqa: ANN401 - a TrainingRun
        """Open the tracker's run."""
        self._run, self._tracker = run, None
        self.chunks, self.optimizer, self.close = run.chunks, run.optimizer, run.close
        if dist.get_rank() == 0:
            import wandb

            self._tracker = wandb.init(mode="offline", dir=folder, settings=wandb.Settings(silent=True))

    def step(self, index: int) -> float:
        """One step of training, logged."""
        loss: float = self._run.step(index)
        if self._tracker is not None:
            self._tracker.log({"loss": loss}, step=index)
        return loss

    def finish(self) -> None:
        """Close the tracker's run."""
        if self._tracker is not None:
            self._tracker.finish()


def steps(rank: int, date: str, folder: Path, port: int, tiny: bool) -> None:  # noqa: FBT001
    """Both modes, in one set of processes."""
    from tpwatch.lab.model import build

    logging.getLogger("tpwatch").setLevel(logging.ERROR)
    rounds, calls, warm = (1, 2, 1) if tiny else (5, TIMED, WARM)
    run = Logged(build(TINY if tiny else SECOND), folder)
    training = Training(run, modes(folder, port), folder / "runs", warm)
    names = list(training.spent)
    times = measure([Subject(mode, partial(training.train, mode)) for mode in names], rounds, calls)
    training.leave()
    count, watched, _ = training.replicated()
    note = f"TP2. {in_words(times, training.spent, calls)}"
    report = Record("step_overhead_sinks", note, rank=rank, date=date, tiny=tiny)
    report.add(f"GPT, {count} replicated", times, dict.fromkeys(names, POINTS * watched + 2 * payload(count)))
    run.finish()


def main() -> None:
    """Everything a rank needs is imported before the fork."""
    tiny, date = smoke(__doc__), now()
    warnings.simplefilter("ignore")  # Megatron's remarks about packages it does without
    logging.getLogger("megatron").setLevel(logging.ERROR)
    os.environ["WANDB_SILENT"] = "true"
    with scratch() as name, backends(Path(name) / "targets") as port:
        from tpwatch.lab import cpu

        cpu.install()
        import tpwatch.adapters.megatron
        import tpwatch.lab.model  # noqa: F401 - both before the fork, so that ranks share them

        launch(2, steps, date, Path(name), port, tiny)


if __name__ == "__main__":
    main()
