"""The Prometheus sink: HTTP(S), node_exporter's textfile collector, a Pushgateway, and a target file.

Renders the catalogue from a snapshot when it is scraped. Knows prometheus-client, which it imports when it is built,
and its own knobs; the registry is its own, so that nothing of the host process is exported or changed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from tpwatch._guard import say
from tpwatch.config import Prometheus
from tpwatch.export.catalog import Metric
from tpwatch.export.sinks import Place, missing
from tpwatch.export.snapshot import Exemplar, Family, Numbers, Sample

TEXTFILE_SECONDS = 5.0
"""The textfile is at most so old while checks come in."""

PUSH_SECONDS = 3.0
"""So long the end of a run waits for a Pushgateway."""


class PrometheusSink:
    """One exporter, of the leader of a replica group.

    Without a port it goes on with what else it was asked for, and one warning.

    Raises:
        ConfigError: prometheus-client is not installed.
    """

    def __init__(self, place: Place) -> None:
        """Open the port, and name it in the target file."""
        self._client = _client()
        self._knobs = place.config.prometheus
        self._place = place
        self._numbers = Numbers(place.group, place.health)
        self._closing = ExitStack()
        self._written = 0.0
        self._textfile = self._file(self._knobs.textfile, "prom")
        self._aborted = False
        self.url = ""
        if self._knobs.push_gateway:
            self._closing.callback(self._push)
        if self._textfile:
            self._closing.callback(self._leave_textfile)
        if self._knobs.http:
            self._serve()

    def write(self, event: Mapping[str, Any]) -> None:
        """Fold one event into the numbers that the next scrape shows."""
        self._numbers.fold(event)
        self._aborted |= event["event"] == "abort"
        due = time.monotonic() - self._written >= TEXTFILE_SECONDS or event["event"] != "check"
        if self._textfile and due:
            # node_exporter adds no label, so that the run has to be one of the metrics.
            self._textfile.write(self._client.generate_latest(self._registry({"run": self._place.directory.name})))
            self._written = time.monotonic()
        if self._knobs.push_gateway and event["event"] == "abort":
            self._push()  # whoever raises the fault may close nothing

    def close(self) -> None:
        """Take back target file, port and textfile, then push; each is done even if another fails."""
        self._closing.close()

    # --------------------------------------------------------------------------------------- HTTP

    def _serve(self) -> None:
        try:
            port = self._listen()
        except OSError as error:
            say(logging.WARNING, "tpwatch: metrics of %s are not served: %s", self._place.group, error)
            return
        scheme = "https" if self._knobs.tls_cert else "http"
        host = _reachable(self._knobs.address)
        self.url = f"{scheme}://{host}:{port}/metrics"
        say(logging.INFO, "tpwatch: metrics of %s at %s", self._place.group, self.url)
        if targets := self._file(self._knobs.file_sd, "json"):
            self._announce(targets, f"{host}:{port}", scheme)

    def _listen(self) -> int:
        """Listen on the first free port.

        Raises:
            OSError: none of them is free, or it is not the port that is wrong.
        """
        knobs, registry = self._knobs, self._registry({})
        tls = _tls(knobs)
        for port in range(knobs.port, knobs.port + knobs.ports):
            try:
                server, thread = self._client.start_http_server(port, knobs.address, registry, **tls)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            self._closing.callback(thread.join)
            self._closing.callback(server.server_close)
            self._closing.callback(server.shutdown)
            return int(server.server_port)
        last = knobs.port + knobs.ports - 1
        message = f"no port of {knobs.address} is free from {knobs.port} to {last}: raise prometheus.ports"
        raise OSError(errno.EADDRINUSE, message)

    def _announce(self, file: _Published, target: str, scheme: str) -> None:
        """Write the target file. The run is a label of the target, not of the metrics; `__host__` is of none."""
        labels = {"__host__": socket.gethostname(), "run": self._place.directory.name}
        if scheme == "https":
            labels["__scheme__"] = scheme
        text = json.dumps([{"targets": [target], "labels": labels}])
        # One that a killed run has left at this address of this host, ours now, would give our metrics its name.
        file.remove_others("*.????????.json", text.partition(', "run": ')[0].encode())
        self._closing.callback(file.take_back)
        file.write(text.encode() + b"\n")

    # -------------------------------------------------------------------------------------- others

    def _file(self, directory: str | None, ending: str) -> _Published | None:
        """A file in a directory that runs share: two of one name are told apart by where their run directories lie."""
        if not directory:
            return None
        where = hashlib.blake2s(os.fsencode(self._place.directory.resolve()), digest_size=4).hexdigest()
        return _Published(Path(directory, f"{self._place.name}.{where}.{ending}"))

    def _leave_textfile(self) -> None:
        """Remove the textfile of a run that ended; what stopped a run stays, for the next scrape may come too late."""
        if self._textfile and not self._aborted:
            self._textfile.take_back()

    def _push(self) -> None:
        key = {"run": self._place.directory.name, "group": self._place.group}
        gateway, registry = self._knobs.push_gateway, self._registry({})
        self._client.push_to_gateway(gateway, job="tpwatch", registry=registry, grouping_key=key, timeout=PUSH_SECONDS)

    def _registry(self, labels: Mapping[str, str]) -> Any:  # noqa: ANN401 - of a package imported on demand
        registry = self._client.CollectorRegistry()
        registry.register(_Collector(self._client, self._numbers, labels))
        return registry


class _Published:
    """A file that others read: replaced whole, and removed by whoever wrote it last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: bytes | None = None

    def write(self, text: bytes) -> None:
        """Replace the file. The draft has an ending that neither Prometheus nor node_exporter reads."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_suffix(f".{os.getpid()}")
        draft.write_bytes(text)
        draft.replace(self._path)
        self._written = text

    def remove_others(self, pattern: str, beginning: bytes) -> None:
        """Remove the files beside it whose names fit a pattern and whose text begins so."""
        for path in self._path.parent.glob(pattern):
            with suppress(FileNotFoundError):
                if path.read_bytes().startswith(beginning):
                    path.unlink()

    def take_back(self) -> None:
        """Remove the file, unless a later start of the run has replaced it since."""
        with suppress(FileNotFoundError):
            if self._path.read_bytes() == self._written:
                self._path.unlink()


class _Collector:
    """What a registry asks for families when it is scraped."""

    def __init__(self, client: Any, numbers: Numbers, labels: Mapping[str, str]) -> None:  # noqa: ANN401 - as above
        self._client = client
        self._numbers = numbers
        self._labels = labels

    def collect(self) -> Iterator[Any]:
        """Render the numbers as they stand."""
        for family in self._numbers.snapshot():
            yield self._rendered(family)

    def _rendered(self, family: Family) -> Any:  # noqa: ANN401 - as above
        metric = family.metric
        rendered = self._client.Metric(metric.family, metric.help, metric.type, metric.unit)
        for sample in family.samples:
            labels = {**self._labels, **dict(zip(metric.labels, sample.labels, strict=True))}
            if metric.type == "histogram":
                self._add_histogram(rendered, metric, labels, sample)
            else:
                rendered.add_sample(metric.name, labels, sample.value, None, self._exemplar(sample.exemplar))
        return rendered

    def _add_histogram(self, rendered: Any, metric: Metric, labels: Mapping[str, str], sample: Sample) -> None:  # noqa: ANN401
        for bucket in sample.buckets:
            bound = {"le": "+Inf" if bucket.bound == float("inf") else str(bucket.bound)}
            exemplar = self._exemplar(bucket.exemplar)
            rendered.add_sample(f"{metric.name}_bucket", {**labels, **bound}, bucket.count, None, exemplar)
        rendered.add_sample(f"{metric.name}_count", labels, sample.buckets[-1].count)
        rendered.add_sample(f"{metric.name}_sum", labels, sample.value)

    def _exemplar(self, exemplar: Exemplar | None) -> Any:  # noqa: ANN401 - as above
        if exemplar is None:
            return None
        return self._client.samples.Exemplar(dict(exemplar.labels), exemplar.value, exemplar.time)


def _client() -> Any:  # noqa: ANN401 - as above
    try:
        import prometheus_client
    except ImportError:
        raise missing(package="prometheus-client", extra="prometheus") from None
    return prometheus_client


def _tls(knobs: Prometheus) -> dict[str, Any]:
    """Arguments of the server for HTTPS.

    Raises:
        OSError: a file cannot be read; found out before a port is taken.
    """
    if knobs.tls_cert is None:
        return {}
    for file in (knobs.tls_cert, knobs.tls_key, knobs.tls_client_ca):
        if file is not None:
            Path(file).read_bytes()
    asked = knobs.tls_client_ca is not None
    given = {"certfile": knobs.tls_cert, "keyfile": knobs.tls_key, "client_cafile": knobs.tls_client_ca}
    return {**given, "client_auth_required": asked}


def _reachable(address: str) -> str:
    """The address to give to a scraper: of one that means every interface, this machine's name."""
    host = socket.gethostname() if address in ("", "0.0.0.0", "::") else address  # noqa: S104 - compared, not bound
    return f"[{host}]" if ":" in host else host
