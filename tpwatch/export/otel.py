"""The OpenTelemetry sink: the catalogue's metrics and a log record for each finding, over OTLP (HTTP).

Knows the opentelemetry packages, which it imports when it is built, and its own knobs. Its providers are its own: those
of the host process (`opentelemetry.metrics.get_meter_provider` and the like) are neither used nor set.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from typing import Any

from tpwatch.errors import ConfigError
from tpwatch.export import catalog
from tpwatch.export.catalog import METRICS, Metric, Unit
from tpwatch.export.sinks import LEVELS, Place, Told
from tpwatch.export.snapshot import Numbers

FLUSH_MILLISECONDS = 2000
"""That each of logs and metrics may take when a run is stopped: less than the sinks are waited for then."""

CLOSING_SECONDS = 3.0
"""So long the end of a run tries to send what is left; all sinks together have two seconds more."""

LOG_DELAY = 1.0
"""Findings of so many seconds go together."""

UCUM: Mapping[Unit, str] = {"": "", "bytes": "By", "ratio": "1", "seconds": "s"}
"""The catalogue's units as OpenTelemetry writes them."""

ATTRIBUTES = (
    "kind", "code", "parameter", "point", "role", "caused_by", "first_step", "confidence",
    "observed", "expected", "ratio", "max_abs", "max_rel", "ranks", "odd_ranks", "advice",
)  # fmt: skip
"""What a record has of a finding, each as `tpwatch.<name>`."""


class OtelSink:
    """Metrics every few seconds and findings within one, both sent by threads of the SDK.

    A collector that cannot be reached costs its own data alone: each failed export becomes an error of this sink.

    Raises:
        ConfigError: the SDK or its OTLP exporter is not installed.
    """

    def __init__(self, place: Place) -> None:
        """Start the SDK's threads; nothing is sent yet."""
        _require()
        self._group = place.group
        self._numbers = Numbers(place.group, place.health)
        self._exports = _Exports(place.config.otel.endpoint)
        resource = _resource(place)
        self._meters = _meter_provider(resource, self._exports, place.config.otel.interval)
        self._durations = _instruments(self._meters.get_meter("tpwatch", _version()), self._numbers)
        self._loggers = _logger_provider(resource, self._exports)
        self._logger = self._loggers.get_logger("tpwatch", _version())
        self._told = Told()

    def write(self, event: Mapping[str, Any]) -> None:
        """Fold one event into the numbers of the next export; tell a finding when it is new or more severe.

        Raises:
            ConnectionError: exports have failed since the last event, which is taken all the same.
        """
        self._numbers.fold(event)
        if event["event"] == "check":
            for phase, seconds in event["phases"].items():
                self._durations.record(seconds, {"group": self._group, "phase": phase})
        elif event["event"] == "finding" and self._told.is_news(event["finding"]):
            self._logger.emit(**_record(event["finding"], event["time"]))
        elif event["event"] == "abort":  # whoever raises the fault may close nothing
            for provider in (self._loggers, self._meters):
                provider.force_flush(FLUSH_MILLISECONDS)
        self._exports.check()

    def close(self) -> None:
        """Send what is left: findings, then metrics.

        Raises:
            ConnectionError: an export failed.
        """
        alarm = threading.Timer(CLOSING_SECONDS, self._exports.give_up)
        alarm.daemon = True
        alarm.start()
        with _overheard():
            self._loggers.shutdown()
            # A little later than the alarm, so that what then fails is heard of.
            self._meters.shutdown(timeout_millis=1000 * CLOSING_SECONDS + 500)
        alarm.cancel()
        self._exports.check()


class _Exports:
    """Where exports go, and which of them failed: the SDK's threads say so, the sink's own is told."""

    def __init__(self, endpoint: str | None) -> None:
        self._endpoint = endpoint
        self._process = os.getpid()
        self._built: list[Any] = []
        self._failed: deque[str] = deque(maxlen=1)

    def build(self, exporter: Callable[..., Any], path: str) -> Any:  # noqa: ANN401 - of a package imported on demand
        """An exporter; whatever is not given here, it reads from `OTEL_EXPORTER_OTLP_*` itself."""
        where = {"endpoint": f"{self._endpoint.rstrip('/')}/{path}"} if self._endpoint else {}
        built = exporter(**where)
        built.export = partial(self._export, built.export)
        self._built.append(built)
        return built

    def give_up(self) -> None:
        """Wait for no further attempt; one that is under way goes on until its own timeout."""
        for exporter in self._built:
            exporter.shutdown()

    def check(self) -> None:
        """Raise `ConnectionError` if an export has failed since the last time."""
        if self._failed:
            raise ConnectionError(self._failed.pop())

    def _export(self, export: Callable[..., Any], *args: Any, **options: Any) -> Any:  # noqa: ANN401 - as above
        # The SDK goes on in forked processes, such as workers of a data loader: the same series, standing still.
        if os.getpid() != self._process:
            return None
        with _overheard() as said:
            try:
                result = export(*args, **options)
            except OSError as error:  # older exporters let it through to the SDK, which would log a traceback
                said.insert(0, str(error))
                result = None
        if result is None or result.name != "SUCCESS":
            self._failed.append(said[0] if said else "an export failed")
        return result


