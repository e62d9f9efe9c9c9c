"""Configuration: the knobs, how they are checked, and how their sources are combined.

`knobs` is the page to read; `fields` converts, checks and describes any such page; `load` combines
file, environment, command line and code. Knows YAML and environment names, not torch.
"""

from __future__ import annotations

from tpwatch.config.knobs import (
    STOPPING,
    Action,
    Config,
    Explain,
    OpenTelemetry,
    Prometheus,
    TensorBoard,
    Thresholds,
    Wandb,
    WatchSelection,
    schema,
)
from tpwatch.config.load import RESERVED_ENV, disabled, env_names, load

__all__ = [
    "RESERVED_ENV",
    "STOPPING",
    "Action",
    "Config",
    "Explain",
    "OpenTelemetry",
    "Prometheus",
    "TensorBoard",
    "Thresholds",
    "Wandb",
    "WatchSelection",
    "disabled",
    "env_names",
    "load",
    "schema",
]
