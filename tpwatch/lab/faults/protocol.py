"""Variants of how a training loop calls the finalizer: not at all, twice, or replaced late.

Knows: Megatron-core's finalizer. Must not know: the monitor.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads

from tpwatch.lab.faults.mechanism import Mechanism
from tpwatch.lab.model import TrainingRun

FINALIZER_MODULE = "megatron.core.distributed.finalize_model_grads"
TP_REDUCTION = "_allreduce_non_tensor_model_parallel_grads"
PARAMETERS_PER_BUCKET = 2


class Skipped(Mechanism):
    """The loop reduces over data-parallel ranks itself and forgets the rest of the finalizer."""

    def edit_run(self, run: TrainingRun) -> None:
        """Give the schedule a finalizer of the framework's own making."""

        def only_data_parallel(chunks: list[Any], *_args: object, **_kwargs: object) -> None:
            for chunk in chunks:
                chunk.finish_grad_sync()

        if not self.fixed:
            run.transformer_config.finalize_model_grads_func = only_data_parallel


class Twice(Mechanism):
    """The schedule finalizes, and the loop finalizes again."""

    def edit_run(self, run: TrainingRun) -> None:
        """Call Megatron's finalizer a second time."""

        def twice(chunks: list[Any], *args: Any, **kwargs: Any) -> None:
            finalize_model_grads(chunks, *args, **kwargs)
            finalize_model_grads(chunks, *args, **kwargs)

        if not self.fixed:
            run.transformer_config.finalize_model_grads_func = twice


class Chunked(Mechanism):
    """The reduction over TP is replaced in its module, after a monitor was attached."""

    def edit_run(self, run: TrainingRun) -> None:
        """Remember the framework's own reduction, to be put back when the run closes."""
        module = sys.modules[FINALIZER_MODULE]
        run.on_close.callback(setattr, module, TP_REDUCTION, getattr(module, TP_REDUCTION))

    def after_attach(self, run: TrainingRun) -> None:
        """Replace the module attribute, whatever a monitor has put there."""
        del run  # the replacement is process-wide
        setattr(sys.modules[FINALIZER_MODULE], TP_REDUCTION, chunked_reduction)


def chunked_reduction(model: list[Any], config: Any, tp_group: Any = None) -> None:
    """Sum gradients marked `sequence_parallel` over the TP group, a few parameters at a time."""
    group = tp_group or parallel_state.get_tensor_model_parallel_group()
    gradients = [
        parameter.main_grad
        for chunk in model
        for parameter in chunk.parameters()
        if config.sequence_parallel and getattr(parameter, "sequence_parallel", False)
    ]
    for first in range(0, len(gradients), PARAMETERS_PER_BUCKET):
        bucket = gradients[first : first + PARAMETERS_PER_BUCKET]
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat, group=group)
        parts = flat.split([gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
