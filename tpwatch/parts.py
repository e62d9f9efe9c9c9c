"""What a monitor is built from, and what it asks of an adapter and a recorder.

Knows the shape of things only; the story is in `monitor`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tpwatch.diagnose import Diagnosis, When
from tpwatch.exchange import Exchange, Pending
from tpwatch.fingerprint import Fingerprinter
from tpwatch.handshake import Assembly
from tpwatch.records import Finding, StepReport, Target, WatchPlan

Scope = frozenset[int]
"""Indices of the model chunks that one finalizer call handles."""


@dataclass(frozen=True, slots=True)
class Look:
    """The gradients of one rank at one point, in plan order."""

    gradients: Sequence[torch.Tensor | None]
    present: Sequence[float]
    """1.0 with a gradient, 0.0 without, `OUTSIDE` if this call does not handle it or it is not
      owned here."""


STATES = ("master", "exp_avg", "exp_avg_sq", "momentum_buffer")
"""What an optimizer keeps of a parameter and copies of it must agree in: the fp32 master and the moments."""


class Source(Protocol):
    """Where the tensors of a plan come from; an adapter implements it."""

    def values(self) -> Sequence[torch.Tensor]:
        """Current values, in plan order."""
        ...

    def look(self, scope: Scope) -> Look:
        """Gradients the framework is about to reduce, or has just reduced, in plan order."""
        ...

    def states(self) -> Sequence[Sequence[torch.Tensor | None]]:
        """What the optimizer keeps of each replica on this rank, in plan order, each as in `STATES`."""
        ...


class Recorder(Protocol):
    """Where events go. Most ranks hold a silent one."""

    def check(self, report: StepReport) -> None:
        """One checked step."""
        ...

    def finding(self, step: int, finding: Finding) -> None:
        """A finding that is new or has changed."""
        ...

    def status(self, step: int, not_exercised: Sequence[str], unverified: Sequence[str]) -> None:
        """Parameters about which no claim is made."""
        ...

    def note(self, step: int, text: str) -> None:
        """Anything else worth reading later."""
        ...

    def job(self, step: int, view: Mapping[str, object]) -> None:
        """What all replica groups of the job together have found, where that has changed."""
        ...

    def abort(self, step: int, findings: Sequence[Finding]) -> None:
        """The run is about to be stopped."""
        ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What a monitor is built from: one of each for a replica group."""

    plan: WatchPlan
    source: Source
    exchange: Exchange
    assembly: Assembly
    """The ranks of the plan."""
    group_rank: int
    fingerprinter: Fingerprinter
    diagnosis: Diagnosis
    recorder: Recorder
    device: torch.device
    clock: Callable[[], float] = time.perf_counter


@dataclass(slots=True)
class Check:
    """One check under way."""

    at: When
    scope: Scope
    targets: tuple[Target, ...]
    entry: Pending | None = None
    exit: Pending | None = None
    tensors: Sequence[torch.Tensor | None] = ()
    """What the side under way was packed from, for tier 2; let go of as soon as that has been gathered."""
    seconds: float = 0.0
    fingerprinting: float = 0.0
    """Seconds of `seconds` spent on packing both sides."""
    diagnosing: float = 0.0
    """Seconds of `seconds` spent on the verdict."""
    step_seconds: float = 0.0
    """Since the step before ended, to set `seconds` in proportion to; 0 at the first step."""
    deep: int = 0
    collectives_before: int = 0
    bytes_before: int = 0

    @property
    def phases(self) -> dict[str, float]:
        """`seconds` by what they were spent on; whatever is not one of the other two is the exchange."""
        exchange = max(0.0, self.seconds - self.fingerprinting - self.diagnosing)
        return {"fingerprint": self.fingerprinting, "exchange": exchange, "diagnose": self.diagnosing}

    @property
    def digest(self) -> float:
        """53-bit digest of what tier 2 is to gather, exact in float64; 0 for nothing."""
        if not self.targets:
            return 0.0
        text = ",".join(f"{t.index}{'v' * t.values}{'g' * t.gradients}" for t in self.targets)
        whole = hashlib.blake2b(text.encode(), digest_size=6).digest()
        return float(int.from_bytes(whole, "little") + 1)
