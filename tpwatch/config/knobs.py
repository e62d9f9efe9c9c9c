"""Every knob of tpwatch on one page.

Knows what may be set, not where a setting comes from and not who uses it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from tpwatch.config.fields import AtLeast, Section, describe
from tpwatch.errors import ConfigError

Count = Annotated[int, AtLeast(0)]
Positive = Annotated[int, AtLeast(1)]
Amount = Annotated[float, AtLeast(0)]
PositiveAmount = Annotated[float, AtLeast(0, exclusive=True)]
Action = Literal["ignore", "log", "warn", "callback", "abort", "checkpoint_then_abort"]
STOPPING = frozenset({"abort", "checkpoint_then_abort"})
Declaration = Literal["sum", "avg", "none", "sharded", "replicated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds(Section):
    """Limits of your own; past one of them a finding is an error at once, without patience."""

    PREFIX: ClassVar[str] = "thresholds."

    max_abs: Amount | None = None
    """Largest elementwise difference |a - b| between copies of a parameter that is tolerated."""
    max_rel: Amount | None = None
    """Largest |a - b| / max(|a|, |b|) that is tolerated over elements above `rel_floor`."""
    ratio: PositiveAmount | None = None
    """Largest norm(after) / norm(before) over the reduction tolerated for gradient copies."""
    rel_floor: Amount = 1e-3
    """Values smaller than this (absolute) do not enter `max_rel`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSelection(Section):
    """Which parameters are watched. Patterns are shell-style and match global parameter names."""

    PREFIX: ClassVar[str] = "watch."

    include: tuple[str, ...] = ("*",)
    """Only parameters that match one of these are watched."""
    exclude: tuple[str, ...] = ()
    """Parameters that match one of these are not watched."""
    declare: Mapping[str, Declaration] = field(default_factory=dict)
    """What you know about parameters, pattern to rule; the last match wins, and it beats inference.

    `sum`, `avg`, `none`: the reduction that is right for the gradient. `sharded`: not a replica, do
    not watch. `replicated`: a replica although nothing marks it as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explain(Section):
    """What may be gathered to explain a flagged parameter."""

    PREFIX: ClassVar[str] = "explain."

    gather_bytes: Count = 16 * 2**20
    """Bytes gathered per rank and check, at most."""
    exact_elements: Count = 1024
    """Tensors of up to so many elements are gathered whole instead of estimated from sketches."""
    gather_checks: Count = 64
    """Elementwise gathers of one parameter, at most: a long run need not pay for an old finding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prometheus(Section):
    """Metrics for Prometheus, exported by the leader of each replica group."""

    PREFIX: ClassVar[str] = "prometheus."

    enabled: bool = False
    """Export metrics; needs the extra `tpwatch[prometheus]`."""
    http: bool = True
    """Serve `/metrics`; false where no port may be opened (see `textfile`)."""
    address: str = "127.0.0.1"
    """Address to listen on; only this machine by default, `0.0.0.0` for every interface."""
    port: Count = 9464
    """First port to try; 0 lets the system choose one."""
    ports: Positive = 16
    """So many ports are tried, upwards: a node has as many exporters as leaders of replica groups."""
    tls_cert: str | None = None
    """Certificate (PEM) to serve HTTPS with; `tls_key` goes with it."""
    tls_key: str | None = None
    """Private key (PEM) of `tls_cert`."""
    tls_client_ca: str | None = None
    """Authorities (PEM) that a scraper's own certificate must come from; unset: no certificate asked for."""
    file_sd: str | None = None
    """Directory in which each exporter names itself as a target, for Prometheus's `file_sd_configs`."""
    textfile: str | None = None
    """Directory of node_exporter's textfile collector, to which the metrics are written every few seconds."""
    push_gateway: str | None = None
    """Pushgateway (`http://host:port`) that gets the last state when the run ends."""

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.port > _LAST_PORT:
            rule = f"must be at most {_LAST_PORT}"
            raise ConfigError(self.PREFIX + "port", self.port, rule, "Choose another number.")
        if (self.tls_cert is None) != (self.tls_key is None):
            rule = "goes with prometheus.tls_key"
            raise ConfigError(self.PREFIX + "tls_cert", self.tls_cert, rule, "Set both in one place, or neither.")