@contextmanager
def _overheard() -> Iterator[list[str]]:
    """Keep what exporters log on this thread out of the log, and hand it over instead.

    The sink reports the first failure of a kind itself; exporters of the host process log as ever, on other threads.
    """
    thread, said = threading.get_ident(), list[str]()

    def passes(record: logging.LogRecord) -> bool:
        if threading.get_ident() != thread:
            return True
        said.append(record.getMessage())
        return False

    names = [name for name in tuple(logging.root.manager.loggerDict) if name.startswith("opentelemetry.exporter.otlp")]
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addFilter(passes)
    try:
        yield said
    finally:
        for logger in loggers:
            logger.removeFilter(passes)


# ------------------------------------------------------------------------------------------ metrics


def _meter_provider(resource: Any, exports: _Exports, interval: float) -> Any:  # noqa: ANN401 - as above
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View

    exporter = exports.build(OTLPMetricExporter, "v1/metrics")
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=1000 * interval)
    views = [
        View(instrument_name=metric.name, aggregation=ExplicitBucketHistogramAggregation(metric.buckets))
        for metric in METRICS
        if metric.type == "histogram"
    ]
    # Not on exit: the process ends when training does, and must not wait for a collector then.
    return MeterProvider([reader], resource=resource, views=views, shutdown_on_exit=False)


def _instruments(meter: Any, numbers: Numbers) -> Any:  # noqa: ANN401 - as above
    """Make an instrument for each metric; all are asked for their values but the one returned, which is told."""
    for metric in METRICS:
        if metric.type != "histogram":
            counts = metric.type == "counter"
            make = meter.create_observable_counter if counts else meter.create_observable_gauge
            make(_name(metric), [partial(_observe, numbers, metric)], UCUM[metric.unit], metric.help)
    durations = catalog.CHECK_DURATION
    return meter.create_histogram(_name(durations), UCUM[durations.unit], durations.help)


def _name(metric: Metric) -> str:
    """The name as scraped, but for `_total`: what turns OTLP into Prometheus adds that again, and nothing else."""
    return metric.name.removesuffix("_total")


def _observe(numbers: Numbers, metric: Metric, _options: object) -> list[Any]:
    from opentelemetry.metrics import Observation

    samples = numbers.samples(metric)
    return [Observation(sample.value, dict(zip(metric.labels, sample.labels, strict=True))) for sample in samples]


# ----------------------------------------------------------------------------------------- findings


def _logger_provider(resource: Any, exports: _Exports) -> Any:  # noqa: ANN401 - as above
    from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import BatchLogRecordProcessor

    provider = LoggerProvider(resource=resource, shutdown_on_exit=False)
    exporter = exports.build(OTLPLogExporter, "v1/logs")
    provider.add_log_record_processor(BatchLogRecordProcessor(exporter, schedule_delay_millis=1000 * LOG_DELAY))
    return provider


def _record(found: Mapping[str, Any], time: float) -> dict[str, Any]:
    """Arguments of `emit` for a finding; what a finding does not have is left out."""
    from opentelemetry._logs import SeverityNumber

    severity = LEVELS[found["severity"]]
    since = f"{found['kind']} of {found['parameter']} since step {found['first_step']}"
    return {
        "timestamp": int(time * 1e9),
        "severity_number": SeverityNumber[severity],
        "severity_text": severity,
        "event_name": "tpwatch.finding",
        "body": f"{since}: observed {found['observed']}, expected {found['expected']}. {found['advice']}",
        "attributes": {f"tpwatch.{name}": found[name] for name in ATTRIBUTES if found[name] is not None},
    }


def _resource(place: Place) -> Any:  # noqa: ANN401 - as above
    """Who sends; what `OTEL_RESOURCE_ATTRIBUTES` says of the host is added."""
    from opentelemetry.sdk.resources import Resource

    facts = {"service.name": "tpwatch", "service.instance.id": place.name, "service.version": _version()}
    return Resource.create(facts)


def _version() -> str:
    """Version of tpwatch; a source tree that is merely on the path has none."""
    try:
        return metadata.version("tpwatch")
    except metadata.PackageNotFoundError:
        return "source"


def _require() -> None:
    """Find out now that a package is missing, in words that say which extra has it."""
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.version  # noqa: F401 - only looked for
    except ImportError:
        rule, remedy = "needs opentelemetry's SDK and OTLP exporter", "Install them: pip install 'tpwatch[otel]'."
        raise ConfigError(knob="otel.enabled", value=True, rule=rule, remedy=remedy) from None
