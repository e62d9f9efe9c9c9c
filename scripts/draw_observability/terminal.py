"""Text as a terminal shows it, in a light SVG that asks nobody for a font."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.terminal_theme import TerminalTheme
from rich.text import Text
from scene import RUN, Scene

from tpwatch.report.watching import Redrawn, read_state

COLUMNS = 112
INK, RED, GREEN, AMBER = (36, 41, 46), (196, 22, 42), (34, 134, 58), (150, 105, 0)
BLUE, VIOLET, TEAL, GRAY = (3, 102, 214), (111, 66, 193), (27, 124, 131), (106, 115, 125)
LIGHT = TerminalTheme((246, 248, 250), INK, [INK, RED, GREEN, AMBER, BLUE, VIOLET, TEAL, GRAY])

FRAME = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px/{line_height}px ui-monospace, Menlo, Consolas, monospace }}
.{unique_id}-title {{ font: 17px sans-serif }}
{styles}
</style>
<defs>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""
"""As rich's own, without its fonts from another host."""

SHOWN = (
    "tpwatch_last_check_step", "tpwatch_checks", "tpwatch_watched_replicas", "tpwatch_check_duration_seconds",
    "tpwatch_drift_active", "tpwatch_faulty_parameters", "tpwatch_first_faulty_step", "tpwatch_divergence_max_abs",
)  # fmt: skip
"""Metrics that the picture of a collector shows, of all that it got."""


def watch(scene: Scene, _browser: object) -> bytes:
    """What `tpwatch watch` shows at the last step."""
    shown: list[RenderableType] = []
    Redrawn(f"tpwatch: {RUN}", shown.append).show(read_state(scene.run))
    return _svg(f"tpwatch watch {RUN}", *shown)


def collector(scene: Scene, _browser: object) -> bytes:
    """What was sent by OTLP last: metrics of the faulty group, and a finding."""
    got = scene.collector.got
    metrics = [ExportMetricsServiceRequest.FromString(body) for _, path, body in got if path == "/v1/metrics"]
    logs = [ExportLogsServiceRequest.FromString(body) for _, path, body in got if path == "/v1/logs"]
    (logged,) = logs[0].resource_logs
    sender = _attributes(logged.resource)
    (measured,) = next(
        r for r in reversed(metrics) if _attributes(r.resource_metrics[0].resource) == sender
    ).resource_metrics
    who = ", ".join(f"{name}={sender[name]}" for name in ("service.name", "service.instance.id", "service.version"))
    return _svg(
        "what a receiver of OTLP got",
        Text(f"POST /v1/metrics   {who}", style="bold"),
        *_points(measured.scope_metrics[0].metrics),
        Text(f"\nPOST /v1/logs      {who}", style="bold"),
        *_record(logged.scope_logs[0].log_records[0]),
    )


def _points(metrics: Any) -> Iterator[Text]:  # noqa: ANN401 - of generated code
    """Points that are not zero, of the metrics that are shown."""
    found = {metric.name: metric for metric in metrics}
    for metric in (found[name] for name in SHOWN):
        kind = metric.WhichOneof("data")
        for point in getattr(metric, kind).data_points:
            labels = ", ".join(f"{name}={value}" for name, value in _attributes(point).items())
            if kind == "histogram":
                value = f"count {point.count}, sum {point.sum:.3g} {metric.unit}"
            else:
                value = f"{getattr(point, point.WhichOneof('value')):.4g}"
            if value != "0":
                yield Text.assemble(
                    (f"  {kind:9} ", "white"), metric.name, (f" {{{labels}}} ", "blue"), (value, "bold")
                )


def _record(record: Any) -> Iterator[RenderableType]:  # noqa: ANN401 - as above
    """One log record, its attributes below it."""
    yield Text.assemble((f"  {record.severity_text} ", "bold red"), record.event_name)
    yield Padding(record.body.string_value, (0, 0, 0, 4))
    for name, value in _attributes(record).items():
        written = f"{value:.4g}" if isinstance(value, float) else value
        yield Padding(Text.assemble((name, "blue"), f" = {written}"), (0, 0, 0, 4))


def _attributes(owner: Any) -> dict[str, Any]:  # noqa: ANN401 - as above
    return {pair.key: _plain(pair.value) for pair in owner.attributes}


def _plain(value: Any) -> Any:  # noqa: ANN401 - as above
    kind = value.WhichOneof("value")
    return [_plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def _svg(title: str, *what: RenderableType) -> bytes:
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor")
        for item in what:
            console.print(item, highlight=False)
        return console.export_svg(title=title, theme=LIGHT, code_format=FRAME, unique_id="t").encode()
