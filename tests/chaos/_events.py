"""Plays the event of a scenario on one rank: errors, kills and delays at named points, and what a disk does.

Knows the insides of a monitor by name, because that is where it strikes. Judges nothing.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.chaos._schedule import Scenario
from tpwatch.adapters.base import Adapter, Groups, Host
from tpwatch.config import Config
from tpwatch.discover import Candidate
from tpwatch.monitor import Monitor
from tpwatch.watch import Watch

SLEEP = 0.6
"""Seconds that a rank sleeps: long against a step, short against every timeout."""


class PlantedError(Exception):
    """The training script's own trouble."""


class Diary:
    """What a rank says of itself, a line at a time: it outlives the rank."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(self, what: str, **facts: object) -> None:
        """Write one line."""
        os.write(self._fd, json.dumps({"what": what, **facts}).encode() + b"\n")


class Events:
    """The event of one scenario, as this rank sees it."""

    def __init__(self, scenario: Scenario, rank: int, diary: Diary) -> None:
        self.scenario = scenario
        self.rank = rank
        self.diary = diary
        self.step = 0
        self.fired = False
        self._held: list[Any] = []
        self._kept = -1

    @property
    def mine(self) -> bool:
        """True on the rank that the event strikes."""
        return self.rank == self.scenario.rank

    def due(self, *kinds: str) -> bool:
        """True if this rank is struck by one of these kinds in this step."""
        return self.mine and self.scenario.kind in kinds and self.step >= self.scenario.step

    @property
    def lacking(self) -> bool:
        """True if this rank has no gradient in this step."""
        beside = self.scenario.kind == "absent-beside-error" and self.rank == self.scenario.beside
        return self.due("no-gradient") or (beside and self.step == self.scenario.step)

    def fire(self) -> None:
        """Write down that it happens now."""
        self.fired = True
        self.diary.note("fired", step=self.step)

    def at(self, point: str) -> None:
        """The rank comes by this point of its program: whatever is planned for it happens."""
        if point != self.scenario.point or (self.fired and not self.scenario.lasting):
            return
        if not self.due("own-error", "killed", "sleeps", "inner-error", "absent-beside-error", "attach-fails"):
            return
        self.fire()
        if self.scenario.kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.scenario.kind == "sleeps":
            time.sleep(SLEEP)
        elif self.scenario.kind == "own-error":
            self._own_error(point)
        else:
            message = f"planted inside tpwatch, at {point}"
            raise OSError(message)

    def _own_error(self, point: str) -> None:
        message = f"planted: rank {self.rank} at {point} in step {self.step}"
        if self.scenario.exit_code:
            sys.stderr.write(f"{message}\n")
            sys.exit(self.scenario.exit_code)
        raise PlantedError(message)

    # -------------------------------------------------------------------------- before attaching

    def knobs(self) -> dict[str, Any]:
        """The configuration of this rank."""
        scenario, knobs = self.scenario, dict(self.scenario.config)
        kind, point = scenario.kind, scenario.point
        if kind in ("sink-raises", "sink-waits"):
            knobs["sinks"] = (f"tests.chaos._sinks:{kind.removeprefix('sink-')}_at_{point}",)
        elif kind == "wandb-fails":
            knobs["sinks"] = (f"tests.chaos._sinks:wandb_fails_at_{point}",)
        elif point == "port-taken":
            knobs["prometheus"] = {"enabled": True, "port": self._taken_port(), "ports": 1}
        elif point == "gateway-down":
            knobs["prometheus"] = {"enabled": True, "http": False, "push_gateway": f"127.0.0.1:{_closed_port()}"}
        elif point == "other-config" and self.mine:
            knobs["patience"] = 5
        return knobs

    def _taken_port(self) -> int:
        taken = socket.create_server(("127.0.0.1", 0))
        self._held.append(taken)
        return int(taken.getsockname()[1])

    def prepare(self, out: Path) -> None:
        """What is wrong before anything is attached."""
        if self.mine and self.scenario.kind == "kill-switch":
            os.environ["TPWATCH_DISABLED"] = "1"
        if self.mine and self.scenario.point == "start":
            out.mkdir(parents=True, exist_ok=True)
            (out / f"events.tp-{self.rank}.jsonl").symlink_to("/dev/full")

    def edit(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """What the adapter found, changed on one rank for `plan-differs`."""
        if not (self.mine and self.scenario.kind == "plan-differs"):
            return candidates
        last = max(i for i, c in enumerate(candidates) if c.replicated)
        changed = {
            "sharded": replace(candidates[last], replicated=False),
            "renamed": replace(candidates[last], name="elsewhere.weight"),
            "rule": replace(candidates[last], rule="avg"),
        }
        return [*candidates[:last], changed[self.scenario.point], *candidates[last + 1 :]]

    # ------------------------------------------------------------------------------ while watched

    def arm(self, monitor: Monitor) -> None:
        """Put this rank's monitor under the event, where the event is inside of it."""
        seams = {
            "values": (monitor.parts.source, "values"),
            "look": (monitor.parts.source, "look"),
            "rows": (monitor.parts.fingerprinter, "rows"),
            "presence": (monitor._presence, "pack"),
            "seal": (monitor._buffers, "seal"),
            "reduce": (monitor.parts.exchange, "reduce_max"),
            "readback": (monitor._readback, "start"),
            "memory": (monitor._explainer, "_side"),
            "observe": (monitor, "_observe"),
            "record": (monitor.ledger._recorder, "check"),
        }
        if self.mine and self.scenario.point in seams:
            self._come_by(*seams[self.scenario.point])

    def _come_by(self, owner: object, name: str) -> None:
        original = getattr(owner, name)

        def on_the_way(*args: Any, **kwargs: Any) -> Any:
            self.at(self.scenario.point)
            return original(*args, **kwargs)

        setattr(owner, name, on_the_way)

    def strike_disk(self, monitor: Monitor | None) -> None:
        """Let the disk of the event file fill up, or have room again."""
        if self.scenario.kind != "disk-full" or not self.mine or monitor is None:
            return
        file: Any = monitor.ledger._recorder._events._file  # type: ignore[attr-defined]
        if self._kept >= 0 and self.step > self.scenario.step and file._fd >= 0:
            os.dup2(self._kept, file._fd)
            os.close(self._kept)
            self._kept = -1
        elif self.step == self.scenario.step:
            self.fire()
            if self.scenario.point == "too-large":
                monitor.ledger.note(self.step, 65536 * ".")  # or the limit would cut off the diary before
            self._fill(file)

    def _fill(self, file: Any) -> None:
        if self.scenario.point == "too-large":  # the next line is cut off within
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (file.path.stat().st_size + 40, hard))
            return
        if self.scenario.point == "a-while":
            self._kept = os.dup(file._fd)
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, file._fd)
        os.close(full)


class Disturbed:
    """A real adapter that comes by the points of an attach."""

    def __init__(self, inner: Adapter, events: Events) -> None:
        self.inner = inner
        self.events = events
        self.name = inner.name

    def group(self, groups: Groups | None) -> Any:
        """As the real one."""
        return self.inner.group(groups)

    def examine(self, model: list[Any], optimizer: Any, config: Config, groups: Groups | None) -> Host:
        """As the real one, with what the event does to it."""
        self.events.at("examine")
        host = self.inner.examine(model, optimizer, config, groups)

        def source(rows: Sequence[int]) -> Any:
            self.events.at("in-attach")
            self.events.at("source")
            return host.source(rows)

        def install(watch: Watch) -> Any:
            self.events.at("install")
            return host.install(watch)

        return replace(host, candidates=self.events.edit(host.candidates), source=source, install=install)


def _closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
