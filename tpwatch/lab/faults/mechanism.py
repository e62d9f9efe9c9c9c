"""The seams at which a mechanism reaches into a run, and the tensor-parallel regions several of them need.

Knows: Megatron-core's region functions and markers. Must not know: any particular fault.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core import parallel_state, tensor_parallel

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from tpwatch.lab.config import LabConfig
    from tpwatch.lab.model import TrainingRun


class Mechanism:
    """A run as it is: the base of all mechanisms, and the healthy controls' own."""

    def __init__(self, config: LabConfig, *, fixed: bool) -> None:
        """Remember the run's configuration and whether the upstream fix is applied."""
        self.config = config
        self.fixed = fixed

    def edit_model(self, model: Any) -> None:  # noqa: ANN401 - Megatron's GPTModel is untyped
        """Replace or add modules of the bare GPTModel, before DDP wraps it."""

    def edit_run(self, run: TrainingRun) -> None:
        """Change the finished run, before a monitor is attached."""

    def after_attach(self, run: TrainingRun) -> None:
        """Change the finished run, after a monitor is attached."""


def tp_rank() -> int:
    """Return this process's tensor-parallel rank."""
    return int(parallel_state.get_tensor_model_parallel_rank())


def is_last_tp_rank() -> bool:
    """Say whether this process is the last of its tensor-parallel group."""
    return tp_rank() == parallel_state.get_tensor_model_parallel_world_size() - 1


def gather_sequence(hidden: torch.Tensor, config: LabConfig) -> torch.Tensor:
    """``[seq / tp, batch, h]`` to ``[seq, batch, h]`` for computation that every rank repeats in full.

    Its backward keeps this rank's slice: the gradient of repeated computation is complete, summing it would be wrong.
    """
    if not config.sequence_parallel:
        return hidden
    gathered: torch.Tensor = tensor_parallel.gather_from_sequence_parallel_region(
        hidden, tensor_parallel_output_grad=False
    )
    return gathered


def scatter_sequence(hidden: torch.Tensor, config: LabConfig) -> torch.Tensor:
    """``[seq, batch, h]`` to this rank's ``[seq / tp, batch, h]``; the backward gathers the full gradient."""
    if not config.sequence_parallel:
        return hidden
    scattered: torch.Tensor = tensor_parallel.scatter_to_sequence_parallel_region(hidden)
    return scattered


def mark(parameters: Iterable[torch.nn.Parameter], **marks: bool) -> None:
    """Set Megatron's markers (``sequence_parallel``, ``average_gradients_across_tp_domain``) on parameters."""
    for parameter in parameters:
        for name, value in marks.items():
            setattr(parameter, name, value)
