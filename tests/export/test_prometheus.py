"""The Prometheus sink as a scraper, a textfile collector, a Pushgateway and service discovery see it."""

from __future__ import annotations

import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.export._servers import OPEN_METRICS, fetch, free_port, listening, receiver
from tests.unit._report_runs import HOSTILE
from tests.unit._samples import finding, plan, step_report
from tpwatch.config import Config, Prometheus
from tpwatch.export import Health, Place
from tpwatch.export.catalog import METRICS
from tpwatch.export.jsonl import RunLog
from tpwatch.export.prometheus import PrometheusSink
from tpwatch.export.sinks import Loss

Value = tuple[str, frozenset[tuple[str, str]]]


class Run:
    """A run log whose events go to a Prometheus sink, on this thread."""

    def __init__(self, directory: Path, group: str = "tp-0", **knobs: Any) -> None:
        """Start, unless the test does."""
        config = Config(prometheus=Prometheus(enabled=True, **{"port": 0, **knobs}))
        self.sink = PrometheusSink(Place(config, directory, group, Health({"prometheus": Loss()})))
        self.log = RunLog(directory, group, "x", lambda line: self.sink.write(json.loads(line)))

    def story(self) -> None:
        """Start, two checks, a finding, a status: every metric gets a sample."""
        self.log.start(plan("a", "b"), 0, Config(), fingerprint={"name": "native"}, versions={"torch": "2"})
        for step in (1, 2):
            self.log.check(step_report(step, phases={"exchange": 0.002 * step}, ratio_lo=1.0, ratio_hi=2.0))
        self.log.finding(2, finding())
        self.log.status(2, ["b"], [])


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start runs below this test's directory; their sinks are closed at the end."""
    runs: list[Run] = []

    def start(name: str = "run-1", group: str = "tp-0", **knobs: Any) -> Run:
        runs.append(Run(tmp_path / name, group, **knobs))
        return runs[-1]

    yield start
    for run in runs:
        run.sink.close()
        run.log.close()


