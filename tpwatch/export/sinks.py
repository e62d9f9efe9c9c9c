"""What a sink is, which sinks a configuration asks for, and what each of them has lost.

Knows names and entry points, not threads (`fanout`) and not what any sink does with an event.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from tpwatch.config import Config
from tpwatch.errors import ConfigError
from tpwatch.records import Severity

ENTRY_POINTS = "tpwatch.sinks"
"""Group of entry points under which other packages offer a `Factory`."""


class Sink(Protocol):
    """Takes the events of one replica group somewhere.

    Lives on a thread of its own in the process of the group's leader: it may be slow, wait for a network, or raise, and
    loses only its own events by it. Built, called and closed on that thread alone.
    """

    def write(self, event: Mapping[str, Any]) -> None:
        """Take one event, this sink's to keep: what one line of the event file holds (`event`, `step`, `time`, ...).

        The first is `start`, which says who watches what and how; after an orderly run the last is `end`.
        """
        ...

    def close(self) -> None:
        """The run is over: write out what is left. A few seconds later the process no longer waits for it."""
        ...


@dataclass(slots=True)
class Loss:
    """Events that one sink did not get, or did not manage."""

    errors: int = 0
    """Events it failed at, and failures to build or close it. Written by its own thread alone."""
    dropped: int = 0
    """Events that found its queue full. Written by the training thread alone."""


@dataclass(frozen=True, slots=True)
class Health:
    """What every sink of this process has lost so far; sinks that export numbers export these too."""

    losses: dict[str, Loss] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sink is: what its factory is called with."""

    config: Config
    directory: Path
    """The run directory."""
    group: str
    """Replica group whose events these are, e.g. `tp-0`; other groups have sinks of their own, in other processes."""
    health: Health = field(default_factory=Health)
    rank: int = 0
    """Rank of this process."""

    @property
    def name(self) -> str:
        """Run and replica group in one word, for files that the sinks of many leaders put side by side."""
        return f"{self.directory.name}.{self.group}"


Factory = Callable[[Place], Sink]

LEVELS: Mapping[Severity, str] = {"info": "INFO", "warning": "WARN", "error": "ERROR"}
"""Severities as W&B and OpenTelemetry call them."""


class Told:
    """Findings that a sink has passed on: each once, and again when it has become more severe."""

    def __init__(self) -> None:
        """Nothing has been told yet."""
        self._severity: dict[tuple[str, str], str] = {}

    def __len__(self) -> int:
        return len(self._severity)

    def is_news(self, found: Mapping[str, Any]) -> bool:
        """Whether a finding, as an event has it, is to be told; it then counts as told."""
        key = found["kind"], found["parameter"]
        news: bool = self._severity.get(key) != found["severity"]
        self._severity[key] = found["severity"]
        return news


def missing(package: str, extra: str) -> ConfigError:
    """What to raise where a sink is on and the package behind it is not installed."""
    remedy = f"Install that extra: pip install 'tpwatch[{extra}]'."
    return ConfigError(knob=f"{extra}.enabled", value=True, rule=f"needs {package}", remedy=remedy)


def chosen(config: Config, *, leader: bool = True, logs: bool = False) -> dict[str, Factory]:
    """A factory for each sink that the configuration asks for on one rank, by name.

    Args:
        config: of the run.
        leader: this rank leads its replica group, and has the sinks of the group.
        logs: this rank has the trainer's tracker, and the sinks that log into it.
    """
    found: dict[str, Factory] = {}
    if leader:
        sections = (config.prometheus, config.tensorboard, config.otel)
        names = [section.PREFIX.rstrip(".") for section in sections if section.enabled]
        found = {name: partial(_own, name) for name in names}
        found |= {name: partial(_build, name) for name in config.sinks}
    if logs and config.wandb.enabled:
        found["wandb"] = partial(_own, "wandb")
    return found


_OWN = {
    "prometheus": "PrometheusSink",
    "tensorboard": "TensorBoardSink",
    "otel": "OtelSink",
    "wandb": "WandbSink",
}
"""Sinks of this package: each in the module of its name, imported where it is used, for it needs an extra."""


def _own(name: str, place: Place) -> Sink:
    factory: Factory = getattr(importlib.import_module(f"tpwatch.export.{name}"), _OWN[name])
    return factory(place)


def _build(name: str, place: Place) -> Sink:
    """Build a sink of another package: an entry point by its name, or whatever `module:factory` names."""
    if ":" in name:
        module, _, attribute = name.partition(":")
        factory = getattr(importlib.import_module(module), attribute)
    else:
        offered = {point.name: point for point in metadata.entry_points(group=ENTRY_POINTS)}
        if name not in offered:
            rule = f"is no entry point of the group {ENTRY_POINTS}; there are: {', '.join(sorted(offered)) or 'none'}"
            remedy = "Install the package that has it, or write module:factory."
            raise ConfigError(knob="sinks", value=name, rule=rule, remedy=remedy)
        factory = offered[name].load()
    sink: Sink = factory(place)
    return sink
