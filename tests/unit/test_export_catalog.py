"""The table of metrics obeys the conventions, and whoever names a metric takes it from there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tpwatch.export.catalog import METRICS, Metric

ROOT = Path(__file__).parents[2]
BOUNDED = {
    "group", "kind", "point", "phase", "purpose", "result", "role", "exporter",
    "stage", "version", "torch", "framework", "fingerprint", "ranks", "config",
}  # fmt: skip
"""Labels whose values come from a closed list, or are constants of a process."""

METRIC_NAME = re.compile(r"\btpwatch_[a-z_]+\b")
SERIES_OF_A_HISTOGRAM = ("_bucket", "_count", "_sum")


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_follow_the_conventions(metric: Metric) -> None:
    """Prefix, suffix by type, unit in the name, help as a sentence, labels bounded and beginning with the group."""
    assert re.fullmatch(r"tpwatch_[a-z_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.type == "counter")
    assert metric.name.endswith("_info") == (metric.type == "info")
    if metric.unit:
        assert metric.family.endswith(f"_{metric.unit}")
    assert metric.help.endswith(".")
    assert metric.labels[0] == "group"
    assert set(metric.labels) <= BOUNDED
    assert bool(metric.buckets) == (metric.type == "histogram")


def test_names_are_unique() -> None:
    """One row a metric."""
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def named_metrics(path: Path) -> set[str]:
    """Metrics that a file names, series of histograms by their metric."""
    histograms = {metric.name for metric in METRICS if metric.type == "histogram"}
    found = set()
    for name in METRIC_NAME.findall(path.read_text()):
        base = next((name.removesuffix(s) for s in SERIES_OF_A_HISTOGRAM if name.removesuffix(s) in histograms), name)
        found.add(base)
    return found


@pytest.mark.parametrize("name", ["dashboards/alerts/tpwatch.rules.yaml", "dashboards/alerts/tpwatch.rules_test.yaml"])
def test_rules_name_metrics_of_the_catalogue(name: str) -> None:
    """A renamed metric must not leave an alert behind that never fires."""
    named = named_metrics(ROOT / name)
    assert named
    assert named <= {metric.name for metric in METRICS}


def test_the_documentation_lists_the_catalogue() -> None:
    """One row a metric, with type, labels and help of the table."""
    text = (ROOT / "docs" / "observability.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `tpwatch_")]
    assert rows == [
        f"| `{m.name}` | {m.type} | {', '.join(m.labels)} | {m.help} |" for m in METRICS
    ]  # fmt: skip
