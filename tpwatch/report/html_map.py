"""The heat map of the HTML report: where in the model something was found, and during which steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from tpwatch.records import Finding
from tpwatch.report.charts import Stretch, heat_map
from tpwatch.report.html_data import RunView, layer_of, natural
from tpwatch.report.html_evidence import count
from tpwatch.report.markup import Child, Html, el

NOTE = (
    "Rows are layers; the darker, the more of a layer's watched parameters. Consequences and what is only for"
    " information are striped."
)


def heat_section(view: RunView) -> Child:
    """Where in the model, and when: one map of layers over steps for each kind that was found."""
    found = view.summary.findings
    if not found or not view.names:
        return ""
    layers = sorted({layer_of(name) for name in (*view.names, *(f.parameter for f in found))}, key=_layer_order)
    watched = Counter(layer_of(name) for name in view.names)
    steps = (min(f.first_step for f in found), max(f.last_step for f in found))
    kinds = dict.fromkeys(f.kind for f in found)
    panels = [_heat_panel(kind, [f for f in found if f.kind == kind], layers, watched, steps) for kind in kinds]
    maps = el("div", panels, class_="maps")
    return el("section", el("h2", "Where and when"), el("p", NOTE, class_="muted"), maps, id="map")


def _layer_order(layer: str) -> tuple[bool, list[tuple[int, int, str]]]:
    """Numbered layers by number, then all else."""
    return (not layer[-1:].isdecimal(), natural(layer))


def _heat_panel(
    kind: str, found: Sequence[Finding], layers: Sequence[str], watched: Mapping[str, int], steps: tuple[int, int]
) -> Html:
    by_layer: dict[str, list[Finding]] = {}
    for finding in found:
        by_layer.setdefault(layer_of(finding.parameter), []).append(finding)
    stretches = [
        stretch
        for row, layer in enumerate(layers)
        for counts in (False, True)
        for stretch in _stretches(row, layer, [f for f in by_layer.get(layer, ()) if f.counts == counts], watched)
    ]
    text = f"{count(len(found), 'parameter')} in {len(by_layer):,} of {count(len(layers), 'layer')}"
    chart = heat_map(layers, stretches, steps, f"{kind} over layers and steps: {text}")
    return el("figure", el("figcaption", el("b", kind), el("span", text)), chart)


def _stretches(row: int, layer: str, found: Sequence[Finding], watched: Mapping[str, int]) -> Iterator[Stretch]:
    """Stretches of steps between which the number of findings of one layer does not change."""
    edges = sorted({f.first_step for f in found} | {f.last_step + 1 for f in found})
    total = max(watched.get(layer, 0), len(found), 1)
    for first, after in pairwise(edges):
        here = sum(f.first_step <= first <= f.last_step for f in found)
        if here:
            title = f"{layer}, steps {first} to {after - 1}: {here} of {total} parameters"
            yield Stretch(row, first, after - 1, here / total, title, faint=not found[0].counts)
