"""What goes wrong in a chaos run, drawn from a number alone: what, on which rank, at which step, in which job.

Pure: knows names and numbers, no process and no torch. How an event is played is in `_trainer`, what must hold
afterwards in `_judge`; `KINDS` says of each kind what both of them go by.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

STEPS = 8
"""Training steps of a chaos run: enough for a fault to be found at every second step."""

SHORT, LONG = 4.0, 20.0
"""Seconds of `handshake_timeout`: where somebody will be missing at a meeting, and where nobody should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of event, and what it may lead to."""

    points: tuple[str, ...]
    """Where or how it strikes."""

    findings: frozenset[str] = frozenset()
    """Kinds of findings that the event explains; any other is invented."""

    off: frozenset[str] = frozenset()
    """Points at which tpwatch must stay off on every rank of the job."""

    on_leader: bool = False
    """Strikes a rank that writes an event file."""

    alters: bool = False
    """Changes what is trained, with or without tpwatch."""

    internal: bool = False
    """tpwatch may report internal errors, and switch itself off on all ranks of a group because of them."""

    deadly: bool = False
    """The rank does not live on."""

    lossy: bool = False
    """Checks may be missing from the event file."""

    on_megatron: bool = True
    """Also played on Megatron-core."""


def _all(*points: str) -> frozenset[str]:
    return frozenset(points)


KINDS: Mapping[str, Kind] = {
    "own-error": Kind(
        points=("forward", "finalizer", "update", "before-attach"),
        off=_all("before-attach"),
        internal=True,  # a collective that a peer has left
        deadly=True,
    ),
    "killed": Kind(
        points=("reduce", "forward", "look", "finalizer", "readback", "in-attach", "before-finish", "before-attach"),
        off=_all("before-attach", "in-attach"),
        internal=True,
        deadly=True,
    ),
    "inner-error": Kind(
        points=("look", "seal", "values", "rows", "readback", "presence", "memory", "observe", "record"),
        internal=True,
        lossy=True,  # a void check is none, and `record` is the writing itself
    ),
    "attach-fails": Kind(
        points=("source", "examine", "install"), off=_all("source", "examine", "install"), internal=True
    ),
    "disk-full": Kind(
        points=("later", "start", "too-large", "a-while"),
        on_leader=True,
        internal=True,  # abort.json and summary.json go to the same disk
        lossy=True,
    ),
    "no-gradient": Kind(
        points=("summed", "copy"),
        # What one rank does not update parts, and with it the gradients of what is computed from it.
        findings=_all("grad-presence", "drift", "optimizer-mismatch"),
        internal=True,  # the framework's own reduction fails, and leaves tpwatch's next collective without peers
        alters=True,
    ),
    "absent-beside-error": Kind(
        points=("readback", "observe", "memory"),
        findings=_all("grad-presence", "drift", "optimizer-mismatch"),
        internal=True,
        alters=True,
        lossy=True,
        on_megatron=False,
    ),
    "not-finite": Kind(points=("summed", "copy"), findings=_all("nonfinite"), alters=True),
    "plan-differs": Kind(points=("sharded", "renamed", "rule"), findings=_all("replica-layout")),
    "reattached": Kind(points=("all-ranks",)),
    "sink-raises": Kind(points=("write", "build", "close"), on_leader=True),
    "sleeps": Kind(points=("reduce", "forward", "finalizer", "look", "before-finish", "before-attach")),
    "kill-switch": Kind(points=("environment",), off=_all("environment")),
    "not-attached": Kind(points=("missing", "other-config"), off=_all("missing", "other-config")),
    "sink-waits": Kind(points=("write", "build", "close"), on_leader=True, on_megatron=False),
    "wandb-fails": Kind(points=("log", "init"), on_leader=True, on_megatron=False),
    "exporter-down": Kind(points=("port-taken", "gateway-down"), on_leader=True, on_megatron=False),
    "nothing": Kind(points=("",)),
}

HOSTS: Mapping[str, tuple[str, ...]] = {
    "plain": tuple(KINDS),
    "megatron": tuple(name for name, kind in KINDS.items() if kind.on_megatron),
}
"""Kinds that are played on each host: a small model in plain torch, and Megatron-core's GPTModel."""

LAYOUTS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "plain": ((2, 1), (2, 1), (3, 1), (2, 2)),
    "megatron": ((2, 1), (2, 1), (2, 1), (2, 2)),
}
"""Sizes (tensor-parallel, data-parallel) to draw from."""

SAVES = frozenset({3, 6})
"""Steps behind which the script saves a checkpoint through the gate."""

