"""What a monitor is built from in a test: tensors in memory, and a recorder that remembers.

`Memory` stands in for an adapter's `Source`; the collectives, the fingerprints and everything that
decides are the real ones. The framework's own reduction is a real all-reduce, `Reduce`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tpwatch._guard import Guard
from tpwatch.adapters.base import Groups, Host
from tpwatch.config import Config
from tpwatch.diagnose import Diagnosis
from tpwatch.discover import Candidate
from tpwatch.exchange import OUTSIDE, Exchange
from tpwatch.fingerprint import choose
from tpwatch.handshake import Assembly
from tpwatch.monitor import Monitor
from tpwatch.parts import STATES, Look, Parts, Scope
from tpwatch.records import Finding, ReplicaSpec, Rule, StepReport, WatchPlan
from tpwatch.watch import Watch

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
    kept: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """What the optimizer keeps of each parameter, by name as in `STATES`."""

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

    def states(self) -> Sequence[Sequence[torch.Tensor | None]]:
        """Return what the optimizer keeps; nothing where no test said otherwise."""
        kept = self.kept or [{}] * len(self.parameters)
        return [[one.get(label) for label in STATES] for one in kept]


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

    def job(self, step: int, view: Mapping[str, object]) -> None:
        """Remember what the job said."""
        self.events.append(("job", step, dict(view)))

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


def plan_of(
    parameters: Sequence[torch.Tensor], *, rule: Rule = "sum", names: Sequence[str] = (), ranks: Sequence[int] = ()
) -> WatchPlan:
    """Return a plan over `ranks`, or all of the default group; rows are named `p0`, `p1`, ..."""
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
    return WatchPlan("tp", tuple(ranks or range(dist.get_world_size())), replicas)


def rig(
    parameters: list[torch.Tensor],
    gradients: Gradients,
    config: Config | None = None,
    *,
    plan: WatchPlan | None = None,
    group: dist.ProcessGroup | None = None,
) -> Rig:
    """Build the monitor of this rank over `group` (None: the default one), where its parameters lie."""
    config = config or Config()
    plan = plan or plan_of(parameters, ranks=dist.get_process_group_ranks(group or dist.group.WORLD))
    device = parameters[0].device if parameters else CPU
    source, memo, guard = Memory(parameters, gradients), Memo(), Guard(config.max_errors)
    parts = Parts(
        plan=plan,
        source=source,
        exchange=Exchange(group),
        assembly=Assembly(1, dist.get_rank(), plan.ranks, config.handshake_timeout),
        group_rank=dist.get_rank(group),
        fingerprinter=choose(device, config.fingerprint),
        diagnosis=Diagnosis(plan, config),
        recorder=memo,
        device=device,
    )
    return Rig(Monitor(parts, config, guard), source, memo, guard)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return standard normal numbers that depend on the seed alone, not on the rank or thread."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def summed(gradients: Gradients, group: dist.ProcessGroup | None = None) -> None:
    """Sum every present gradient over the ranks: what is right for partials."""
    for gradient in gradients:
        if gradient is not None:
            dist.all_reduce(gradient, group=group)


def averaged(gradients: Gradients) -> None:
    """Average every present gradient over the ranks: what is right for near-copies."""
    summed(gradients)
    for gradient in gradients:
        if gradient is not None:
            gradient.div_(dist.get_world_size())


# ------------------------------------------------------------------------- a framework, doubled


@dataclass
class Toy:
    """A double for a framework: a model, its optimizer and its training loop in one object.

    `finalize` is the seam that an adapter wraps; its own reduction is a real all-reduce.
    """

    names: list[str]
    parameters: list[torch.Tensor]
    rules: list[Rule]
    gradients: Gradients = field(default_factory=list)
    updates: int = 0
    watch: Watch | None = None
    group: dist.ProcessGroup | None = None
    iteration: int | None = None
    """The step under way, where the host counts and says so."""
    replaced: bool = False
    """True after the host has put another finalizer in place of the wrapped one."""

    def finalize(self) -> None:
        """Sum the gradients that are marked, as Megatron's finalizer does."""
        marked = [g for g, rule in zip(self.gradients, self.rules, strict=True) if rule == "sum"]
        summed(marked, self.group)

    def leave_alone(self) -> None:
        """Reduce nothing: what a broken finalizer does."""

    def train(self, gradients: Gradients, *, finalizes: int = 1) -> None:
        """Take one step with the given gradients."""
        self.gradients = gradients
        watch = None if self.replaced else self.watch
        for _ in range(finalizes):
            if watch is None or watch.finalizer_entered(WHOLE):
                self.finalize()
            if watch:
                watch.finalizer_left()
        if self.watch:
            self.watch.gradients_ready()
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            if gradient is not None:
                parameter.sub_(0.01 * gradient)
        self.updates += 1
        if self.watch:
            self.watch.stepped()


