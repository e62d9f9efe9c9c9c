"""The OpenTelemetry sink as a collector sees it: requests of OTLP over HTTP, decoded with its own protocol buffers."""

from __future__ import annotations

import atexit
import json
import logging
import shutil
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import _logs, metrics, trace
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from tests.commands import run_python
from tests.export._servers import free_port, wait_until
from tests.export.test_session import STEPS, attach, train
from tests.unit._samples import finding, plan, step_report
from tpwatch.config import Config, OpenTelemetry
from tpwatch.errors import ConfigError
from tpwatch.export import Health, Place
from tpwatch.export.catalog import CHECK_DURATION, METRICS
from tpwatch.export.fanout import PATIENCE, Fanout
from tpwatch.export.jsonl import RunLog
from tpwatch.export.otel import OtelSink, _overheard
from tpwatch.export.sinks import Loss, chosen

Ranks = Callable[..., list[Any]]
VERSION = metadata.version("tpwatch")
NEVER = 3600.0
"""Metrics are sent at the end only."""


# -------------------------------------------------------------------------------------- a collector


@dataclass
class Collector:
    """What was sent to an OTLP receiver, and how it answers."""

    url: str = ""
    status: int = 200
    blocked: threading.Event | None = None
    """If set, requests are answered only once this is."""
    metrics: list[ExportMetricsServiceRequest] = field(default_factory=list)
    logs: list[ExportLogsServiceRequest] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def take(self, path: str, headers: Mapping[str, str], body: bytes) -> None:
        """Decode one request."""
        kinds: dict[str, tuple[Any, list[Any]]] = {
            "/v1/metrics": (ExportMetricsServiceRequest, self.metrics),
            "/v1/logs": (ExportLogsServiceRequest, self.logs),
        }
        message, requests = kinds[path]
        self.headers.append(dict(headers))
        self.times.append(time.time())
        requests.append(message.FromString(body))

    @property
    def latest(self) -> dict[str, Any]:
        """Every metric of the last request, by name."""
        (resource,) = self.metrics[-1].resource_metrics
        (scope,) = resource.scope_metrics
        assert (scope.scope.name, scope.scope.version) == ("tpwatch", VERSION)
        return {metric.name: metric for metric in scope.metrics}

    @property
    def records(self) -> list[Any]:
        """Every log record so far."""
        scopes = [scope for request in self.logs for resource in request.resource_logs for scope in resource.scope_logs]
        return [record for scope in scopes for record in scope.log_records]


@contextmanager
def collector(**options: Any) -> Iterator[Collector]:
    """An OTLP receiver on loopback."""
    tls = options.pop("tls", None)
    said = Collector(**options)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if said.blocked is not None:
                said.blocked.wait(30)
            if said.status == 200:
                said.take(self.path, self.headers, body)
            try:
                self.send_response(said.status)
                self.end_headers()
            except OSError:
                self.close_connection = True  # the sink has given up waiting

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as in the base class
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        said.url = f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield said
        finally:
            if said.blocked is not None:
                said.blocked.set()
            server.shutdown()
            thread.join()


def values(metric: Any) -> dict[tuple[str, ...], float]:
    """Points of a sum or gauge by the values of their attributes, `group` apart."""
    points = getattr(metric, metric.WhichOneof("data")).data_points
    return {
        tuple(a.value.string_value for a in point.attributes if a.key != "group"): getattr(
            point, point.WhichOneof("value")
        )
        for point in points
    }


def attributes(pairs: Any) -> dict[str, Any]:
    """Attributes as a dictionary."""
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


