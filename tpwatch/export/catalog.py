"""The table of metrics: every exporter and every dashboard takes its names from here.

Labels are bounded. `group` is the replica group of the exporting leader, `kind` one of the fault kinds, `point` an
observation point. Parameter names and steps are never labels: they are in the event file and in exemplars.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Type = Literal["counter", "gauge", "histogram", "info"]
Unit = Literal["", "bytes", "ratio", "seconds"]

OTHER = "other"
"""Label value that stands for all sets beyond `MOST_LABEL_SETS`."""

MOST_LABEL_SETS = 256
"""Label sets of one metric, at most; the closed lists behind the labels stay well below."""

SECONDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0)
"""Upper bounds of the buckets of a duration."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table."""

    name: str
    """As it is scraped: counters end in `_total`, facts in `_info`."""
    type: Type
    unit: Unit
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()
    """Upper bounds, of a histogram; +Inf comes on top."""

    @property
    def family(self) -> str:
        """The name without the suffix that its type demands."""
        suffix = {"counter": "_total", "info": "_info"}.get(self.type, "")
        return self.name.removesuffix(suffix)


BUILD_INFO = Metric(
    "tpwatch_build_info", "info", "",
    ("group", "stage", "version", "torch", "framework", "fingerprint", "ranks", "config"),
    "Pipeline stage (empty: unknown), versions, fingerprint, size of the group, digest of the configuration; always 1.",
)  # fmt: skip
START_TIME = Metric(
    "tpwatch_start_timestamp_seconds", "gauge", "seconds", ("group",), "When the watch began, in Unix time."
)
WATCHING = Metric(
    "tpwatch_watching",
    "gauge",
    "",
    ("group",),
    "1 from attach to the end of the watch, if there is anything to compare.",
)
REPLICAS = Metric("tpwatch_watched_replicas", "gauge", "", ("group",), "Replicated parameters that are compared.")
NOT_EXERCISED = Metric(
    "tpwatch_not_exercised_replicas", "gauge", "", ("group",),
    "Replicated parameters whose gradient was never seen non-zero: no claim is made about their reduction.",
)  # fmt: skip
UNVERIFIED = Metric(
    "tpwatch_unverified_replicas", "gauge", "", ("group",),
    "Replicated parameters whose reduction could not be decided so far.",
)  # fmt: skip

CHECKS = Metric(
    "tpwatch_checks_total", "counter", "", ("group", "result"),
    "Checks by result: clean (no finding holds), findings, skipped (a loss scaler skipped the step).",
)  # fmt: skip
LAST_STEP = Metric("tpwatch_last_check_step", "gauge", "", ("group",), "Training step of the last check.")
LAST_TIME = Metric(
    "tpwatch_last_check_timestamp_seconds", "gauge", "seconds", ("group",), "When the last check ended, in Unix time."
)
CHECK_DURATION = Metric(
    "tpwatch_check_duration_seconds", "histogram", "seconds", ("group", "phase"),
    "Host time of a check by phase: fingerprint, exchange (collectives and waiting for peers), diagnose.", SECONDS,
)  # fmt: skip
COLLECTIVES = Metric(
    "tpwatch_collectives_total", "counter", "", ("group", "purpose"),
    "Collectives joined: watch (two a check) or explain (gathers about what was flagged).",
)  # fmt: skip
BYTES = Metric(
    "tpwatch_exchanged_bytes_total", "counter", "bytes", ("group",), "Bytes put into collectives by the exporting rank."
)

DRIFT_ACTIVE = Metric(
    "tpwatch_drift_active", "gauge", "", ("group", "kind"),
    "1 while a confirmed fault of this kind (a cause of warning or error) holds; 0 once its parameters are healthy.",
)  # fmt: skip
FAULTY = Metric(
    "tpwatch_faulty_parameters", "gauge", "", ("group", "kind", "point"),
    "Parameters with a confirmed fault of this kind that holds, by the observation point that gave it away.",
)  # fmt: skip
FINDINGS = Metric(
    "tpwatch_findings_total", "counter", "", ("group", "kind", "point", "role"),
    "Findings confirmed, each parameter and kind once: causes and consequences. The exemplar has step and parameter.",
)  # fmt: skip
FIRST_STEP = Metric(
    "tpwatch_first_faulty_step", "gauge", "", ("group", "kind"), "First step at which a fault of this kind was present."
)
MAX_ABS = Metric(
    "tpwatch_divergence_max_abs", "gauge", "", ("group", "kind"),
    "Largest elementwise difference between copies seen in a finding of this kind.",
)  # fmt: skip
MAX_REL = Metric(
    "tpwatch_divergence_max_rel_ratio", "gauge", "ratio", ("group", "kind"),
    "Largest relative elementwise difference between copies seen in a finding of this kind.",
)  # fmt: skip
DIFFERING = Metric(
    "tpwatch_differing_replicas", "gauge", "", ("group", "point"),
    "Replicas not bit-identical at the last check. At grad_pre many may be, by right: partials are summed later.",
)  # fmt: skip
SPREAD_ABS = Metric(
    "tpwatch_replica_spread_max_abs", "gauge", "", ("group",),
    "Largest elementwise difference between copies of a parameter at the last check that gathered values.",
)  # fmt: skip
SPREAD_REL = Metric(
    "tpwatch_replica_spread_max_rel_ratio", "gauge", "ratio", ("group",),
    "Largest relative elementwise difference between copies of a parameter at the last check that gathered values.",
)  # fmt: skip
RATIO_MIN = Metric(
    "tpwatch_grad_norm_min_ratio", "gauge", "ratio", ("group",),
    "Smallest norm(after) / norm(before) the reduction over all watched gradients at the last check.",
)  # fmt: skip
RATIO_MAX = Metric(
    "tpwatch_grad_norm_max_ratio", "gauge", "ratio", ("group",),
    "Largest norm(after) / norm(before) the reduction over all watched gradients at the last check.",
)  # fmt: skip
ABORTS = Metric("tpwatch_aborts_total", "counter", "", ("group",), "Runs stopped by tpwatch because of a fault.")

EXPORTER_ERRORS = Metric(
    "tpwatch_exporter_errors_total", "counter", "", ("group", "exporter"),
    "Events that a sink of the exporting process failed at.",
)  # fmt: skip
EXPORTER_DROPPED = Metric(
    "tpwatch_exporter_dropped_events_total", "counter", "", ("group", "exporter"),
    "Events that a sink of the exporting process did not get because its queue was full.",
)  # fmt: skip
DROPPED_LABELS = Metric(
    "tpwatch_dropped_label_sets_total", "counter", "", ("group",),
    f"Updates booked under '{OTHER}' because their metric had {MOST_LABEL_SETS} label sets already.",
)  # fmt: skip

METRICS: tuple[Metric, ...] = (
    BUILD_INFO, START_TIME, WATCHING, REPLICAS, NOT_EXERCISED, UNVERIFIED,
    CHECKS, LAST_STEP, LAST_TIME, CHECK_DURATION, COLLECTIVES, BYTES,
    DRIFT_ACTIVE, FAULTY, FINDINGS, FIRST_STEP, MAX_ABS, MAX_REL, DIFFERING, SPREAD_ABS, SPREAD_REL,
    RATIO_MIN, RATIO_MAX, ABORTS,
    EXPORTER_ERRORS, EXPORTER_DROPPED, DROPPED_LABELS,
)  # fmt: skip
"""Every metric, in the order in which documentation and exposition list them."""
