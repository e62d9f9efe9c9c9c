"""Sinks of a watched job: who has them, what they see, and what a bad one does to training."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import pytest
import torch
import torch.distributed as dist
from prometheus_client.parser import text_string_to_metric_families

import tpwatch
from tests.dist._parts import Toy, ToyAdapter, normal
from tests.export._servers import fetch, listening, wait_until
from tpwatch import session
from tpwatch.watch import Watch

Ranks = Callable[..., list[Any]]

STEPS = 5
PHASES = {"fingerprint", "exchange", "diagnose"}


def attach(out: str, *, fails_in: str = "", **knobs: Any) -> tuple[Toy, Watch]:
    """A toy of two parameters, whose first is never reduced, and the watch on it."""
    model = Toy(["first", "second"], [normal(i, 20) for i in range(2)], ["none", "sum"])
    knobs = {"out": out, "handshake_timeout": 20.0, "on_fault": "log", **knobs}
    with mock.patch.object(session, "choose", return_value=ToyAdapter(fails_in=fails_in)):
        return model, tpwatch.attach(model, None, knobs)


def train(model: Toy, rank: int) -> None:
    """Take steps with partial gradients."""
    for step in range(STEPS):
        model.train([normal(1000 * step + 10 * rank + i, 20) for i in range(2)])


def exporting(rank: int, out: str) -> dict[str, Any]:
    """Train with the Prometheus sink on; what a scrape shows before the end."""
    targets = Path(out, "targets")
    settings = {"enabled": True, "port": 0, "file_sd": str(targets)}
    model, watch = attach(f"{out}/run", prometheus=settings)
    train(model, rank)
    seen: dict[str, Any] = {"report": watch.last_report.to_json() if watch.last_report else {}}
    deadline = time.monotonic() + 10
    dist.barrier()
    if rank == 0:
        (path,) = wait_until(lambda: list(targets.glob("*.json")), "a target file", deadline)
        ((address,),) = [target["targets"] for target in json.loads(path.read_text())]
        seen["port"] = urlsplit(f"//{address}").port
        # The end of the run is folded in by another thread, a moment later.
        wait_until(lambda: f'last_check_step{{group="tp-0"}} {STEPS}' in scrape(address), "the last step", deadline)
        families = text_string_to_metric_families(scrape(address))
        seen["samples"] = {(s.name, *sorted(s.labels.values())): s.value for f in families for s in f.samples}
    dist.barrier()
    watch.detach()
    seen["left"] = [path.name for path in targets.iterdir()]
    return seen


def scrape(address: str) -> str:
    """What an exporter shows."""
    return fetch(f"http://{address}/metrics")


def test_the_leader_exports_and_nobody_else(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """One target for the group, which shows what the group found, and is gone after the end."""
    leader, follower = gloo_ranks(2, exporting, str(tmp_path), timeout=60)
    samples = leader["samples"]
    assert samples["tpwatch_drift_active", "missing-reduce", "tp-0"] == 1
    assert (
        samples["tpwatch_checks_total", "findings", "tp-0"] + samples["tpwatch_checks_total", "clean", "tp-0"] == STEPS
    )
    assert samples["tpwatch_exporter_errors_total", "prometheus", "tp-0"] == 0
    assert leader["left"] == []
    assert "samples" not in follower
    assert not listening(leader["port"])


def test_a_check_reports_its_phases_and_ratios(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """Phases add up to the whole; the factor of a gradient that nobody reduces is 1."""
    for seen in gloo_ranks(2, exporting, str(tmp_path), timeout=60):
        report = seen["report"]
        assert set(report["phases"]) == PHASES
        assert all(seconds > 0 for seconds in report["phases"].values())
        assert abs(sum(report["phases"].values()) - report["seconds"]) < 1e-9
        # The second gradient is summed: by the norm of the larger of its two partials, as the group sees it.
        partials = [normal(1000 * (STEPS - 1) + 10 * rank + 1, 20) for rank in range(2)]
        summed = float(sum(partials, torch.zeros(20)).norm() / max(partial.norm() for partial in partials))
        assert (report["ratio_lo"], report["ratio_hi"]) == pytest.approx((min(1.0, summed), max(1.0, summed)), rel=1e-5)


def hindered(rank: int, out: str) -> dict[str, Any]:
    """Train with a sink that waits for ever beside one that works; how long it took, and what was found."""
    model, watch = attach(out, sinks=["tests.export._sinks:Stuck", "tests.export._sinks:Lists", "nowhere:Sink"])
    began = time.monotonic()
    train(model, rank)
    trained = time.monotonic()
    watch.detach()
    kinds = sorted({finding.kind for finding in watch.findings})
    return {"training": trained - began, "closing": time.monotonic() - trained, "kinds": kinds}


def test_a_sink_that_waits_for_ever_hinders_nobody(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """Training goes on, the file and the other sink are complete, and the end waits a few seconds at most."""
    results = gloo_ranks(2, hindered, str(tmp_path), timeout=60)
    for result in results:
        assert result["kinds"] == ["missing-reduce"]
        assert result["training"] < 4.0
        assert result["closing"] < 10.0
    written = [json.loads(line)["event"] for line in (tmp_path / "events.tp-0.jsonl").read_text().splitlines()]
    assert written[0] == "start"
    assert written[-1] == "end"
    assert (tmp_path / "kinds.tp-0").read_text().split() == [*written, "closed"]
    assert json.loads((tmp_path / "summary.json").read_text())["verdict"] == "faults"


def refused(rank: int, out: str, failing: int) -> list[str]:
    """Attach where one rank fails to build; the target files that are left."""
    targets = Path(out, "targets")
    settings = {"enabled": True, "port": 0, "file_sd": str(targets)}
    _, watch = attach(f"{out}/run", fails_in="source" if rank == failing else "", prometheus=settings)
    dist.barrier()
    return [watch.reason, *(path.name for path in targets.glob("*"))]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_watch_that_never_begins_exports_nothing(failing: int, tmp_path: Path, gloo_ranks: Ranks) -> None:
    """The leader or another rank could not be built: port and target file are given back."""
    for reason, *left in gloo_ranks(2, refused, str(tmp_path), failing, timeout=60):
        assert "planted fault" in reason
        assert left == []
