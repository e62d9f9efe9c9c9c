"""The examples of the documentation, written out so that mypy proves that they type-check.

Nothing here runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import tpwatch


def watch_a_training_script(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor]
) -> None:
    """Attach, train, read the findings, detach: the handle is a context manager."""
    with tpwatch.attach(model, optimizer) as watch:
        for batch in batches:
            model(batch).sum().backward()
            optimizer.step()
        watch.check()
        for finding in watch.findings:
            tell(finding.kind, finding.parameter, finding.ranks)


def tell(kind: str, parameter: str, ranks: Sequence[int]) -> None:
    """Stand for whatever a user does with a finding."""


def stop_on_a_fault(chunks: list[torch.nn.Module], optimizer: torch.optim.Optimizer) -> None:
    """Model chunks go in as a list; the settings come from a file, from code or from a mapping."""
    watch = tpwatch.attach(chunks, optimizer, {"on_fault": "abort"}, adapter="megatron")
    watch.detach()
    watch = tpwatch.attach(chunks, optimizer, tpwatch.Config(on_fault="abort", patience=1))
    try:
        optimizer.step()
    except tpwatch.ReplicaFault as fault:
        for finding in fault.findings:
            tell(finding.kind, finding.parameter, finding.ranks)
    finally:
        watch.detach()
