"""The training script of a chaos run, as one rank runs it: attach, train, finish, and keep a diary.

It ends as a script does: by its own end, its own exception or exit code, or by tpwatch's stop.
"""

from __future__ import annotations

import gc
import hashlib
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tpwatch
from tests.chaos._events import Diary, Events
from tests.chaos._hosts import GROUP_TIMEOUT, Training, build
from tests.chaos._schedule import SAVES, Scenario
from tpwatch.act import ABORT_EXIT_CODE
from tpwatch.watch import Watch

PAUSE = 2
"""Steps without a watch, where it is detached and attached again."""


@dataclass(frozen=True, slots=True)
class Order:
    """What one rank is told."""

    scenario: Scenario
    rank: int
    port: int
    out: Path
    """Directory of this chaos run; the run directory of tpwatch is `run` in it."""
    watch: bool


def play(order: Order) -> None:
    """Run one rank to its end, whichever it is."""
    scenario, rank = order.scenario, order.rank
    diary = Diary(order.out / f"rank{rank}.jsonl")
    events = Events(scenario, rank, diary)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(scenario.world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(order.port)
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)  # a fork has a seed of its own
    dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    script = Script(order, events, build(scenario, events))
    try:
        script.train()
    except tpwatch.ReplicaFault as fault:
        diary.note("stopped", step=fault.step, during=events.step)
        sys.exit(ABORT_EXIT_CODE)
    diary.note("done", weights=script.training.weights(), **script.closing())
    dist.destroy_process_group()


class Script:
    """The loop of the script."""

    def __init__(self, order: Order, events: Events, training: Training) -> None:
        self.order = order
        self.scenario = order.scenario
        self.events = events
        self.training = training
        self.watch: Watch | None = None
        self.ending = 0.0
        """Seconds that finishing took."""

    def train(self) -> None:
        """All steps; whatever ends them ends the watch as well, as `tpwatch.run` does it."""
        self.events.at("before-attach")
        self._attach()
        try:
            for number in range(1, self.scenario.steps + 1):
                self._step(number)
            self.events.step = self.scenario.steps + 1
            self.events.at("before-finish")
            started = time.monotonic()
            if self.watch:
                self.watch.finish()
            self.ending = time.monotonic() - started
        except BaseException:
            if self.watch:
                self.watch.abandon()
            raise

    def _step(self, number: int) -> None:
        self.events.step = number
        if self.scenario.kind == "reattached":
            self._come_and_go(number)
        self.events.strike_disk(self.watch.monitor if self.watch else None)
        loss = self.training.step(number)
        self.events.diary.note("step", step=number, loss=loss.hex(), state=self.training.state(), **self._seen())
        if number in SAVES:
            self._checkpoint(number)

    def _checkpoint(self, number: int) -> None:
        """Save as a trainer does that goes on without a checkpoint which tpwatch refuses."""
        folder = self.order.out / f"checkpoint-{number}"
        folder.mkdir(exist_ok=True)
        try:
            if self.watch:
                self.watch.before_save()
        except tpwatch.ReplicaFault:
            self.events.diary.note("refused", step=number)
            return
        dist.barrier()
        if self.watch:
            self.watch.after_save(folder)

    def _come_and_go(self, number: int) -> None:
        if self.watch and number == self.scenario.step:
            self.events.fire()
            self.watch.detach()
        elif self.watch and number == self.scenario.step + PAUSE:
            self._attach(number - 1)

    def _attach(self, start_step: int = 0) -> None:
        missing = self.events.mine and self.scenario.point == "missing"
        if not self.order.watch or missing:
            return
        out = self.order.out / "run"
        self.events.prepare(out)
        self.watch = self.training.attach({**self.events.knobs(), "out": str(out), "start_step": start_step})
        self.events.diary.note("attached", on=self.watch.enabled, reason=self.watch.reason)
        self.watch.save_before_abort(self._save)
        if self.watch.monitor:
            self.events.arm(self.watch.monitor)

    def _save(self, step: int) -> None:
        """A trainer's own save function is a collective."""
        dist.barrier()
        self.events.diary.note("saved", step=step)

    def _seen(self) -> dict[str, Any]:
        """What this rank has of tpwatch after a step."""
        if self.watch is None:
            return {"on": False, "collectives": 0, "reported": 0}
        report = self.watch.last_report
        count = self.watch.monitor.parts.exchange.collectives if self.watch.monitor else 0
        return {"on": self.watch.enabled, "collectives": count, "reported": report.step if report else 0}

    def closing(self) -> dict[str, Any]:
        """What this rank has found, and the state of the process that tpwatch must not have touched, at the end."""
        found = self.watch.findings if self.watch else []
        names = sorted([f.kind, f.parameter] for f in found)
        return {"findings": names, "process": global_state(), "ending": self.ending}


def global_state() -> str:
    """Random number generators, precision and determinism of this process, hashed."""
    parts = [
        torch.get_rng_state().numpy().tobytes(), random.getstate(), torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(), torch.get_num_threads(),
        torch.get_default_dtype(), torch.is_grad_enabled(), sys.flags, gc.isenabled(), gc.get_threshold(),
        signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM),
    ]  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()
