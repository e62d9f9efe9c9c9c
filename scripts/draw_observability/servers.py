"""Real web pages of real servers: Prometheus's own, and TensorBoard's."""

from __future__ import annotations

import subprocess
import sys
import time
from urllib.parse import urlencode

from browser import Browser
from scene import Scene

from tests.export._servers import fetch, free_port, wait_until

GRAPH = "tpwatch_replica_spread_max_abs"
TABLE = '{__name__=~"tpwatch_(faulty_parameters|first_faulty_step|divergence_max_abs)"}'
ALERTS_OPEN = """
document.querySelectorAll('#inactiveAlerts, #pendingAlerts').forEach(box => box.click());
document.querySelector('button.show-annotations').click();
document.querySelectorAll('.alert_details').forEach(row => row.style.display = 'none');
const open = row => row.nextElementSibling.style.display = 'table-row';
document.querySelectorAll('.alert-danger.alert_header').forEach(open);
"""
CURVES = "differing_replicas/param|faulty_parameters|replica_spread_max_abs|grad_norm_min_ratio"
WHOLE_CURVES = """
const named = (kind, text) => [...document.querySelectorAll(kind)].find(found => found.innerText.includes(text));
named('mat-checkbox', 'Ignore outliers').querySelector('input').click();
named('button', 'Settings').click();
"""
"""Scale the axes to all points, then close the settings."""


def prometheus(scene: Scene, browser: Browser) -> bytes:
    """The page on which one tries queries: a graph since the beginning of the run, and a table."""
    shown = {
        "g0.expr": GRAPH, "g0.tab": 0, "g0.range_input": f"{time.time() - scene.since:.0f}s", "g0.stacked": 0,
        "g1.expr": TABLE, "g1.tab": 1,
    }  # fmt: skip
    ready = "document.querySelector('.legend li') && document.querySelector('.console td')"
    return browser.url(f"{scene.stack.prometheus}/classic/graph?{urlencode(shown)}", (1280, 1220), ready=ready)


def alerts(scene: Scene, browser: Browser) -> bytes:
    """The alerts that fire, with the rule and what they tell."""
    url = f"{scene.stack.prometheus}/classic/alerts"
    return browser.url(url, (1280, 935), ready="document.querySelector('.alert-danger')", prepare=ALERTS_OPEN)


def tensorboard(scene: Scene, browser: Browser) -> bytes:
    """Some of the curves, a folder for each replica group."""
    port = free_port()
    command = ["tensorboard.main", "--logdir", str(scene.run / "tensorboard"), "--host=127.0.0.1", f"--port={port}"]
    server = subprocess.Popen(
        [sys.executable, "-m", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=scene.directory
    )
    try:
        url = f"http://127.0.0.1:{port}/"
        wait_until(lambda: "tp-2" in fetch(f"{url}data/runs"), "TensorBoard", time.monotonic() + 60)
        query = urlencode({"tagFilter": CURVES, "smoothing": 0})
        ready = "document.body.innerText.includes('Relative')"  # a column of the table below a curve
        return browser.url(f"{url}?{query}#timeseries", (1280, 1030), ready=ready, prepare=WHOLE_CURVES)
    finally:
        server.terminate()
        server.wait(10)
