"""Agreement through the job's key-value store, without a collective.

First writer decides, everyone obeys.

Used before any tpwatch collective exists (attach), and wherever ranks must act together at a point
that no buffer header covers (final check, a lost wrapper, a finalizer that never runs). A meeting
has a timeout; a rank that is not there makes it fail for everyone, never hang. Two ranks can not
come to different conclusions: the decision is one key that `compare_set` writes once.

Knows keys and JSON; not what is being agreed on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

Payload = Mapping[str, Any]
Judge = Callable[[Mapping[int, Payload]], str]
"""Looks at the payloads so far (by rank) and returns why the meeting must fail, or an empty string."""

AMID_TRAINING = 30.0
"""Seconds that a meeting may take once training runs, and at its end: nobody waits two minutes for a monitor then."""

AT_ONCE = 5.0
"""Seconds for ranks that have just left a collective together: one that is not there by then is not coming, but waits
in a collective of the framework's, whose own timeout must not run out."""

_ON = "on"
_POLL_FIRST, _POLL_LONGEST = 0.002, 0.1


def default_store() -> Store:
    """The store that `init_process_group` used. torch has no public name for it."""
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001


@dataclass(frozen=True, slots=True)
class Meeting:
    """One named agreement between `ranks` (global); the first of them collects and proposes."""

    store: Store
    name: str
    rank: int
    ranks: Sequence[int]
    timeout: float
    """Seconds the leader waits for the others; the others wait a little longer for the leader."""

    def hold(self, payload: Payload, judge: Judge = lambda _payloads: "") -> str:
        """Post `payload` and wait for the decision.

        Empty if all agreed, else the reason, the same on every rank.
        """
        self.store.set(self._key("said", self.rank), json.dumps(payload))
        if self.rank == self.ranks[0]:
            return self._decide(self._collect(judge))
        patience = 1.25 * self.timeout + 2.0
        if self._poll((self._key("decision"),), patience):
            return self._decision()
        return self._decide(f"rank {self.ranks[0]} gave no decision within {patience:.0f} s")

    def decline(self, reason: str) -> str:
        """Make the meeting fail for everyone, at once and without waiting; the reason that stands."""
        return self._decide(reason)

    def payloads(self) -> dict[int, Payload]:
        """What every rank posted; only after a `hold` that agreed."""
        return {rank: self.payload(rank) for rank in self.ranks}

    def payload(self, rank: int) -> Payload:
        """What one rank posted, once it has."""
        said: Payload = json.loads(self.store.get(self._key("said", rank)))
        return said

    def _collect(self, judge: Judge) -> str:
        """Wait for everyone; stop early at the first payload the judge refuses."""
        heard: dict[int, Payload] = {}
        deadline = time.monotonic() + self.timeout
        for rank in self.ranks:
            keys = (self._key("said", rank), self._key("decision"))
            if not self._poll(keys, max(0.0, deadline - time.monotonic())):
                return f"rank {rank} did not answer within {self.timeout:.0f} s"
            if self.store.check([self._key("decision")]):
                return ""  # someone declined: their word stands
            heard[rank] = self.payload(rank)
            if reason := judge(heard):
                return reason
        return ""

    def _decide(self, reason: str) -> str:
        """Propose; whoever wrote first is right."""
        self.store.compare_set(self._key("decision"), "", f"off: {reason}" if reason else _ON)
        return self._decision()

    def _decision(self) -> str:
        decision: str = self.store.get(self._key("decision")).decode()
        return "" if decision == _ON else decision.removeprefix("off: ")

    def _key(self, what: str, rank: int | None = None) -> str:
        return f"tpwatch/{self.name}/{what}" if rank is None else f"tpwatch/{self.name}/{what}/{rank}"

    def _poll(self, keys: Sequence[str], timeout: float) -> bool:
        """Wait for any of the keys without blocking inside the store.

        A blocking wait holds the client that others may need.
        """
        deadline, pause = time.monotonic() + timeout, _POLL_FIRST
        while not any(self.store.check([key]) for key in keys):
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _POLL_LONGEST * max(1.0, len(self.ranks) / 1000))  # one store answers them all
        return True


def next_round(store: Store, what: str, rank: int) -> int:
    """How often this rank has come to `what` so far, from 1.

    The same number on every rank for the same meeting.
    """
    return int(store.add(f"tpwatch/round/{what}/{rank}", 1))


@dataclass(frozen=True, slots=True)
class Assembly:
    """Ranks that can agree on something through the store amid training, as this one of them sees it."""

    round: int
    """Of the attach, the same on all: a meeting that one of them missed in an earlier watch is none of this one's."""
    rank: int
    ranks: Sequence[int]
    patience: float
    """Seconds that no meeting takes longer than (`Config.handshake_timeout`)."""

    def agree_to(self, what: str, timeout: float = AMID_TRAINING) -> str:
        """Meet over one question, as often as it comes up; empty if all came, else the reason.

        What a rank has read from a reduced buffer it may have read alone: another can have failed over it. Nobody acts
        on it who has not seen here that all have.
        """
        return self._meeting(what, timeout).hold({}) if dist.is_initialized() else "the process group is gone"

    def decline(self, what: str) -> None:
        """Stay away from the next meeting over `what`, and spare the others the waiting."""
        if dist.is_initialized():
            self._meeting(what, 0.0).decline(f"rank {self.rank} could not come")

    def _meeting(self, what: str, timeout: float) -> Meeting:
        store, name = default_store(), f"{what}/{self.round}/{self.ranks[0]}-{self.ranks[-1]}"
        number = next_round(store, name, self.rank)
        return Meeting(store, f"{name}/{number}", self.rank, self.ranks, min(timeout, self.patience))
