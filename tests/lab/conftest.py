"""Measurements of the lab, each set of processes started once and only if a test asks for it."""

from __future__ import annotations

from typing import TypeAlias

import pytest

from tests.lab.measured import Run, run_probe
from tpwatch.lab import catalog

Runs: TypeAlias = dict[str, Run]

DRIFT_STEPS = 30
CONTROL_STEPS = 20


def as_reported(name: str) -> str:
    """The job that measures a fault without its fix; drift needs time to be seen."""
    return f"{name}:{DRIFT_STEPS}" if name == "slime-gdn-drift" else name


WORLD_2 = [
    *(entry.name for entry in catalog.PROTOCOLS),
    *(as_reported(entry.name) for entry in catalog.FAULTS if not entry.transformer_engine),
    *(f"{entry.name}:fixed" for entry in catalog.FAULTS if not entry.transformer_engine),
    *(f"{entry.name}:{CONTROL_STEPS}" for entry in catalog.CONTROLS if entry.config.dp == 1),
]
WORLD_4 = [
    "slime-gdn-drift:tp4",
    "gdn-gamma-double-sum:tp4",
    "ple-double-sum:tp4",
    "lora-unsummed:tp4",
    "one-sided-chunk:tp4",
    *(f"{entry.name}:{CONTROL_STEPS}:tp2" for entry in catalog.CONTROLS if entry.config.dp == 2),
]
WORLD_1 = ["gdn-gamma-double-sum", "custom-module-unsynced", "ple-double-sum", "lora-unsummed"]


@pytest.fixture(scope="session")
def tp2(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """TP 2: the finalizer's variants, every fault as reported and fixed, controls."""
    return run_probe(tmp_path_factory.mktemp("tp2"), 2, WORLD_2)


@pytest.fixture(scope="session")
def tp4(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Four ranks: some faults at TP 4, and the controls with two data-parallel ranks."""
    return run_probe(tmp_path_factory.mktemp("tp4"), 4, WORLD_4)


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The same models on one rank, where nothing has to be reduced."""
    return run_probe(tmp_path_factory.mktemp("tp1"), 1, WORLD_1)
