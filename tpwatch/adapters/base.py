"""What an adapter is, and how attaching works whatever the framework.

A handshake first, then a Watch.

An adapter only translates: it describes parameters (`Candidate`), hands over tensors (`Source`) and
wraps the host's seams (`Seams`). It may not compare, decide or format. A new framework is one new
file beside this one and one row of
`tpwatch.adapters.SUPPORT`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tpwatch.config import Config
from tpwatch.discover import Candidate
from tpwatch.engine import Seams
from tpwatch.parts import Source
from tpwatch.watch import Watch

Groups = Mapping[str, dist.ProcessGroup]
"""Process groups by axis (`"tp"`), where the caller's differ from the framework's global ones."""


@dataclass(frozen=True, slots=True)
class Host:
    """One model and optimizer of a framework, as an adapter found them on this rank."""

    axis: str
    group: dist.ProcessGroup | None
    candidates: Sequence[Candidate]
    device: torch.device
    loss_scaler: bool
    """True if the optimizer skips steps whose gradients are not finite."""
    source: Callable[[Sequence[int]], Source]
    """Given the candidates that make up the plan, in order: where their tensors come from."""
    install: Callable[[Watch], Seams]
    """Wrap the host's seams so that they drive the Watch."""
    versions: Mapping[str, str]
    stage: str = ""
    """Pipeline stage of this rank, counted from 0; empty if the framework does not say."""


class Adapter(Protocol):
    """One framework."""

    name: str

    def group(self, groups: Groups | None) -> tuple[str, dist.ProcessGroup | None]:
        """Axis and process group of the replicas.

        The same kind of call on every rank, no collective.
        """
        ...

    def examine(self, model: Any, optimizer: Any, config: Config, groups: Groups | None) -> Host:
        """Look at model chunks and optimizer; no collective, nothing changed."""
        ...