class Run:
    """A run log whose events go to an OpenTelemetry sink, on this thread."""

    def __init__(self, directory: Path, **knobs: Any) -> None:
        """Start, with two parameters."""
        self.open = True
        config = Config(otel=OpenTelemetry(enabled=True, **{"interval": NEVER, **knobs}))
        self.sink = OtelSink(Place(config, directory / "run-1", "tp-0", Health({"otel": Loss()})))
        self.log = RunLog(directory / "run-1", "tp-0", "x", lambda line: self.sink.write(json.loads(line)))
        versions = {"tpwatch": "1.2", "torch": "2.13", "megatron_core": "0.16.1"}
        self.log.start(plan("a", "b"), 0, Config(), fingerprint={"name": "native"}, versions=versions, stage="1")

    def story(self) -> None:
        """Two checks, a finding, a status: every metric gets a sample."""
        for step in (1, 2):
            self.log.check(step_report(step, phases={"exchange": 0.002 * step}, ratio_lo=1.0, ratio_hi=2.0))
        self.log.finding(2, finding())
        self.log.status(2, ["b"], [])

    def close(self) -> None:
        """Close log and sink; idempotent."""
        if self.open:
            self.open = False
            self.log.close()
            self.sink.close()


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start runs; those that a test leaves open are closed, so that no thread goes on."""
    runs: list[Run] = []

    def start(**knobs: Any) -> Run:
        runs.append(Run(tmp_path, **knobs))
        return runs[-1]

    yield start
    for run in runs:
        with suppress(ConnectionError):
            run.close()


# ------------------------------------------------------------------------------------------ metrics


def test_metrics_are_those_of_the_catalogue(start: Start) -> None:
    """Names, units, types and help, each with a sample."""
    units = {"": "", "bytes": "By", "ratio": "1", "seconds": "s"}
    types = {"counter": "sum", "gauge": "gauge", "info": "gauge", "histogram": "histogram"}
    with collector() as there:
        run = start(endpoint=there.url)
        run.story()
        run.close()
    got = {name: (m.WhichOneof("data"), m.unit, m.description) for name, m in there.latest.items()}
    assert got == {m.name.removesuffix("_total"): (types[m.type], units[m.unit], m.help) for m in METRICS}
    sums = [metric.sum for metric in there.latest.values() if metric.WhichOneof("data") == "sum"]
    assert {(s.is_monotonic, s.aggregation_temporality) for s in sums} == {(True, 2)}  # 2: cumulative


def test_prometheus_would_call_them_what_it_scrapes(start: Start) -> None:
    """The rule by which Prometheus and the Collector name what comes over OTLP: a unit unless it is there, `_total`."""
    words = {"": "", "By": "bytes", "s": "seconds", "1": "ratio"}
    with collector() as there:
        run = start(endpoint=there.url)
        run.story()
        run.close()
    names = []
    for metric in there.latest.values():
        parts = metric.name.split("_")
        if words[metric.unit] and words[metric.unit] not in parts:
            parts.append(words[metric.unit])
        names.append("_".join(parts) + ("_total" if metric.WhichOneof("data") == "sum" else ""))
    assert sorted(names) == sorted(metric.name for metric in METRICS)


def test_values_are_those_of_the_events(start: Start) -> None:
    """As they stand at the end; labels are attributes."""
    with collector() as there:
        run = start(endpoint=there.url)
        run.story()
        run.close()
    assert values(there.latest["tpwatch_checks"]) == {("clean",): 2}
    assert values(there.latest["tpwatch_exchanged_bytes"]) == {(): 2000}
    assert values(there.latest["tpwatch_drift_active"])["double-reduce",] == 1
    assert values(there.latest["tpwatch_drift_active"])["drift",] == 0
    assert values(there.latest["tpwatch_findings"]) == {("double-reduce", "grad_post", "cause"): 1}
    assert values(there.latest["tpwatch_grad_norm_max_ratio"]) == {(): 2}
    assert values(there.latest["tpwatch_not_exercised_replicas"]) == {(): 1}
    (info,) = there.latest["tpwatch_build_info"].gauge.data_points
    assert attributes(info.attributes) == {
        "group": "tp-0", "stage": "1", "version": "1.2", "torch": "2.13", "framework": "megatron_core 0.16.1",
        "fingerprint": "native", "ranks": "2", "config": Config().digest(),
    }  # fmt: skip


def test_durations_fall_into_the_buckets_of_the_catalogue(start: Start) -> None:
    """One observation a check and phase; 2 and 4 milliseconds."""
    with collector() as there:
        run = start(endpoint=there.url)
        run.story()
        run.close()
    (point,) = there.latest["tpwatch_check_duration_seconds"].histogram.data_points
    assert attributes(point.attributes) == {"group": "tp-0", "phase": "exchange"}
    assert tuple(point.explicit_bounds) == CHECK_DURATION.buckets
    filled = [bound for bound, count in zip(point.explicit_bounds, point.bucket_counts, strict=False) if count]
    assert (point.count, filled) == (2, [0.0025, 0.005])
    assert point.sum == pytest.approx(0.006)


def test_the_sender_is_named(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Service, version, run and group; what the environment says of the host is added, of the trainer is not."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=pod-7,service.name=trainer")
    with collector() as there:
        run = start(endpoint=there.url)
        run.story()
        run.close()
    for resource in (there.metrics[-1].resource_metrics[0].resource, there.logs[-1].resource_logs[0].resource):
        named = attributes(resource.attributes)
        assert named["service.name"] == "tpwatch"
        assert named["service.instance.id"] == "run-1.tp-0"
        assert named["service.version"] == VERSION
        assert named["k8s.pod.name"] == "pod-7"


def test_metrics_go_on_while_training_hangs(start: Start) -> None:
    """Without any event, so that whoever watches can tell silence of the monitor from silence of the network."""
    with collector() as there:
        run = start(endpoint=there.url, interval=0.1)
        run.log.check(step_report(1))
        wait_until(lambda: len(there.metrics) > 3, "four exports", time.monotonic() + 10)
        assert values(there.latest["tpwatch_last_check_step"]) == {(): 1}
        run.close()


def test_what_stopped_a_run_is_sent_before_anything_is_closed(start: Start) -> None:
    """Whoever raises the fault may close nothing."""
    with collector() as there:
        run = start(endpoint=there.url)
        run.story()
        assert there.metrics == []
        run.log.abort(2)
        assert values(there.latest["tpwatch_aborts"]) == {(): 1}
        assert [record.event_name for record in there.records] == ["tpwatch.finding"]
        run.close()


# ----------------------------------------------------------------------------------------- findings


def test_a_finding_is_a_log_record_within_a_moment(start: Start) -> None:
    """Severity, text and attributes; it does not wait for the metrics."""
    found = finding(parameter="a.weight", first_step=2, max_abs=float("inf"), odd_ranks=(1,))
    with collector() as there:
        run = start(endpoint=there.url)
        run.log.finding(3, found)
        wait_until(lambda: there.records, "a record", time.monotonic() + 5)
        assert there.metrics == []
        run.close()
    (record,) = there.records
    assert (record.severity_text, record.severity_number, record.event_name) == ("ERROR", 17, "tpwatch.finding")
    assert "double-reduce of a.weight since step 2" in record.body.string_value
    assert abs(record.time_unix_nano / 1e9 - time.time()) < 60
    said = attributes(record.attributes)
    assert {name.removeprefix("tpwatch.") for name in said} <= set(found.to_json())
    assert said["tpwatch.kind"] == "double-reduce"
    assert said["tpwatch.parameter"] == "a.weight"
    assert said["tpwatch.first_step"] == 2
    assert said["tpwatch.ranks"] == [0, 1]
    assert "tpwatch.max_abs" not in said  # not finite, and so not in the event
    assert "tpwatch.caused_by" not in said


@pytest.mark.parametrize(("severity", "number"), [("info", 9), ("warning", 13), ("error", 17)])
def test_severities_are_those_of_opentelemetry(start: Start, severity: str, number: int) -> None:
    """By which a collector filters."""
    with collector() as there:
        run = start(endpoint=there.url)
        run.log.finding(1, finding(severity=severity))
        run.close()
    assert [record.severity_number for record in there.records] == [number]


def test_a_finding_is_told_again_only_if_it_gets_worse(start: Start) -> None:
    """However often it is written while it goes on."""
    with collector() as there:
        run = start(endpoint=there.url)
        for severity in ("info", "info", "error", "error"):
            run.log.finding(1, finding(severity=severity))
        run.close()
    assert [record.severity_text for record in there.records] == ["INFO", "ERROR"]


# -------------------------------------------------------------------------------------- environment


def test_the_usual_variables_say_where_and_how(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Endpoint and headers, for both signals."""
    with collector() as there:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", there.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=team-7")
        run = start()
        run.story()
        run.close()
    assert there.metrics
    assert there.logs
    assert {headers["x-tenant"] for headers in there.headers} == {"team-7"}


