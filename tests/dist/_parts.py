"""What a monitor is built from in a test: tensors in memory, and a recorder that remembers.

`Memory` stands in for an adapter's `Source`; the collectives, the fingerprints and everything that
decides are the real ones. The framework's own reduction is a real all-reduce, `Reduce`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tpwatch._guard import Guard
from tpwatch.config import Config
from tpwatch.diagnose import Diagnosis
from tpwatch.exchange import OUTSIDE, Exchange
from tpwatch.fingerprint import choose
from tpwatch.monitor import Monitor
from tpwatch.parts import Look, Parts, Scope
from tpwatch.records import Finding, ReplicaSpec, Rule, StepReport, WatchPlan

CPU = torch.device("cpu")
WHOLE: Scope = frozenset({0})

Gradients = list["torch.Tensor | None"]
Reduce = Callable[[Gradients], None]
"""What the framework does to the gradients of one step, in place."""


@dataclass
class Memory:
    """A `Source` over plain tensors; tests set them as they like."""

    parameters: list[torch.Tensor]
    gradients: Gradients
    failing_looks: int = 0
    """So many of the next looks raise, as a broken adapter would."""
    looks_before_failing: int = 0

    def values(self) -> Sequence[torch.Tensor]:
        """Return the parameters."""
        return self.parameters

    def look(self, scope: Scope) -> Look:
        """Return the gradients; everything is in chunk 0."""
        if self.failing_looks and not self.looks_before_failing:
            self.failing_looks -= 1
            message = "the planted fault of the source"
            raise OSError(message)
        self.looks_before_failing = max(0, self.looks_before_failing - 1)
        if not scope:
            return Look([None] * len(self.gradients), [OUTSIDE] * len(self.gradients))
        return Look(list(self.gradients), [float(g is not None) for g in self.gradients])


@dataclass
class Memo:
    """A `Recorder` that remembers every event as (kind, step, content), in order."""

    events: list[tuple[str, int, Any]] = field(default_factory=list)

    def check(self, report: StepReport) -> None:
        """Remember a checked step."""
        self.events.append(("check", report.step, report))

    def finding(self, step: int, finding: Finding) -> None:
        """Remember a finding."""
        self.events.append(("finding", step, finding))

    def status(self, step: int, not_exercised: Sequence[str], unverified: Sequence[str]) -> None:
        """Remember what no claim is made about."""
        self.events.append(("status", step, (tuple(not_exercised), tuple(unverified))))

    def note(self, step: int, text: str) -> None:
        """Remember a note."""
        self.events.append(("note", step, text))

    def abort(self, step: int, findings: Sequence[Finding]) -> None:
        """Remember that the run was stopped."""
        self.events.append(("abort", step, tuple(findings)))

    def of(self, kind: str) -> list[tuple[int, Any]]:
        """Step and content of the events of one kind."""
        return [(step, content) for k, step, content in self.events if k == kind]


@dataclass
class Rig:
    """One rank's monitor with everything it is made of."""

    monitor: Monitor
    source: Memory
    memo: Memo
    guard: Guard

    @property
    def exchange(self) -> Exchange:
        """Return the counted collectives of the monitor."""
        return self.monitor.parts.exchange

    @property
    def findings(self) -> list[Finding]:
        """Return the confirmed findings."""
        return self.monitor.parts.diagnosis.findings

    def step(self, number: int, reduce: Reduce = lambda _gradients: None) -> None:
        """Drive one optimizer step as a `Watch` would: entry, the framework's reduction, exit."""
        self.monitor.before_reduction(number, 1, WHOLE)
        reduce(self.source.gradients)
        self.monitor.after_reduction()
        self.monitor.end_of_step()


def plan_of(parameters: Sequence[torch.Tensor], *, rule: Rule = "sum", names: Sequence[str] = ()) -> WatchPlan:
    """Return a plan over all ranks of the default group, rows named `p0`, `p1`, ..."""
    replicas = tuple(
        ReplicaSpec(
            name=names[i] if names else f"p{i}",
            shape=tuple(p.shape),
            dtype=str(p.dtype).removeprefix("torch."),
            grad_start=0,
            grad_stop=p.numel(),
            rule=rule,
        )
        for i, p in enumerate(parameters)
    )
    return WatchPlan("tp", tuple(range(dist.get_world_size())), replicas)


def rig(
    parameters: list[torch.Tensor],
    gradients: Gradients,
    config: Config | None = None,
    *,
    plan: WatchPlan | None = None,
) -> Rig:
    """Build the monitor of this rank over the default group."""
    config = config or Config()
    plan = plan or plan_of(parameters)
    source, memo, guard = Memory(parameters, gradients), Memo(), Guard(config.max_errors)
    parts = Parts(
        plan=plan,
        source=source,
        exchange=Exchange(None),
        group_rank=dist.get_rank(),
        fingerprinter=choose(CPU, config.fingerprint),
        diagnosis=Diagnosis(plan, config),
        recorder=memo,
        device=CPU,
    )
    return Rig(Monitor(parts, config, guard), source, memo, guard)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return standard normal numbers that depend on the seed alone, not on the rank or thread."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def summed(gradients: Gradients) -> None:
    """Sum every present gradient over the ranks: what is right for partials."""
    for gradient in gradients:
        if gradient is not None:
            dist.all_reduce(gradient)


def averaged(gradients: Gradients) -> None:
    """Average every present gradient over the ranks: what is right for near-copies."""
    summed(gradients)
    for gradient in gradients:
        if gradient is not None:
            gradient /= dist.get_world_size()
