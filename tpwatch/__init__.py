"""tpwatch: a runtime gradient-consistency monitor for tensor-parallel training.

    watch = tpwatch.attach(model_chunks, optimizer)

Importing this package does not import torch; `attach` and `Watch` are resolved when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpwatch.config import Config
from tpwatch.errors import (
    AdapterUnavailable,
    ConfigError,
    FingerprintUnavailable,
    ReplicaFault,
    RunDirectoryError,
    TpwatchError,
)
from tpwatch.records import Finding, StepReport, Summary

if TYPE_CHECKING:
    from tpwatch.session import attach
    from tpwatch.watch import Watch

__version__ = "0.1.0"

__all__ = [
    "AdapterUnavailable",
    "Config",
    "ConfigError",
    "Finding",
    "FingerprintUnavailable",
    "ReplicaFault",
    "RunDirectoryError",
    "StepReport",
    "Summary",
    "TpwatchError",
    "Watch",
    "__version__",
    "attach",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Resolve what needs torch on first use."""
    if name == "attach":
        from tpwatch.session import attach

        return attach
    if name == "Watch":
        from tpwatch.watch import Watch

        return Watch
    message = f"module 'tpwatch' has no attribute {name!r}"
    raise AttributeError(message)