def values(text: str) -> dict[Value, float]:
    """Every sample of a text exposition by name and labels."""
    families = parse_text(text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def of(name: str, **labels: str) -> Value:
    """Key of a sample of group tp-0."""
    return (name, frozenset({"group": "tp-0", **labels}.items()))


def names(directory: Path) -> list[str]:
    """Files, the digest of the run directory aside."""
    return sorted(re.sub(r"\.[0-9a-f]{8}\.", ".*.", path.name) for path in directory.iterdir())


# ---------------------------------------------------------------------------------------- scraping


def test_a_scrape_shows_the_run(start: Start) -> None:
    """Counts, gauges, facts and durations, as they stand now."""
    run = start()
    run.story()
    seen = values(fetch(run.sink.url))
    assert seen[of("tpwatch_drift_active", kind="double-reduce")] == 1
    assert seen[of("tpwatch_drift_active", kind="drift")] == 0
    assert seen[of("tpwatch_findings_total", kind="double-reduce", point="grad_post", role="cause")] == 1
    assert seen[of("tpwatch_last_check_step")] == 2
    assert seen[of("tpwatch_grad_norm_max_ratio")] == 2
    assert seen[of("tpwatch_check_duration_seconds_count", phase="exchange")] == 2
    assert seen[of("tpwatch_check_duration_seconds_bucket", phase="exchange", le="0.0025")] == 1
    assert seen[of("tpwatch_check_duration_seconds_bucket", phase="exchange", le="+Inf")] == 2
    run.log.check(step_report(3))
    assert values(fetch(run.sink.url))[of("tpwatch_last_check_step")] == 3


def test_both_formats_agree_and_obey_the_strict_parser(start: Start) -> None:
    """OpenMetrics names, types, units and help are those of the catalogue."""
    run = start()
    run.story()
    families = {family.name: family for family in parse_openmetrics(fetch(run.sink.url, OPEN_METRICS))}
    assert [(m.family, m.type, m.unit, m.help) for m in METRICS] == [
        (f.name, f.type, f.unit, f.documentation) for f in families.values()
    ]
    open_metrics = {(s.name, frozenset(s.labels.items())): s.value for f in families.values() for s in f.samples}
    assert open_metrics == values(fetch(run.sink.url))


def test_nothing_of_the_host_process_is_exported(start: Start) -> None:
    """The registry is our own: no python_info, no process_*, nothing of the trainer's."""
    run = start()
    run.story()
    assert {name for name, _ in values(fetch(run.sink.url)) if not name.startswith("tpwatch_")} == set()


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_breaks_the_exposition(start: Start, name: str) -> None:
    """Quotes, markup, control characters and half characters stay within one exemplar, escaped; labels have none."""
    run = start()
    run.log.start(plan(name), 0, Config(), fingerprint={"name": "native"}, versions={"torch": "2"})
    run.log.finding(2, finding(parameter=name))
    page = fetch(run.sink.url, OPEN_METRICS)
    assert all(line.startswith(("tpwatch_", "#")) and line.isprintable() for line in page.splitlines())
    (shown,) = re.findall(r'# {parameter="((?:[^"\\]|\\.)*)",step="1"}', page)
    expected = name if name.isprintable() else name.encode("unicode_escape").decode()
    assert re.sub(r"\\(.)", r"\1", shown) == expected
    assert values(fetch(run.sink.url))[of("tpwatch_drift_active", kind="double-reduce")] == 1


def test_exemplars_carry_step_and_parameter(start: Start) -> None:
    """What labels must not carry, an exemplar does; only OpenMetrics has them."""
    run = start()
    run.story()
    families = {family.name: family for family in parse_openmetrics(fetch(run.sink.url, OPEN_METRICS))}
    (found,) = families["tpwatch_findings"].samples
    assert found.exemplar.labels == {"step": "1", "parameter": finding().parameter}
    steps = [s.exemplar.labels for s in families["tpwatch_check_duration_seconds"].samples if s.exemplar]
    assert steps == [{"step": "1"}, {"step": "2"}]


@pytest.mark.prom
def test_promtool_has_nothing_to_say(start: Start) -> None:
    """`promtool check metrics` lints names, types and help."""
    run = start()
    run.story()
    text = fetch(run.sink.url)
    done = subprocess.run(["promtool", "check", "metrics"], input=text, text=True, capture_output=True, check=False)  # noqa: S607
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_scrapes_in_the_middle_of_writing_are_whole(start: Start) -> None:
    """Hundreds of events while another thread scrapes: every scrape parses, and counts never fall."""
    run = start()
    run.story()
    stop, steps, failures = threading.Event(), [], []

    def scrape() -> None:
        while not stop.is_set():
            try:
                steps.append(values(fetch(run.sink.url))[of("tpwatch_last_check_step")])
            except Exception as error:  # noqa: BLE001, PERF203 - whatever it is fails the test
                failures.append(error)

    scraper = threading.Thread(target=scrape)
    scraper.start()
    for step in range(3, 600):
        run.log.check(step_report(step, phases={"exchange": 0.001}))
    stop.set()
    scraper.join()
    assert failures == []
    assert steps
    assert steps == sorted(steps)


# ------------------------------------------------------------------------------------------- ports


def test_two_leaders_of_a_node_take_two_ports(start: Start) -> None:
    """The second finds the first's port taken, and takes the next."""
    port = free_port()
    first, second = start(port=port), start(group="tp-2", port=port)
    assert urlsplit(first.sink.url).port == port
    assert port < (urlsplit(second.sink.url).port or 0) < port + 16
    second.story()
    assert ("tpwatch_last_check_step", frozenset({("group", "tp-2")})) in values(fetch(second.sink.url))


def test_without_a_free_port_there_is_a_warning_and_the_rest_goes_on(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The search is bounded, nothing is raised, and the textfile is written all the same."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run = start(port=taken.getsockname()[1], ports=1, textfile=str(tmp_path / "text"))
    assert run.sink.url == ""
    assert "metrics of tp-0 are not served" in caplog.text
    assert "prometheus.ports" in caplog.text
    run.story()
    assert names(tmp_path / "text") == ["run-1.tp-0.*.prom"]


def test_only_this_machine_can_scrape_by_default(start: Start) -> None:
    """Loopback, unless another address is asked for."""
    run = start()
    assert urlsplit(run.sink.url).hostname == "127.0.0.1"
    everywhere = start(address="0.0.0.0")  # noqa: S104 - what the test is about
    assert urlsplit(everywhere.sink.url).hostname == socket.gethostname()


def test_closing_gives_the_port_back(start: Start) -> None:
    """Also with a client that keeps its connection open and says nothing."""
    run = start()
    port = urlsplit(run.sink.url).port or 0
    with socket.create_connection(("127.0.0.1", port)):
        run.sink.close()
    assert not listening(port)
    again = start("run-2", port=port, ports=1)
    assert urlsplit(again.sink.url).port == port


def test_nothing_is_served_without_http(start: Start) -> None:
    """Where no port may be opened, none is."""
    assert start(http=False).sink.url == ""


# --------------------------------------------------------------------------------------------- TLS


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A self-signed certificate of 127.0.0.1 that may also sign itself in as a client, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl (package openssl)")
    directory = tmp_path_factory.mktemp("tls")
    paths = str(directory / "cert.pem"), str(directory / "key.pem")
    subprocess.run(
        [  # noqa: S607 - openssl from PATH
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
            "-out", paths[0], "-keyout", paths[1],
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    return paths


def test_https_with_a_certificate(start: Start, certificate: tuple[str, str]) -> None:
    """A client that verifies the certificate gets the metrics; plain HTTP gets nothing."""
    cert, key = certificate
    run = start(tls_cert=cert, tls_key=key)
    run.story()
    assert run.sink.url.startswith("https://")
    trusting = ssl.create_default_context(cafile=cert)
    assert values(fetch(run.sink.url, context=trusting))[of("tpwatch_last_check_step")] == 2
    with pytest.raises((OSError, urllib.error.URLError)):
        fetch(run.sink.url.replace("https://", "http://"))


def test_https_may_ask_for_the_scrapers_certificate(start: Start, certificate: tuple[str, str]) -> None:
    """One without it is turned away, one with it is served."""
    cert, key = certificate
    run = start(tls_cert=cert, tls_key=key, tls_client_ca=cert)
    run.story()
    stranger = ssl.create_default_context(cafile=cert)
    with pytest.raises(OSError, match=r"(?i)certificate required|reset|closed|EOF"):
        fetch(run.sink.url, context=stranger)
    stranger.load_cert_chain(cert, key)
    assert of("tpwatch_last_check_step") in values(fetch(run.sink.url, context=stranger))


def test_a_certificate_that_cannot_be_read_serves_nothing(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rather than fall back to plain HTTP."""
    missing = str(tmp_path / "missing.pem")
    assert start(tls_cert=missing, tls_key=missing).sink.url == ""
    assert "missing.pem" in caplog.text


# ----------------------------------------------------------------------------- files and the gateway


def labels(run: str) -> dict[str, str]:
    """Labels of the target of a run on this host."""
    return {"__host__": socket.gethostname(), "run": run}


def test_a_target_file_names_the_exporter_while_it_runs(start: Start, tmp_path: Path) -> None:
    """In the form of `file_sd_configs`, one file a leader, gone after an orderly end."""
    targets = tmp_path / "targets"
    runs = [start(group=group, file_sd=str(targets)) for group in ("tp-0", "tp-2")]
    assert names(targets) == ["run-1.tp-0.*.json", "run-1.tp-2.*.json"]
    assert [json.loads(path.read_text()) for path in sorted(targets.iterdir())] == [
        [{"targets": [urlsplit(run.sink.url).netloc], "labels": labels("run-1")}] for run in runs
    ]
    runs[0].sink.close()
    assert names(targets) == ["run-1.tp-2.*.json"]


def test_runs_of_one_name_do_not_share_files(start: Start, tmp_path: Path) -> None:
    """`--out runs/today` in two projects: a target and a textfile each, which go with their own run."""
    shared = {"file_sd": str(tmp_path / "targets"), "textfile": str(tmp_path / "text")}
    one, other = (start(f"{project}/runs/today", **shared) for project in ("a", "b"))
    for run in (one, other):
        run.story()
    assert names(tmp_path / "targets") == ["today.tp-0.*.json"] * 2
    assert names(tmp_path / "text") == ["today.tp-0.*.prom"] * 2
    one.sink.close()
    ((target,),) = (json.loads(path.read_text()) for path in (tmp_path / "targets").iterdir())
    assert target == {"targets": [urlsplit(other.sink.url).netloc], "labels": labels("today")}
    assert names(tmp_path / "text") == ["today.tp-0.*.prom"]


def test_a_start_that_closes_late_leaves_the_files_of_its_successor(start: Start, tmp_path: Path) -> None:
    """The same run directory, by whatever path, has the same files; who wrote them last takes them back."""
    (tmp_path / "link").symlink_to(tmp_path)
    shared = {"file_sd": str(tmp_path / "targets"), "textfile": str(tmp_path / "text")}
    old, new = start(**shared), start("link/run-1", **shared)
    old.story()
    new.story()
    assert names(tmp_path / "targets") + names(tmp_path / "text") == ["run-1.tp-0.*.json", "run-1.tp-0.*.prom"]
    old.sink.close()
    (target,) = json.loads(next((tmp_path / "targets").iterdir()).read_text())
    assert target["targets"] == [urlsplit(new.sink.url).netloc]
    assert names(tmp_path / "text") == ["run-1.tp-0.*.prom"]
    new.sink.close()
    assert names(tmp_path / "targets") == names(tmp_path / "text") == []


def test_a_target_that_a_killed_run_has_left_is_not_taken_for_ours(start: Start, tmp_path: Path) -> None:
    """At the address that is ours now. Files of other addresses, of other hosts, or of other writers, stay."""
    targets, port = tmp_path / "targets", free_port()
    targets.mkdir()
    left = {
        "killed.tp-0.0123abcd.json": (port, socket.gethostname()),
        "killed.tp-2.0123abcd.json": (port + 1, socket.gethostname()),
        "live.tp-0.0123abcd.json": (port, "another-node"),
        "by-hand.json": (port, socket.gethostname()),
    }
    for name, (of_port, host) in left.items():
        told = [{"targets": [f"127.0.0.1:{of_port}"], "labels": {"__host__": host, "run": "killed"}}]
        (targets / name).write_text(json.dumps(told) + "\n")
    start(port=port, ports=1, file_sd=str(targets))
    assert names(targets) == ["by-hand.json", "killed.tp-2.*.json", "live.tp-0.*.json", "run-1.tp-0.*.json"]


def test_a_target_file_says_https(start: Start, tmp_path: Path, certificate: tuple[str, str]) -> None:
    """Prometheus takes the scheme from a label."""
    cert, key = certificate
    start(file_sd=str(tmp_path / "targets"), tls_cert=cert, tls_key=key)
    (path,) = (tmp_path / "targets").iterdir()
    assert json.loads(path.read_text())[0]["labels"] == {**labels("run-1"), "__scheme__": "https"}


def test_the_textfile_holds_what_a_scrape_would_show(start: Start, tmp_path: Path) -> None:
    """With the run as a label, since node_exporter mixes the files of all runs; gone after an orderly end."""
    run = start(http=False, textfile=str(tmp_path / "text"))
    run.story()
    (path,) = (tmp_path / "text").iterdir()
    assert names(tmp_path / "text") == ["run-1.tp-0.*.prom"]
    seen = values(path.read_text())
    assert seen[of("tpwatch_last_check_step", run="run-1")] == 2
    assert {dict(labels)["run"] for _, labels in seen} == {"run-1"}
    run.log.end(2)
    run.sink.close()
    assert list((tmp_path / "text").iterdir()) == []


def test_the_textfile_of_a_stopped_run_stays(start: Start, tmp_path: Path) -> None:
    """The collector may come by only after the process is gone."""
    run = start(http=False, textfile=str(tmp_path / "text"))
    run.story()
    run.log.abort(2)
    run.sink.close()
    (path,) = (tmp_path / "text").iterdir()
    assert values(path.read_text())[of("tpwatch_aborts_total", run="run-1")] == 1


def test_the_textfile_is_not_rewritten_at_every_step(start: Start, tmp_path: Path) -> None:
    """Checks wait for the next few seconds; a finding does not."""
    run = start(http=False, textfile=str(tmp_path / "text"))
    run.story()
    (path,) = (tmp_path / "text").iterdir()
    run.log.check(step_report(3))
    assert values(path.read_text())[of("tpwatch_last_check_step", run="run-1")] == 2
    run.log.finding(3, finding(parameter="another"))
    assert values(path.read_text())[of("tpwatch_last_check_step", run="run-1")] == 3


def test_the_last_state_is_pushed_at_the_end(start: Start) -> None:
    """One PUT, under job, run and group, of the whole exposition."""
    with receiver() as gateway:
        run = start(http=False, push_gateway=gateway.url)
        run.story()
        assert gateway.got == []
        run.log.end(2)
        run.sink.close()
    ((method, path, body),) = gateway.got
    assert method == "PUT"
    assert path == "/metrics/job/tpwatch/group/tp-0/run/run-1"
    assert values(body.decode())[of("tpwatch_watching")] == 0


def test_what_stopped_a_run_is_pushed_before_anything_is_closed(start: Start) -> None:
    """Whoever raises the fault may close nothing."""
    with receiver() as gateway:
        run = start(http=False, push_gateway=gateway.url)
        run.story()
        run.log.abort(2)
        ((_, _, body),) = gateway.got
        assert values(body.decode())[of("tpwatch_aborts_total")] == 1
        run.sink.close()


def test_a_gateway_that_is_not_there_costs_the_push_alone(start: Start, tmp_path: Path) -> None:
    """The error reaches whoever guards the sink, after port and target file were given back."""
    run = start(file_sd=str(tmp_path / "targets"), push_gateway=f"http://127.0.0.1:{free_port()}")
    port = urlsplit(run.sink.url).port or 0
    with pytest.raises(OSError, match="refused"):
        run.sink.close()
    assert not listening(port)
    assert list((tmp_path / "targets").iterdir()) == []
