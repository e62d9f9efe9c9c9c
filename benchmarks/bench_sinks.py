"""What training feels of the sinks: a GPT watched every step, without a sink and with every one of them on.

    OMP_NUM_THREADS=1 python benchmarks/bench_sinks.py [--smoke]

The model, the blocks that take turns and the two figures are those of `bench_step_overhead`. "every sink": Prometheus
(HTTP, scraped every 5 seconds, and a textfile), TensorBoard, OpenTelemetry to a collector on loopback, and Weights &
Biases (offline) in the run of a trainer that logs its loss every step, watched or not. With Weights & Biases all ranks
of the job meet at every checked step, just before the update: that and the hand-over of events are calls from the
training thread, and inside "all hooks". The benchmark stops if the meeting was not held.

What the sinks then do happens on threads of the process that trains: the interpreter's lock is what they compete for.
What the processor time of all other threads of rank 0 grows by, gloo's among them, is the work of the sinks, and the
most that it can take from the training thread. The collector and the scraper are a process of their own,
which on a machine of two cores takes from both ranks.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import statistics
import sys
import threading
import time
import urllib.request
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist
from _harness import Subject, measure
from _ranks import POINTS, Record, launch, now, payload, scratch, smoke
from bench_step_overhead import INSIDE, SECOND, TIMED, TINY, WARM, Modes, Training, by_round, in_words

PACKAGES = ("opentelemetry", "prometheus_client", "tensorboard", "wandb")
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
    names = list(training.inside)
    times = measure([Subject(mode, partial(training.train, mode)) for mode in names], rounds, calls, untimed=0)
    training.leave()
    count, watched, _ = training.replicated()
    inside = by_round(training.inside, calls)
    added = {
        "inside tpwatch": inside,
        "of that where the job meets": by_round(training.meeting, calls),
        "inside on the rank that waited less": by_round(least_of_ranks(training.inside), calls),
        "processor time of other threads": by_round(training.beside, calls),
    }
    note = f"TP2. {in_words(times, training)} {growth(times[names[0]], added)}"
    report = Record("step_overhead_sinks", note, rank=rank, date=date, tiny=tiny)
    moved = dict.fromkeys(names, POINTS * watched + 2 * payload(count))
    report.add(f"GPT, {count} replicated", times, moved)
    report.add(INSIDE, {"a step, no sink": times[names[0]], **inside}, moved)
    run.finish()


def least_of_ranks(seconds: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """In every step the least of all ranks: of the one that waited less for the others. A collective."""
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, seconds)
    return {mode: [min(taken) for taken in zip(*(of[mode] for of in of_all), strict=True)] for mode in seconds}


def growth(steps: Sequence[float], added: Mapping[str, Mapping[str, list[float]]]) -> str:
    """What the sinks add to an average step, in several respects."""
    said = []
    for name, modes in added.items():
        without, every = modes.values()
        grown = sorted(b - a for a, b in zip(without, every, strict=True))
        share = statistics.median(grown) / statistics.median(steps)
        ends = f"rounds {grown[0] * 1e3:+.2f} to {grown[-1] * 1e3:+.2f}"
        said.append(f"{name} {statistics.median(grown) * 1e3:+.2f} ms ({share:+.3%}; {ends})")
    return f"Every sink adds: {', '.join(said)}."


def main() -> None:
    """Everything a rank needs is imported before the fork."""
    tiny, date = smoke(__doc__), now()
    if missing := [package for package in PACKAGES if find_spec(package) is None]:
        sys.exit(f"needs {', '.join(missing)}")
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