BEFORE_STEPS = _all("before-attach", "in-attach", "source", "examine", "install", "start", "build", "environment")
IN_CHECKS = _all("reduce", "readback", "look")
"""Points that the last comparison of values, behind the last step, comes by too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One chaos run, whole: the same scenario is the same run."""

    host: str = "plain"
    number: int = 0
    tp: int = 2
    dp: int = 1
    steps: int = STEPS
    kind: str = "nothing"
    point: str = ""
    rank: int = 0
    """Global rank that the event strikes."""
    step: int = 0
    """From this step on; 0 before the first, `steps` + 1 behind the last."""
    lasting: bool = False
    """An error inside tpwatch repeats itself, instead of being over after once."""
    exit_code: int = 0
    """Code that the script exits with at its own error; 0 lets an exception out."""
    faulty: bool = False
    """The model has a fault to be found: something to stop for."""
    precision: str = "fp32"
    distributed_optimizer: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name that repeats it."""
        return f"{self.host}-{self.number}"

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.dp

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each tensor-parallel group."""
        return tuple(tuple(range(first, first + self.tp)) for first in range(0, self.world, self.tp))

    @property
    def beside(self) -> int:
        """The next rank of the struck rank's tensor-parallel group: it has no gradient in `absent-beside-error`."""
        (group,) = (ranks for ranks in self.groups if self.rank in ranks)
        return group[(group.index(self.rank) + 1) % self.tp]

    @property
    def counts(self) -> bool:
        """True if the plain model tells tpwatch its iteration, as Megatron's trainer does."""
        return self.number % 2 == 1

    @property
    def traits(self) -> Kind:
        """What is known of its kind."""
        return KINDS[self.kind]

    @property
    def off(self) -> bool:
        """True if tpwatch must stay off on every rank."""
        return self.point in self.traits.off

    @property
    def stops(self) -> bool:
        """True if tpwatch may stop the run: something is wrong with the model, and the policy says so."""
        at_fault = self.faulty or bool(self.traits.findings)
        return at_fault and self.config.get("on_fault", "warn") != "warn"

    @property
    def fails(self) -> bool:
        """True if the framework's own reduction must fail, by an error or by an abort of gloo: sizes do not match."""
        # Megatron's finalizer sums every gradient of the parameter that the event strikes there.
        return self.kind == "no-gradient" and (self.point == "summed" or self.host == "megatron")

    def unwatched(self) -> Scenario:
        """The same training without tpwatch, and without what only strikes tpwatch."""
        bare = {"host": self.host, "tp": self.tp, "dp": self.dp, "steps": self.steps, "faulty": self.faulty}
        bare |= {"precision": self.precision, "distributed_optimizer": self.distributed_optimizer}
        if self.traits.alters:
            bare |= {"kind": self.kind, "point": self.point, "rank": self.rank, "step": self.step}
        return Scenario(**bare)  # type: ignore[arg-type]


def draw(host: str, number: int) -> Scenario:
    """Scenario `number` of a host.

    Kinds take turns, and within a kind its points do, so that a profile of some length is known to have them all;
    everything else is drawn.
    """
    kinds = HOSTS[host]
    name = kinds[number % len(kinds)]
    kind = KINDS[name]
    point = kind.points[number // len(kinds) % len(kind.points)]
    dice = random.Random(f"{host}-{number}")  # noqa: S311 - a schedule
    tp, dp = dice.choice(LAYOUTS[host])
    faulty, config = dice.random() < 0.5, _config(dice)
    if point == "before-finish":
        config["on_fault"] = "warn"  # it has to come that far
    scenario = Scenario(
        host=host,
        number=number,
        tp=tp,
        dp=dp,
        kind=name,
        point=point,
        rank=dice.choice([g[0] for g in Scenario(tp=tp, dp=dp).groups] if kind.on_leader else range(tp * dp)),
        step=_step(dice, point, stops=faulty and config["on_fault"] != "warn"),
        lasting=name == "inner-error" and dice.random() < 0.5,
        exit_code=dice.choice((0, 37)) if name == "own-error" else 0,
        faulty=faulty,
        config=config,
    )
    waits = kind.deadly or point == "missing"
    return replace(scenario, config={**scenario.config, "handshake_timeout": SHORT if waits else LONG})


def _step(dice: random.Random, point: str, *, stops: bool) -> int:
    """A step that will come: where the fault of the model stops the run, that is at the third check or later."""
    if point in BEFORE_STEPS:
        return 0
    if point in ("before-finish", "close"):
        return STEPS + 1
    last = STEPS + 1 if point in IN_CHECKS else STEPS - 3
    return dice.randint(1, 3) if stops else dice.randint(1, last)


def _config(dice: random.Random) -> dict[str, Any]:
    return {
        "on_fault": dice.choice(("warn", "abort", "checkpoint_then_abort")),
        "guard": dice.choice(("before_update", "deferred")),
        "interval": dice.choice((1, 2)),
        "warmup": dice.choice((2, 10)),
        "max_errors": dice.choice((1, 3)),
        "patience": dice.choice((1, 3)),
        "max_faults": dice.choice((1, 1, 2)),
        "checkpoint": dice.choice(("ignore", "warn", "annotate", "refuse")),
    }


# ------------------------------------------------------------------------------------ profiles

CI: Mapping[str, int] = {"plain": 26, "megatron": 8}
"""Runs of each host in the ordinary test suite."""

NIGHTLY: Mapping[str, int] = {"plain": 12 * len(HOSTS["plain"]), "megatron": 3 * len(HOSTS["megatron"])}
"""Runs of each host at night: every point of every kind, several times."""


def profile(wanted: str) -> list[Scenario]:
    """The scenarios of a profile: empty for CI, `nightly`, or names such as `plain-17,megatron-3`."""
    if wanted not in ("", "nightly"):
        pairs = (name.strip().rpartition("-") for name in wanted.split(","))
        return [draw(host, int(number)) for host, _, number in pairs]
    sizes = NIGHTLY if wanted else CI
    return [draw(host, number) for host, size in sizes.items() for number in range(size)]
