"""Starts chaos runs through a nursery, and hands back all that is left of each.

Knows processes and files; what must hold of a run is in `_judge`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from tests.chaos._schedule import Scenario
from tests.commands import REPOSITORY

LIMIT = 60.0
"""Seconds after which a run that has not ended counts as hung; every timeout inside of it is far shorter."""

GRACE = 30.0
"""Seconds a nursery may take beyond the limit of a run, or to import what it needs."""

Note = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one chaos run left behind."""

    scenario: Scenario
    codes: Sequence[int | None]
    """Exit code by rank, negative for a signal; None: did not end by itself."""
    seconds: float = 0.0
    diaries: Sequence[Sequence[Note]] = field(repr=False)
    """What each rank said of itself; see `_trainer`."""
    outputs: Sequence[str] = field(repr=False)
    """Standard output and error of each rank."""
    directory: Path
    """The run directory of tpwatch."""

    def notes(self, what: str, rank: int) -> list[Note]:
        """The notes of one kind of one rank, in order."""
        return [note for note in self.diaries[rank] if note["what"] == what]

    def steps(self, rank: int) -> dict[int, Note]:
        """What a rank noted after each step it completed."""
        return {note["step"]: note for note in self.notes("step", rank)}

    @property
    def fired(self) -> bool:
        """True if the event came to pass."""
        return any(self.notes("fired", rank) for rank in self.ranks)

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.scenario.world)

    @property
    def struck(self) -> frozenset[int]:
        """Ranks that the event took out of the job."""
        dead = self.scenario.traits.deadly and self.fired
        return frozenset({self.scenario.rank} if dead else ())

    @property
    def living(self) -> list[int]:
        """The ranks that lived on."""
        return [rank for rank in self.ranks if rank not in self.struck]


class Nursery:
    """A process that forks ranks; see `_nursery`."""

    def __init__(self, host: str) -> None:
        """Start it; the first run waits until it has imported what it needs."""
        env = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos._nursery", host],
            cwd=REPOSITORY, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._answers: SimpleQueue[str] = SimpleQueue()
        Thread(target=self._listen, daemon=True).start()
        self._ready = False

    def run(self, scenario: Scenario, out: Path, *, watch: bool = True, limit: float = LIMIT) -> Run:
        """Run a scenario in the directory `out`, which must not exist."""
        if not self._ready:
            self._answer(4 * GRACE)
            self._ready = True
        out.mkdir(parents=True)
        request = {"scenario": asdict(scenario), "out": str(out), "watch": watch, "limit": limit}
        self._stdin.write(json.dumps(request) + "\n")
        self._stdin.flush()
        answer = self._answer(limit + GRACE)
        ranks = range(scenario.world)
        return Run(
            scenario=scenario,
            codes=answer["codes"],
            seconds=answer["seconds"],
            diaries=[_diary(out / f"rank{rank}.jsonl") for rank in ranks],
            outputs=[(out / f"rank{rank}.out").read_text(errors="replace") for rank in ranks],
            directory=out / "run",
        )

    def close(self) -> None:
        """End it."""
        self._stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stdout.close()

    @property
    def _stdin(self) -> Any:
        return self._process.stdin

    @property
    def _stdout(self) -> Any:
        return self._process.stdout

    def _listen(self) -> None:
        for line in self._stdout:
            self._answers.put(line)

    def _answer(self, timeout: float) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = json.loads(self._answers.get(timeout=timeout))
        except Empty:
            self._process.kill()
            message = f"the nursery gave no answer within {timeout:.0f} s"
            raise AssertionError(message) from None
        return answer


class Nurseries:
    """One nursery for each host, started when first asked for, and the unwatched runs to compare with."""

    def __init__(self, folder: Path) -> None:
        """`folder` is where runs are written."""
        self._folder = folder
        self._nurseries: dict[str, Nursery] = {}
        self._unwatched: dict[str, Run] = {}
        self._count = 0

    def run(self, scenario: Scenario, *, watch: bool = True) -> Run:
        """Run a scenario in a folder of its own."""
        host = scenario.host
        if host not in self._nurseries:
            self._nurseries[host] = Nursery(host)
        self._count += 1
        return self._nurseries[host].run(scenario, self._folder / f"{self._count}-{scenario.name}", watch=watch)

    def unwatched(self, scenario: Scenario) -> Run:
        """The same training without tpwatch; run once, and kept."""
        bare = scenario.unwatched()
        key = json.dumps(asdict(bare))
        if key not in self._unwatched:
            self._unwatched[key] = self.run(bare, watch=False)
        return self._unwatched[key]


@contextmanager
def nurseries(folder: Path) -> Iterator[Nurseries]:
    """Nurseries for the time of a block."""
    with ExitStack() as stack:
        opened = Nurseries(folder)
        stack.callback(lambda: [nursery.close() for nursery in opened._nurseries.values()])
        yield opened


def _diary(path: Path) -> list[Note]:
    """The notes of one rank; the last line may be cut off by a kill."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]
