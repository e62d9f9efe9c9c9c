"""What the HTML report shows, put together from the events of a run; no markup.

Adds to the summary what only the events tell: how each finding went on, what was watched, how.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from tpwatch.config import Config
from tpwatch.records import SEVERITIES, Finding, Summary
from tpwatch.report.events import Event, RunEvents, parse_finding
from tpwatch.report.summary import StepRow, summarize_events, timeline

Key = tuple[str, str]
"""Kind and parameter of a finding."""

_PIECES = re.compile(r"(\d{1,18})")
"""Numbers within a name, as long as a number of layers may be."""

STATUSES: Mapping[str, str] = {
    "fault": "Faults",
    "info": "For information",
    "consequence": "Consequences",
    "unverified": "Unverified",
    "not exercised": "Not exercised",
    "not watched": "Not watched",
    "nothing found": "Nothing found",
}
"""Status of a parameter and the heading of all that have it, most telling first."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """A finding as one check recorded it, over all groups: the worst of each; None if not measured."""

    step: int
    values: float | None
    """Largest elementwise difference of the values."""
    gradients: float | None
    """The same of the gradients after the reduction."""
    ratio: float | None


@dataclass(frozen=True, slots=True)
class Parameter:
    """One line of the list of all parameters; one with two findings has two."""

    name: str
    status: str
    finding: Finding | None = None
    reason: str = ""
    """Why it is not watched."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One configuration key; `changed` if it differs from the default."""

    key: str
    value: str
    changed: bool


@dataclass(frozen=True, slots=True)
class RunView:
    """All that the report shows of one run."""

    title: str
    summary: Summary
    steps: tuple[StepRow, ...]
    sightings: Mapping[Key, tuple[Sighting, ...]]
    ranks: Mapping[str, tuple[int, ...]]
    """Global ranks of each replica group."""
    names: tuple[str, ...]
    """Watched parameters, in the order of the model."""
    parameters: tuple[Parameter, ...]
    settings: tuple[Setting, ...]
    facts: tuple[tuple[str, str], ...]
    """What ran, where and when."""
    check_seconds: tuple[tuple[int, float], ...]
    """(step, longest check of any group)."""


def view(run: RunEvents, title: str) -> RunView:
    """Put together what the report shows."""
    summary = _in_natural_order(summarize_events(run))
    starts = {group: _last_start(events) for group, events in run.groups.items()}
    names = tuple(dict.fromkeys(str(name) for start in starts.values() for name in start.get("names", ())))
    first = next((start for start in starts.values() if start), {})
    return RunView(
        title=title,
        summary=summary,
        steps=timeline(run),
        sightings=_sightings(run),
        ranks={group: tuple(start.get("ranks", ())) for group, start in starts.items()},
        names=names,
        parameters=tuple(_parameters(summary, names)),
        settings=_settings(first),
        facts=tuple(_facts(run, first)),
        check_seconds=_check_seconds(run),
    )


def layer_of(name: str) -> str:
    """A name up to and with its first number (`decoder.layers.3`), or up to its first dot if it has none."""
    found = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", name)
    return found[0] if found else name.removesuffix(".weight").removesuffix(".bias")


