"""Servers for tests of exporters: all on loopback, on free ports, and gone at the end."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml

ALERTS = Path(__file__).parents[2] / "dashboards" / "alerts"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fetch(url: str, accept: str = "", **options: Any) -> str:
    """Body of a GET request."""
    request = urllib.request.Request(url, headers={"Accept": accept} if accept else {})  # noqa: S310 - loopback
    with urllib.request.urlopen(request, timeout=10, **options) as answer:  # noqa: S310 - loopback
        return str(answer.read().decode())


def wait_until(condition: Callable[[], Any], what: str, deadline: float) -> Any:
    """Poll until a condition is true, and return what it returned; a refused connection counts as not yet."""
    while True:
        try:
            if found := condition():
                return found
        except OSError:
            pass
        if time.monotonic() > deadline:
            message = f"never happened: {what}"
            raise TimeoutError(message)
        time.sleep(0.1)


# ------------------------------------------------------------------------------------ a receiver


@dataclass
class Receiver:
    """What was sent to a small HTTP server: (method, path, body)."""

    url: str
    got: list[tuple[str, str, bytes]] = field(default_factory=list)

    def alerts(self) -> list[Mapping[str, Any]]:
        """Alerts in the notifications of an Alertmanager, each with the path that it was sent to."""
        return [{**alert, "path": path} for _, path, body in self.got for alert in json.loads(body)["alerts"]]


@contextmanager
def receiver() -> Iterator[Receiver]:
    """A server that accepts whatever it is sent."""

    class Handler(BaseHTTPRequestHandler):
        def _take(self) -> None:
            size = int(self.headers.get("Content-Length", "0"))
            said.got.append((self.command, self.path, self.rfile.read(size)))
            self.send_response(200)
            self.end_headers()

        do_POST = do_PUT = _take  # noqa: N815 - names that http.server looks for

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as in the base class
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        said = Receiver(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield said
        finally:
            server.shutdown()
            thread.join()


# --------------------------------------------------------------------- Prometheus and Alertmanager


@dataclass(frozen=True)
class Stack:
    """A running Prometheus with the shipped rules, and an Alertmanager that notifies `hook`."""

    prometheus: str
    alertmanager: str
    hook: Receiver
    targets: Path
    """Directory of target files."""

    def query(self, expression: str) -> list[Mapping[str, Any]]:
        """Result of an instant query."""
        return list(self._api("query", query=expression)["result"])

    def exemplars(self, expression: str) -> list[Mapping[str, Any]]:
        """Exemplars of the last hour."""
        now = time.time()
        return list(self._api("query_exemplars", query=expression, start=now - 3600, end=now + 60))

    def rules(self) -> list[Mapping[str, Any]]:
        """State of every alerting rule."""
        return [rule for group in self._api("rules")["groups"] for rule in group["rules"]]

    def _api(self, name: str, **query: Any) -> Any:
        return json.loads(fetch(f"{self.prometheus}/api/v1/{name}?{urlencode(query)}"))["data"]


@contextmanager
def stack(directory: Path, seconds: float = 20.0) -> Iterator[Stack]:
    """Start both servers, wait until they are ready, and end them."""
    prometheus, alertmanager = free_port(), free_port()
    targets = directory / "targets"
    targets.mkdir()
    with receiver() as hook:
        commands = [
            _prometheus(directory, prometheus, alertmanager),
            _alertmanager(directory, alertmanager, hook),
        ]
        running: list[subprocess.Popen[bytes]] = []
        try:
            for command in commands:
                log = (directory / f"{Path(command[0]).name}.log").open("wb")
                running.append(subprocess.Popen(command, cwd=directory, stdout=log, stderr=log))
                log.close()
            urls = [f"http://127.0.0.1:{port}" for port in (prometheus, alertmanager)]
            deadline = time.monotonic() + seconds
            for url in urls:
                wait_until(lambda url=url: fetch(f"{url}/-/ready"), f"{url} ready", deadline)
            yield Stack(urls[0], urls[1], hook, targets)
        finally:
            _end(running)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:  # noqa: PERF203 - each on its own
            process.kill()
            process.wait()


def _prometheus(directory: Path, port: int, alertmanager: int) -> list[str]:
    """The command of a Prometheus with the shipped example, scraping and evaluating every second."""
    config = yaml.safe_load((ALERTS / "prometheus.example.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["file_sd_configs"][0]["refresh_interval"] = "1s"
    config["alerting"]["alertmanagers"] = [{"static_configs": [{"targets": [f"127.0.0.1:{alertmanager}"]}]}]
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
    shutil.copy(ALERTS / "tpwatch.rules.yaml", directory)
    return [
        "prometheus", "--config.file=prometheus.yaml", "--storage.tsdb.path=prometheus",
        f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage",
    ]  # fmt: skip


def _alertmanager(directory: Path, port: int, hook: Receiver) -> list[str]:
    """The command of an Alertmanager with the shipped example, notifying at once."""
    config = yaml.safe_load((ALERTS / "alertmanager.example.yaml").read_text())
    config["route"] |= {"group_wait": "0s", "group_interval": "1s"}
    for sent in config["receivers"]:
        for webhook in sent["webhook_configs"]:
            webhook["url"] = f"{hook.url}/{webhook['url'].rpartition('/')[2]}"
    (directory / "alertmanager.yaml").write_text(yaml.safe_dump(config))
    return [
        "prometheus-alertmanager", "--config.file=alertmanager.yaml", "--storage.path=alertmanager",
        f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address=",
    ]  # fmt: skip


def listening(port: int) -> bool:
    """Whether somebody accepts connections on a port of loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
