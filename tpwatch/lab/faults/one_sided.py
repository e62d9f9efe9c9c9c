"""P2, second half: a gradient that exists on some tensor-parallel ranks only.

Knows: two ways in which that happens. Must not know: the monitor. Unwatched, the framework's coalesced reduction then
pairs buffers of different size: it hangs, fails, or mixes up parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state

from tpwatch.lab.faults.mechanism import Mechanism, is_last_tp_rank, mark, tp_rank
from tpwatch.lab.model import MarkedRMSNorm

if TYPE_CHECKING:
    from tpwatch.lab.data import Batch
    from tpwatch.lab.model import TrainingRun

PATCHES_PER_RANK = 4


class FrozenOnLastRank(Mechanism):
    """A norm gain stops being trainable on the last rank, after DDP has wrapped the model."""

    def edit_run(self, run: TrainingRun) -> None:
        """Freeze it; the fix freezes it everywhere."""
        if self.fixed or is_last_tp_rank():
            run.model.decoder.layers[1].pre_mlp_layernorm.weight.requires_grad_(requires_grad=False)


class ChunkOutsideDdp(Mechanism):
    """A vision chunk that DDP does not wrap; the images have fewer patches than fill every rank's slice."""

    def edit_run(self, run: TrainingRun) -> None:
        """Add the chunk, its loss and its optimizer to the run."""
        chunk = VisionChunk(run)
        optimizer = torch.optim.AdamW(chunk.parameters(), lr=self.config.lr)
        run.chunks.append(chunk)
        run.extra_losses.append(lambda batch: chunk.loss(batch, keep_empty=self.fixed))
        run.after_update.append(optimizer.step)


class VisionChunk(torch.nn.Module):
    """A small encoder of image patches with what the finalizer asks of a model chunk; gradients stay in ``grad``.

    Sequence parallelism splits the patches over tensor-parallel ranks, so that gradients are partial and marked to
    be summed.
    """

    def __init__(self, run: TrainingRun) -> None:
        """Share the configuration of the run's language model."""
        super().__init__()
        self.config = run.transformer_config
        self.ddp_config: Any = getattr(run.chunks[0], "ddp_config")  # noqa: B009 - Module types it as a tensor
        self.vision_norm = MarkedRMSNorm(self.config, self.config.hidden_size)
        self.vision_proj = torch.nn.Linear(self.config.hidden_size, 8, bias=False)
        mark(self.vision_proj.parameters(), sequence_parallel=self.config.sequence_parallel)

    def loss(self, batch: Batch, *, keep_empty: bool) -> torch.Tensor:
        """Return this rank's share of the vision loss; a rank without patches skips the chunk."""
        generator = torch.Generator().manual_seed(int(batch.tokens.sum()))
        tp = parallel_state.get_tensor_model_parallel_world_size()
        patches = torch.randn((tp - 1) * PATCHES_PER_RANK, self.config.hidden_size, generator=generator)
        own = patches[tp_rank() * PATCHES_PER_RANK :][:PATCHES_PER_RANK]
        if len(own) == 0 and not keep_empty:
            return torch.zeros(())
        loss: torch.Tensor = self.vision_proj(self.vision_norm(own)).square().sum() / len(patches)
        return loss

    def zero_grad_buffer(self) -> None:
        """Drop the gradients of the step before."""
        self.zero_grad()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:  # noqa: ARG002, FBT001, FBT002
        """Average over data-parallel ranks, which see the same slice and so agree on what is None."""
        group = parallel_state.get_data_parallel_group()
        for parameter in self.parameters():
            if parameter.grad is not None:
                torch.distributed.all_reduce(parameter.grad, torch.distributed.ReduceOp.AVG, group)
