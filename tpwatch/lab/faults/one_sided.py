"""P2, second half: a gradient that exists on some tensor-parallel ranks only.

Knows: two ways in which that happens. Must not know: the monitor. Unwatched, the framework's
coalesced reduction then pairs buffers of different size: it hangs, fails or mixes up parameters.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from tpwatch.lab.data import Batch
from tpwatch.lab.faults.mechanism import Mechanism, tp_rank
from tpwatch.lab.model import MarkedRMSNorm, TrainingRun, mark

PATCHES_PER_RANK = 4
FEATURES = 8


class FrozenOnLastRank(Mechanism):
    """A norm gain stops being trainable on the last rank, after DDP has wrapped the model."""

    def edit_run(self, run: TrainingRun) -> None:
        """Freeze it; the fix freezes it everywhere."""
        if self.fixed or tp_rank() == self.config.tp - 1:
            gain = run.model.decoder.layers[1].pre_mlp_layernorm.weight
            gain.requires_grad_(requires_grad=False)


class ChunkOutsideDdp(Mechanism):
    """A vision chunk that DDP does not wrap, and too few patches to fill every rank's slice."""

    def edit_run(self, run: TrainingRun) -> None:
        """Add the chunk, its loss and its optimizer to the run."""
        chunk = VisionChunk(run)
        optimizer = torch.optim.AdamW(chunk.parameters(), lr=self.config.lr)
        run.chunks.append(chunk)
        run.extra_losses.append(lambda batch: chunk.loss(batch, run_empty=self.fixed))
        run.after_update.append(optimizer.step)


class VisionChunk(torch.nn.Module):
    """A small encoder of image patches, with what the finalizer asks of a model chunk.

    Its gradients stay in `grad`. Sequence parallelism splits the patches over tensor-parallel
    ranks, so that gradients are partial sums and marked to be summed.
    """

    def __init__(self, run: TrainingRun) -> None:
        """Share the configuration of the run's language model."""
        super().__init__()
        self.config = run.transformer_config
        self.ddp_config = run.chunks[0].ddp_config
        self.vision_norm = MarkedRMSNorm(self.config, self.config.hidden_size)
        self.vision_proj = torch.nn.Linear(self.config.hidden_size, FEATURES, bias=False)
        mark(self.vision_proj.parameters(), sequence_parallel=self.config.sequence_parallel)

    def loss(self, batch: Batch, *, run_empty: bool) -> torch.Tensor:
        """This rank's share of the vision loss; a rank without patches skips the chunk."""
        tp = parallel_state.get_tensor_model_parallel_world_size()
        count = (tp - 1) * PATCHES_PER_RANK
        generator = torch.Generator().manual_seed(int(batch.tokens.sum()))
        patches = torch.randn(count, self.config.hidden_size, generator=generator)
        own = patches[tp_rank() * PATCHES_PER_RANK :][:PATCHES_PER_RANK]
        if len(own) == 0 and not run_empty:
            return torch.zeros(())
        loss: torch.Tensor = self.vision_proj(self.vision_norm(own)).square().sum() / count
        return loss

    def zero_grad_buffer(self) -> None:
        """Drop the gradients of the step before."""
        self.zero_grad()

    def finish_grad_sync(self, **_options: object) -> None:
        """Average over data-parallel ranks; they see the same slice and agree on what is None."""
        group = parallel_state.get_data_parallel_group()
        for parameter in self.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, group)
