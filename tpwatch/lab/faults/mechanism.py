"""The seams at which a mechanism reaches into a run, and the regions several of them compute in.

Knows: Megatron-core's region functions and ranks. Must not know: any particular fault.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel

from tpwatch.lab.config import LabConfig
from tpwatch.lab.model import TrainingRun


class Mechanism:
    """A run as it is: the base of all mechanisms, and what the healthy controls use."""

    def __init__(self, config: LabConfig, *, fixed: bool) -> None:
        """Remember the run's configuration, and whether the upstream fix is applied."""
        self.config = config
        self.fixed = fixed

    def edit_model(self, model: Any) -> None:
        """Replace or add modules of the bare GPTModel, before DDP wraps it."""

    def edit_run(self, run: TrainingRun) -> None:
        """Change the finished run, before a monitor is attached."""

    def after_attach(self, run: TrainingRun) -> None:
        """Change the finished run, after a monitor is attached."""


def tp_rank() -> int:
    """This process's tensor-parallel rank."""
    return int(parallel_state.get_tensor_model_parallel_rank())


def gather_sequence(hidden: torch.Tensor, config: LabConfig) -> torch.Tensor:
    """Gather `[seq / tp, batch, h]` into `[seq, batch, h]` for work every rank repeats in full.

    The backward keeps this rank's slice: the gradient of repeated work is already complete.
    """
    if not config.sequence_parallel:
        return hidden
    gathered: torch.Tensor = tensor_parallel.gather_from_sequence_parallel_region(
        hidden, tensor_parallel_output_grad=False
    )
    return gathered


def scatter_sequence(hidden: torch.Tensor, config: LabConfig) -> torch.Tensor:
    """Keep this rank's `[seq / tp, batch, h]` of `[seq, batch, h]`; the backward gathers."""
    if not config.sequence_parallel:
        return hidden
    scattered: torch.Tensor = tensor_parallel.scatter_to_sequence_parallel_region(hidden)
    return scattered


def output_of(answer: Any) -> torch.Tensor:
    """The output of a linear; Megatron's answer with (output, bias)."""
    output: torch.Tensor = answer[0] if isinstance(answer, tuple) else answer
    return output