_LAST_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class Wandb(Section):
    """Scalars, a table of findings and alerts in the trainer's own run of Weights & Biases."""

    PREFIX: ClassVar[str] = "wandb."

    enabled: bool = False
    """Log into the run that the trainer has open; needs the extra `tpwatch[wandb]`.

    All ranks of the job meet at checked steps then, before the update, which waits for the device once.
    """
    rank: int = -1
    """Global rank that has the run; -1 is the last one, where Megatron logs."""
    alerts: bool = True
    """Send an alert (`run.alert`) for every new fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBoard(Section):
    """Scalars and findings for TensorBoard, written by the leader of each replica group."""

    PREFIX: ClassVar[str] = "tensorboard."

    enabled: bool = False
    """Write event files; needs the extra `tpwatch[tensorboard]`."""
    directory: str | None = None
    """Where the event files go, a folder a group; by default `tensorboard` in the run directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTelemetry(Section):
    """Metrics and findings over OTLP (HTTP), sent by the leader of each replica group."""

    PREFIX: ClassVar[str] = "otel."

    enabled: bool = False
    """Send metrics and findings; needs the extra `tpwatch[otel]`."""
    endpoint: str | None = None
    """Base address of the collector; by default what `OTEL_EXPORTER_OTLP_ENDPOINT` says, else `http://localhost:4318`."""
    interval: PositiveAmount = 15.0
    """Seconds between two exports of metrics; findings are sent as they come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Section):
    """All of tpwatch. Every knob has a default that suits a first run."""

    enabled: bool = True
    """False on one rank leaves tpwatch off on every rank of the job."""
    adapter: Literal["auto", "megatron"] = "auto"
    """Framework to watch; named, a missing or unsupported one is an error, not an unwatched run."""
    out: str | None = None
    """Run directory; by default rank 0 chooses a new one under `tpwatch-runs/`."""
    interval: Positive = 1
    """Every so many steps are checked, once `warmup` is over."""
    warmup: Count = 10
    """So many first steps are all checked, whatever `interval` says."""
    on_fault: Action = "warn"
    """What is done about a fault; `abort` stops all ranks of the job at the same step, before the update.

    `ignore`: recorded only. `log`: one information line. `warn`: logged by severity. `callback`: no line, it is for the
    listeners (`Watch.on_finding`), which hear of everything that is not ignored.
    `checkpoint_then_abort`: the function given to `Watch.save_before_abort` runs first.
    """
    policies: Mapping[str, Action] = field(default_factory=dict)
    """Other actions for some findings, by pattern of `kind:severity@parameter`; the last match wins."""
    max_faults: Positive = 1
    """So many faults, over all replica groups, before an action that stops the run does so."""
    max_overhead: PositiveAmount | None = None
    """Share of step time a check may take; past it the interval is doubled, on all ranks of a group together.

    What counts is the time of the host: packing, exchange, waiting for it, the verdict, over the last eight checks, on
    whichever rank they take longest. Not what may follow a verdict: recording, listeners, `resync`, the meeting of the
    job.
    """
    job_wide: bool = False
    """Exchange counts of faults over all ranks of the job even if nothing can stop it (for a sink on one rank)."""
    checkpoint: Literal["ignore", "warn", "annotate", "refuse"] = "ignore"
    """Compare values, fp32 masters and moments before a checkpoint is saved and around a load, and what to do then.

    `warn`: logged and recorded. `annotate`: also a file in the checkpoint. `refuse`: the save fails on every rank.
    """
    resync: Literal["off", "rank0", "mean"] = "off"
    """Changes training: make copies that were found apart equal again, masters and moments with them.

    `rank0`: everybody takes the first rank's. `mean`: everybody takes the mean.
    """
    patience: Positive = 3
    """Exercised checks in a row that must agree before a finding counts."""
    deep_interval: Positive = 50
    """Every so many steps, at the next check, the reduction applied to partial gradients is verified again."""
    guard: Literal["auto", "before_update", "deferred"] = "auto"
    """When results are read: before the update or one step later; `auto`: at once on CPU only."""
    fingerprint: Literal["auto", "triton", "native", "packed", "reference"] = "auto"
    """Implementation of the fingerprint; by name, one that cannot run here is an error."""
    seed: Count = 0
    """Key of the hashes and sketches."""
    start_step: Count = 0
    """Steps done before this run, where the framework does not say; the next is watched first."""
    handshake_timeout: PositiveAmount = 120.0
    """Seconds to wait at attach for all ranks; if one is missing, tpwatch stays off everywhere."""
    max_errors: Positive = 3
    """Internal errors after which tpwatch disables itself, on all ranks."""
    thresholds: Thresholds = field(default_factory=Thresholds)
    """Limits of your own."""
    watch: WatchSelection = field(default_factory=WatchSelection)
    """Which parameters are watched."""
    explain: Explain = field(default_factory=Explain)
    """What may be gathered to explain a flagged parameter."""
    prometheus: Prometheus = field(default_factory=Prometheus)
    """Metrics for Prometheus."""
    wandb: Wandb = field(default_factory=Wandb)
    """Weights & Biases."""
    tensorboard: TensorBoard = field(default_factory=TensorBoard)
    """TensorBoard."""
    otel: OpenTelemetry = field(default_factory=OpenTelemetry)
    """OpenTelemetry."""
    sinks: tuple[str, ...] = ()
    """Further sinks that get every event: entry points of the group `tpwatch.sinks`, or `module:factory`."""

    @property
    def meets(self) -> bool:
        """True if all ranks of the job meet at checked steps: one may stop them, or one is to see the whole job."""
        return self.can_stop or self.job_wide or self.wandb.enabled

    @property
    def can_stop(self) -> bool:
        """True if some finding may stop the run; then all ranks of the job stop together."""
        return any(action in STOPPING for action in (self.on_fault, *self.policies.values()))

    def checked(self, step: int, start: int) -> bool:
        """Whether `step` is checked, `start` being the step before the first watched one.

        Depends on step numbers alone, so that all ranks agree without asking each other.
        """
        return step - start <= self.warmup or step % self.interval == 0

    def to_mapping(self) -> dict[str, Any]:
        """All values as plain Python, in field order; `Config(**mapping)` is the inverse."""
        return asdict(self)

    def digest(self) -> str:
        """Hash (16 hex digits) of all that must agree over ranks: every knob but where results go."""
        values = {key: value for key, value in self.to_mapping().items() if key not in _OWN_BUSINESS}
        # Keys stay in order: in `watch.declare` the last match wins, so order is meaning.
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


_OWN_BUSINESS = frozenset({"out", "prometheus", "tensorboard", "otel", "sinks"})
"""Where a rank sends results changes no collective: nodes may listen on other addresses."""


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of the YAML file, generated from the knobs."""
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, "title": "tpwatch configuration", **describe(Config)}