class ToySeams:
    """The seams of a `Toy`; see `tpwatch.watch.Seams`."""

    def __init__(self, toy: Toy, watch: Watch) -> None:
        self.toy = toy
        self.watch = watch
        toy.watch = watch

    def lost(self) -> bool:
        """True if the host has replaced the finalizer."""
        return self.toy.replaced

    def reinstall(self) -> None:
        """Wrap the new one."""
        self.toy.replaced = False

    def remove(self) -> Sequence[str]:
        """Unhook the watch."""
        self.toy.watch = None
        return ()

    def iteration(self) -> int | None:
        """Return what the toy says."""
        return self.toy.iteration

    def whole(self) -> Scope:
        """Return the only chunk."""
        return WHOLE


class ToyAdapter:
    """An `Adapter` for `Toy`; tests make it fail where they like."""

    name = "toy"

    def __init__(self, *, fails_in: str = "") -> None:
        self.fails_in = fails_in

    def group(self, groups: Groups | None) -> tuple[str, dist.ProcessGroup | None]:
        """Return the caller's group, else the default one."""
        return "tp", groups["tp"] if groups else None

    def examine(self, model: Any, optimizer: Any, config: Config, groups: Groups | None) -> Host:
        """Describe every parameter of the toy as a replica."""
        del optimizer, config
        self._stumble("examine")
        (toy,) = model
        axis, group = self.group(groups)
        return Host(
            axis=axis,
            group=group,
            candidates=[self._candidate(toy, i) for i in range(len(toy.names))],
            device=CPU,
            loss_scaler=False,
            source=lambda rows: self._source(toy, rows),
            install=lambda watch: self._install(toy, watch),
            versions={"toy": "1"},
        )

    def _candidate(self, toy: Toy, i: int) -> Candidate:
        parameter = toy.parameters[i]
        return Candidate(
            name=toy.names[i],
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            grad_start=0,
            grad_stop=parameter.numel(),
            replicated=True,
            rule=toy.rules[i],
        )

    def _source(self, toy: Toy, rows: Sequence[int]) -> ToySource:
        self._stumble("source")
        return ToySource(toy, rows)

    def _install(self, toy: Toy, watch: Watch) -> ToySeams:
        self._stumble("install")
        return ToySeams(toy, watch)

    def _stumble(self, where: str) -> None:
        if where == self.fails_in:
            message = f"the planted fault of the adapter in {where}"
            raise LookupError(message)


class ToySource:
    """The tensors of a toy's plan."""

    def __init__(self, toy: Toy, rows: Sequence[int]) -> None:
        self.toy = toy
        self.rows = rows

    def values(self) -> Sequence[torch.Tensor]:
        """Return the parameters in plan order."""
        return [self.toy.parameters[i] for i in self.rows]

    def states(self) -> Sequence[Sequence[torch.Tensor | None]]:
        """Return nothing: the toy's optimizer keeps nothing."""
        return [[None for _ in STATES] for _ in self.rows]

    def look(self, scope: Scope) -> Look:
        """Return the gradients in plan order."""
        if not scope:
            return Look([None] * len(self.rows), [OUTSIDE] * len(self.rows))
        gradients = [self.toy.gradients[i] for i in self.rows]
        return Look(gradients, [float(g is not None) for g in gradients])