def natural(text: str) -> list[tuple[int, int, str]]:
    """Sort key that puts layers.2 before layers.10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in _PIECES.split(text)]


# ------------------------------------------------------------------------------------- findings


def _in_natural_order(summary: Summary) -> Summary:
    """Layer 2 before layer 10 among findings that are otherwise of one rank."""

    def rank(finding: Finding) -> tuple[bool, int, int, list[tuple[int, int, str]]]:
        severity = -SEVERITIES.index(finding.severity)
        return (finding.role != "cause", severity, finding.first_step, natural(finding.parameter))

    return replace(summary, findings=tuple(sorted(summary.findings, key=rank)))


def _sightings(run: RunEvents) -> dict[Key, tuple[Sighting, ...]]:
    seen: dict[Key, dict[int, Sighting]] = {}
    for _, event in run.of("finding"):
        finding = parse_finding(event)
        if finding is not None:
            by_step = seen.setdefault(finding.key, {})
            step = finding.last_step
            by_step[step] = _worst(by_step.get(step), _sighting(finding))
    return {key: tuple(by_step[step] for step in sorted(by_step)) for key, by_step in seen.items()}


def _sighting(finding: Finding) -> Sighting:
    return Sighting(finding.last_step, _spread(finding, "param"), _spread(finding, "grad_post"), finding.ratio)


def _spread(finding: Finding, point: str) -> float | None:
    spread = finding.evidence.get(f"spread_{point}")
    if not isinstance(spread, Mapping) or "max_abs" not in spread:
        return None
    return float("inf") if spread["max_abs"] is None else float(spread["max_abs"])


def _worst(one: Sighting | None, other: Sighting) -> Sighting:
    if one is None:
        return other
    return Sighting(
        other.step,
        _larger(one.values, other.values),
        _larger(one.gradients, other.gradients),
        _larger(one.ratio, other.ratio),
    )


def _larger(one: float | None, other: float | None) -> float | None:
    return max((value for value in (one, other) if value is not None), default=None)


# ----------------------------------------------------------------------------------- parameters


def _parameters(summary: Summary, names: Sequence[str]) -> list[Parameter]:
    """Findings first, in the order of the summary; then all others, in the order of the model."""
    listed = [Parameter(f.parameter, _status(f), f) for f in summary.findings]
    found = {parameter.name for parameter in listed}
    unverified, not_exercised = set(summary.unverified), set(summary.not_exercised)
    for name in names:
        if name in found:
            continue
        if name in not_exercised:
            status = "not exercised"
        else:
            status = "unverified" if name in unverified or not summary.steps_checked else "nothing found"
        listed.append(Parameter(name, status))
    listed += [Parameter(name, "not watched", reason=why) for name, why in summary.not_watched]
    order = list(STATUSES)
    return sorted(listed, key=lambda parameter: order.index(parameter.status))


def _status(finding: Finding) -> str:
    if finding.role == "consequence":
        return "consequence"
    return "fault" if finding.counts else "info"


# -------------------------------------------------------------------------------------- the run


def _last_start(events: Sequence[Event]) -> Event:
    return next((event for event in reversed(events) if event["event"] == "start"), {})


def _settings(start: Event) -> tuple[Setting, ...]:
    default = _flat(Config().to_mapping())
    config = start.get("config", {})
    given = _flat(config) if isinstance(config, Mapping) else {}
    return tuple(Setting(key, value, value != default.get(key)) for key, value in given.items())


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = _shown(value)
    return flat


def _shown(value: object) -> str:
    """A setting as text; the report is passed around, so a password within an address is masked."""
    if isinstance(value, (list, tuple)):
        return ", ".join(_shown(item) for item in value) or "none"
    if value is None or value == {}:
        return "none"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return re.sub(r"//[^/@\s]+@", "//***@", text)


def _facts(run: RunEvents, start: Event) -> list[tuple[str, str]]:
    times = [float(event["time"]) for events in run.groups.values() for event in events if "time" in event]
    facts = [("Run directory", run.directory)]
    if times:
        facts += [("First event", _clock(min(times))), ("Last event", _clock(max(times)))]
    versions = start.get("versions", {})
    facts += [(str(name), str(version)) for name, version in versions.items()]
    fingerprint = start.get("fingerprint", {})
    if isinstance(fingerprint, Mapping) and fingerprint:
        facts.append(("Fingerprint", f"{fingerprint.get('name')}: {fingerprint.get('reason')}"))
    if "config_digest" in start:
        facts.append(("Configuration digest", str(start["config_digest"])))
    return facts


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _check_seconds(run: RunEvents) -> tuple[tuple[int, float], ...]:
    longest: dict[int, float] = {}
    for _, event in run.of("check"):
        seconds = event.get("seconds")
        if event.get("call") != 0 and isinstance(seconds, (int, float)):
            step = event["step"]
            longest[step] = max(longest.get(step, 0.0), float(seconds))
    return tuple(sorted(longest.items()))
