"""The view for a project of W&B: what is printed, what is saved, and what is said where it cannot be."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.commands import run_python
from tpwatch.export.wandb import SCALARS, STEP, TABLE

pytest.importorskip("wandb_workspaces")

pytestmark = pytest.mark.timeout(90)

COMMAND = ("wandb", "workspace", "--entity", "team", "--project", "p")
LINES = "Run History Line Plot"
SHOWN = {
    "Worst ratio": {"worst_ratio", "ratio_lo", "ratio_hi"},
    "Worst spread": {"worst_max_abs"},
    "Differing copies": {"differing_param", "differing_grad_post"},
    "Check time (s)": {"check_seconds"},
}


@pytest.fixture
def offline(tmp_path: Path) -> dict[str, str]:
    """An environment without a key and without a way out of this machine."""
    return {"HOME": str(tmp_path), "WANDB_API_KEY": "", "WANDB_BASE_URL": "http://127.0.0.1:9", "NETRC": "nothing"}


def section_of(spec: dict[str, Any]) -> dict[str, Any]:
    """The one section of a view."""
    (section,) = spec["section"]["panelBankConfig"]["sections"]
    found: dict[str, Any] = section
    return found


def test_the_view_is_printed_without_a_key(offline: dict[str, str]) -> None:
    """One section, whose panels are about what the sink logs, over the step that the sink logs."""
    done = run_python("-m", "tpwatch", *COMMAND, "--dry-run", env=offline, timeout=80)
    assert done.returncode == 0, done.stderr
    view = json.loads(done.stdout)
    assert (view["entity"], view["project"], view["displayName"]) == ("team", "p", "replica consistency")
    section = section_of(view["spec"])
    kinds, *lines, table = section["panels"]
    assert section["name"] == "replica consistency"
    assert {panel["viewType"] for panel in (kinds, *lines)} == {LINES}
    assert {panel["config"]["xAxis"] for panel in (kinds, *lines)} == {STEP}
    assert kinds["config"]["metricRegex"] == f"{SCALARS}/faults_.*"
    shown = {panel["config"]["chartTitle"]: set(panel["config"]["metrics"]) for panel in lines}
    assert shown == {title: {f"{SCALARS}/{name}" for name in names} for title, names in SHOWN.items()}
    assert table["viewType"] == "Weave"
    assert f'"{TABLE}"' in json.dumps(table)


def test_a_view_cannot_be_saved_without_a_key(offline: dict[str, str]) -> None:
    """Exit code 2 and one line that says what to do."""
    done = run_python("-m", "tpwatch", *COMMAND, env=offline, timeout=80)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("tpwatch: wandb workspace = 'team/p': cannot be saved: ")
    assert "WANDB_API_KEY" in line


def test_without_the_package_the_error_says_what_to_install(offline: dict[str, str]) -> None:
    """Exit code 2 and the extra."""
    code = f"import sys; sys.modules['wandb_workspaces'] = None; from tpwatch.cli import main; main({COMMAND!r})"
    done = run_python("-c", f"{code} == 2 or sys.exit(1)", env=offline, timeout=80)
    assert done.returncode == 0
    assert "pip install 'tpwatch[wandb-workspace]'" in done.stderr


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A stand-in for W&B that lets anybody in and saves every view; its address, and the views."""
    views: list[dict[str, Any]] = []
    saved = {"view": {"id": "1", "name": "nw-abc-v"}, "inserted": True}
    viewer = {"id": "u", "entity": "team", "username": "u", "flags": "{}", "teams": {"edges": []}}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            if self.path == "/graphql" and b"UpsertView2" in body:
                views.append(json.loads(body)["variables"])
            answer = json.dumps({"data": {"viewer": viewer, "upsertView": saved}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as in the base class
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}", views
        listening.shutdown()
        thread.join()


def test_a_view_is_saved(offline: dict[str, str], server: tuple[str, list[dict[str, Any]]]) -> None:
    """With a key it goes to the project, and its address is printed."""
    url, views = server
    env = {**offline, "WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": url}
    done = run_python("-m", "tpwatch", *COMMAND, env=env, timeout=80)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{url}/team/p?nw=abc\n"
    (view,) = views
    assert (view["entityName"], view["projectName"], view["displayName"]) == ("team", "p", "replica consistency")
    assert len(section_of(json.loads(view["spec"]))["panels"]) == 6
