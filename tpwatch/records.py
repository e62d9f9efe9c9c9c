"""Frozen records that the stages pass to each other, and their JSON form.

Knows plain Python values only: no torch, no framework, no files. A tensor never gets in here; what
does is a name, a number or a rank. Ranks are global ranks of the job everywhere in this file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

SCHEMA = 1
"""Version of the run-directory records; a reader refuses a newer one by name."""

Rule = Literal["none", "sum", "avg"]
"""What a framework does to a replicated parameter's gradient over its replica group."""

Severity = Literal["info", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "error")

Role = Literal["cause", "consequence"]

KINDS: tuple[str, ...] = (
    "init-mismatch", "drift", "missing-reduce", "double-reduce", "averaged-partial", "mixed-reduce",
    "grad-presence", "nonfinite", "clip-mismatch", "optimizer-mismatch", "external-write", "buffer-mismatch",
    "tied-mismatch", "finalize-skipped", "replica-layout", "mislabelled-shard", "identical-shards",
    "wrong-scale", "rng-mismatch", "wrong-group",
)  # fmt: skip
"""Fault kinds. A closed list that other tools match on: add, never rename."""


# ------------------------------------------------------------------------------------------------ plan


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """One replicated parameter: what every rank of its replica group must agree on."""

    name: str
    """Global name: wrappers stripped, global layer number."""
    shape: tuple[int, ...]
    dtype: str
    grad_start: int
    """First flat element of the gradient this data-parallel rank owns (0 unless a distributed
    optimizer)."""
    grad_stop: int
    """One past the last owned element; equal to ``grad_start`` where the gradient is not owned
    here."""
    rule: Rule
    """What the framework's markers (or a declaration) say will be done to the gradient."""
    declared: bool = False
    """True if the user declared ``rule``: a declared rule beats inference."""

    @property
    def grad_numel(self) -> int:
        """Elements of the gradient owned on this data-parallel rank."""
        return self.grad_stop - self.grad_start


@dataclass(frozen=True, slots=True)
class WatchPlan:
    """The replicas of one replica group, in the order of rows in every buffer."""

    axis: str
    """Mesh axis the replicas lie on, e.g. ``"tp"``."""
    ranks: tuple[int, ...]
    """Global ranks of the replica group, in group order."""
    replicas: tuple[ReplicaSpec, ...]
    not_watched: tuple[tuple[str, str], ...] = ()
    """(name, reason) of tensors that were looked at and left out."""

    @property
    def group(self) -> str:
        """Name of the group: axis and first global rank, e.g. ``tp-0``."""
        return f"{self.axis}-{self.ranks[0]}"

    @property
    def digest(self) -> int:
        """64-bit hash of names, shapes, dtypes, owned slices, rules and order.

        Equal on ranks whose plans are.
        """
        text = json.dumps([asdict(r) for r in self.replicas], sort_keys=True)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WatchPlan:
        """Inverse of `to_json`."""
        replicas = tuple(ReplicaSpec(**{**r, "shape": tuple(r["shape"])}) for r in data["replicas"])
        not_watched = tuple((str(name), str(why)) for name, why in data["not_watched"])
        return cls(str(data["axis"]), tuple(data["ranks"]), replicas, not_watched)


# ---------------------------------------------------------------------------------- what the group saw


@dataclass(frozen=True, slots=True)
class PointSpread:
    """One tensor at one observation point, reduced over its replica group (MIN and MAX of each column)."""

    same: bool
    """True if all copies are bit-identical (both hash halves agree)."""
    l2_lo: float
    l2_hi: float
    """Squared Euclidean norm, smallest and largest over the group (finite elements only)."""
    absmax_lo: float
    absmax_hi: float
    nonfinite_lo: int
    nonfinite_hi: int

    @property
    def silent(self) -> bool:
        """True if every copy is exactly zero on every rank."""
        return self.absmax_hi == 0.0 and self.nonfinite_hi == 0


@dataclass(frozen=True, slots=True)
class RowObservation:
    """One replicated parameter at one check, from the two reduced buffers alone (tier 1)."""

    index: int
    """Row in the plan."""
    param: PointSpread
    pre: PointSpread
    post: PointSpread
    in_scope: bool
    """False if this finalizer call did not handle the parameter (another model chunk) or it is not
    owned."""
    present_lo: bool
    present_hi: bool
    absent: tuple[int, ...]
    """Lowest and highest global rank without a gradient (one entry if they are the same; empty if
    none)."""
    kept_lo: bool
    kept_hi: bool
    """Own gradient after the reduction is bit-identical to own gradient before it: on all, on some
    ranks."""
    scale_lo: float
    scale_hi: float
    """Least-squares factor c of own post = c * own pre, smallest and largest over the group."""
    residual_hi: float
    """Largest relative residual ``|post - c * pre| / |post|`` over the group."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Elementwise difference of one tensor over its replica group (gathered values)."""

    max_abs: float
    max_rel: float
    """max of (MAX - MIN) / max(|MAX|, |MIN|) over elements above the floor."""
    differing: int
    elements: int
    l2: float = 0.0
    """Euclidean norm of MAX - MIN: grows with every element that moves, where max_abs waits for the
    worst one."""