def test_the_knob_goes_before_the_variable(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before those of one signal; headers still come from the environment, where secrets are."""
    for name in ("ENDPOINT", "METRICS_ENDPOINT", "LOGS_ENDPOINT"):
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=team-7")
    with collector() as there:
        run = start(endpoint=f"{there.url}/")
        run.story()
        run.close()
    assert (len(there.metrics), len(there.logs)) == (1, 1)
    assert {headers["x-tenant"] for headers in there.headers} == {"team-7"}


def test_https_with_the_authority_from_the_environment(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector whose certificate is not trusted gets nothing."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl (package openssl)")
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    subprocess.run(
        [  # noqa: S607 - openssl from PATH
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
            "-out", cert, "-keyout", key,
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    with collector(tls=(cert, key)) as there:
        distrusting = start(endpoint=there.url)
        with pytest.raises(ConnectionError, match=r"(?i)certificate"):
            distrusting.close()
        assert there.metrics == []
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", cert)
        for bundle in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # these would go first
            monkeypatch.delenv(bundle, raising=False)
        run = start(endpoint=there.url)
        run.close()
        assert len(there.metrics) == 1


# --------------------------------------------------------------------------------- bad collectors


@dataclass
class Ended:
    """A run whose sinks were a collector's and one beside it."""

    health: Health
    seconds: float
    """The end took so long."""
    beside: list[str]
    """Kinds of events that the other sink got."""


def run_with(tmp_path: Path, endpoint: str) -> Ended:
    """Run both sinks as a job would: some events, an export of metrics every 0.2 seconds, a finding, the end."""
    config = Config(
        otel=OpenTelemetry(enabled=True, endpoint=endpoint, interval=0.2), sinks=("tests.export._sinks:Lists",)
    )
    place = Place(config, tmp_path, "tp-0")
    fanout = Fanout(chosen(config), place)
    log = RunLog(tmp_path, "tp-0", "x", fanout.hand_over)
    log.start(plan("a"), 0, config)
    for step in range(1, 6):
        log.check(step_report(step))
        time.sleep(0.25)
    log.finding(5, finding())
    log.end(5)
    began = time.monotonic()
    fanout.close()
    seconds = time.monotonic() - began
    return Ended(place.health, seconds, (tmp_path / "kinds.tp-0").read_text().split())


EVENTS = ["start", *["check"] * 5, "finding", "end", "closed"]


@pytest.mark.parametrize("answers", [None, 503, 400])
def test_a_collector_that_is_down_costs_its_own_data(
    tmp_path: Path, answers: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Failures are counted, said once, and end in time; the other sink has every event."""
    with ExitStack() as cleanup:
        url = f"http://127.0.0.1:{free_port()}"
        if answers is not None:
            url = cleanup.enter_context(collector(status=answers)).url
        ended = run_with(tmp_path, url)
    assert ended.beside == EVENTS
    assert ended.seconds < PATIENCE
    assert ended.health.losses["otel"].errors >= 1
    assert [record.name for record in caplog.records if record.name.startswith("opentelemetry")] == []
    said = [message for message in caplog.messages if "sink otel failed at" in message]
    assert len(said) in {1, 2}, said  # at an event, at closing
    assert len(caplog.messages) == len(said) + 1, caplog.messages  # how many, at the end


def test_a_collector_that_never_answers_holds_nothing_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The end comes within the patience of all sinks, and no thread is left that the process would wait for."""
    before = set(threading.enumerate())
    with collector(blocked=threading.Event()) as there:
        serving = set(threading.enumerate())
        ended = run_with(tmp_path, there.url)
        left = [t for t in set(threading.enumerate()) - serving - before if "process_request" not in t.name]
        assert all(thread.daemon for thread in left), left
    assert ended.beside == EVENTS
    assert ended.seconds < PATIENCE + 1.0
    assert len(caplog.records) <= 3, caplog.text


def check_on_and_on(run: Run) -> None:
    """Check until the sink says that an export failed."""
    for step in range(1, 200):
        run.log.check(step_report(step))
        time.sleep(0.05)


def test_a_collector_that_comes_back_gets_the_totals(start: Start) -> None:
    """Counts are cumulative: an outage costs resolution, not events."""
    with collector(status=400) as there:
        run = start(endpoint=there.url, interval=0.1)
        with pytest.raises(ConnectionError):
            check_on_and_on(run)
        there.status = 200
        wait_until(lambda: there.metrics, "an export", time.monotonic() + 10)
        (counted,) = values(there.latest["tpwatch_checks"]).values()
        (last,) = values(there.latest["tpwatch_last_check_step"]).values()
        assert counted == last >= 2
        run.close()


# ------------------------------------------------------------------------------------- the host


def test_nothing_of_the_host_is_touched(start: Start) -> None:
    """Its providers are those from before, its loggers have no filter of ours, its end does not wait for us."""
    providers = (metrics.get_meter_provider, _logs.get_logger_provider, trace.get_tracer_provider)
    before = [get() for get in providers]
    threads = set(threading.enumerate())
    with collector() as there:
        start(endpoint=there.url).close()  # what is imported on the way may ask to be called at exit
        at_exit = atexit._ncallbacks()
        run = start(endpoint=there.url)
        run.story()
        assert [get() for get in providers] == before
        assert atexit._ncallbacks() == at_exit
        run.close()
    assert [get() for get in providers] == before
    loggers = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    filters = [f for logger in loggers for f in logger.filters if getattr(f, "__module__", "") == OtelSink.__module__]
    assert filters == []
    assert set(threading.enumerate()) <= threads


FORK = """
import os, sys, time
from pathlib import Path
from tpwatch.config import Config, OpenTelemetry
from tpwatch.export import Place
from tpwatch.export.otel import OtelSink
config = Config(otel=OpenTelemetry(enabled=True, endpoint=sys.argv[1], interval=0.1))
sink = OtelSink(Place(config, Path("run"), "tp-0"))
if os.fork() == 0:
    time.sleep(1.0)
    os._exit(0)
sink.close()
print(time.time())
os.wait()
"""


def test_a_forked_process_sends_nothing() -> None:
    """Workers of a data loader are forked; they must not send old values under the same name."""
    with collector() as there:
        done = run_python("-c", FORK, there.url)
        assert done.returncode == 0, done.stderr
    assert there.times
    assert max(there.times) <= float(done.stdout)


def test_the_log_of_the_hosts_own_exporters_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Only what our threads log while they export is heard by us instead."""
    logger = logging.getLogger("opentelemetry.exporter.otlp.example")
    with _overheard() as said:
        theirs = threading.Thread(target=logger.warning, args=("the trainer's",))
        theirs.start()
        theirs.join()
        logger.warning("ours: %d", 7)
    logger.warning("afterwards")
    assert said == ["ours: 7"]
    assert caplog.messages == ["the trainer's", "afterwards"]


def test_without_the_sdk_the_error_names_the_extra(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install, not where the import broke."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    with pytest.raises(ConfigError, match=r"tpwatch\[otel\]"):
        start()


def exporting(rank: int, out: str, endpoint: str) -> None:
    """Train with the sink on."""
    model, watch = attach(f"{out}/run", otel={"enabled": True, "endpoint": endpoint})
    train(model, rank)
    watch.detach()


def test_a_run_is_exported_by_its_leader(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """A real run of two ranks: one sender, every check, and the fault."""
    with collector() as there:
        gloo_ranks(2, exporting, str(tmp_path), there.url, timeout=60)
    senders = {attributes(request.resource_metrics[0].resource.attributes)["service.instance.id"]: request
               for request in there.metrics}  # fmt: skip
    assert list(senders) == ["run.tp-0"]
    assert sum(values(there.latest["tpwatch_checks"]).values()) == STEPS
    assert values(there.latest["tpwatch_drift_active"])["missing-reduce",] == 1
    assert "missing-reduce" in {attributes(record.attributes)["tpwatch.kind"] for record in there.records}