@dataclass(frozen=True, slots=True)
class Target:
    """A parameter that tier 2 should look at in the next check."""

    index: int
    """Row in the plan."""
    values: bool
    """Gather the elementwise spread of its values."""
    gradients: bool
    """Gather the elementwise spread of its reduced gradient."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What tier 2 gathered about one parameter at one check. Tuples are in group-rank order."""

    index: int
    exact: bool
    """True if computed from the elements themselves, False if estimated from sketches."""
    deviation_param: float
    deviation_pre: float
    deviation_post: float
    """sqrt(mean |x_r - mean x|^2 / mean |x_r|^2): 0 for copies, about 0.7 for two independent
    partials."""
    residual_sum: float
    residual_avg: float
    """max_r |post_r - P| / |post| for P the sum and the mean of the pre tensors."""
    tolerance: float
    """Largest residual that rounding and sketching can explain, in the same unit."""
    norms_pre: tuple[float, ...]
    norms_post: tuple[float, ...]
    zero_ranks: tuple[int, ...]
    """Global ranks whose gradient before the reduction is exactly zero."""
    camps_param: tuple[tuple[int, ...], ...]
    camps_post: tuple[tuple[int, ...], ...]
    """Global ranks grouped by equal hash, largest camp first."""
    param: Spread | None = None
    post: Spread | None = None


# ------------------------------------------------------------------------------------------- verdicts


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault of one parameter: its root cause, what was seen, and what to do (contract.

    DESIGN section 6).
    """

    kind: str
    code: str
    parameter: str
    point: str
    group: str
    ranks: tuple[int, ...]
    first_step: int
    last_step: int
    count: int
    severity: Severity
    role: Role
    caused_by: str | None
    confidence: float
    observed: str
    expected: str
    ratio: float | None
    """norm(post) / norm(pre): norms, not squares."""
    max_abs: float
    max_rel: float
    odd_ranks: tuple[int, ...]
    """Ranks outvoted by a strict majority; empty at two ranks, where nobody can be outvoted."""
    advice: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """Further facts by name: zero_ranks, absent_ranks, camps, norms, value spread, ..."""

    @property
    def key(self) -> tuple[str, str]:
        """What makes two findings of different groups or steps the same fault.

        Kind and parameter.
        """
        return (self.kind, self.parameter)

    @property
    def counts(self) -> bool:
        """True if this finding makes a run faulty: a cause of warning or error."""
        return self.role == "cause" and self.severity != "info"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, keys in field order."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Finding:
        """Inverse of `to_json`; unknown keys of a newer minor version are dropped."""
        known = {f.name for f in fields(cls)}
        values = {k: v for k, v in data.items() if k in known}
        for key in ("ranks", "odd_ranks"):
            values[key] = tuple(values.get(key) or ())
        return cls(**values)


@dataclass(frozen=True, slots=True)
class StepReport:
    """One checked step of one replica group, as recorded in the event file."""

    step: int
    call: int
    """Number of this finalizer call within the step, from 1."""
    new: tuple[Finding, ...]
    """Findings confirmed or changed in severity at this check."""
    active: int
    """Findings that hold at this check: not those of parameters that have settled as healthy since."""
    differing: Mapping[str, int]
    """Replicas that are not bit-identical, per observation point."""
    max_abs: float
    max_rel: float
    """Largest elementwise difference among the values gathered at this check (0 if none were)."""
    seconds: float
    """Host time of the check on this rank, both sides."""
    step_seconds: float
    """Time since the previous step ended on this rank; 0 at the first."""
    collectives: int
    deep_collectives: int
    bytes_exchanged: int
    skipped: bool = False
    """True if a loss scaler skipped the step: no verdict was made."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """`seconds` by what they were spent on: fingerprint, exchange (collectives and waiting), diagnose."""
    ratio_lo: float | None = None
    ratio_hi: float | None = None
    """Smallest and largest norm(post) / norm(pre) over all watched gradients; None if none was non-zero."""
    faults: Mapping[str, int] = field(default_factory=dict)
    """Confirmed faults that hold at this check (causes of warning or error), by `kind@point`."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; new findings have events of their own and are left out."""
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "new"}
        data |= {name: dict(data[name]) for name in ("differing", "phases", "faults")}
        return data


@dataclass(frozen=True, slots=True)
class Summary:
    """What a whole run comes to (contract: DESIGN section 6, ``summary.json``)."""

    verdict: Literal["clean", "faults", "nothing-checked"]
    steps_checked: int
    replicas: int
    findings: tuple[Finding, ...]
    not_exercised: tuple[str, ...]
    overhead: Mapping[str, float]
    unverified: tuple[str, ...] = ()
    """Parameters whose reduction could not be decided (yet): no claim is made about them."""
    not_watched: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    aborted_at: int | None = None

    @property
    def causes(self) -> tuple[Finding, ...]:
        """Findings that make the run faulty."""
        return tuple(f for f in self.findings if f.counts)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values with the schema version first."""
        data: dict[str, Any] = {"schema": SCHEMA}
        data.update({f.name: getattr(self, f.name) for f in fields(self)})
        data["findings"] = [f.to_json() for f in self.findings]
        data["overhead"] = dict(self.overhead)
        return data


def worst(severities: Sequence[Severity]) -> Severity:
    """The most severe of a non-empty sequence."""
    return max(severities, key=SEVERITIES.index)
