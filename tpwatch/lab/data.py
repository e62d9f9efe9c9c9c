"""Batches that are a pure function of seed, step, microbatch and data-parallel rank.

Knows: the lab's sizes. Must not know: Megatron, the faults. Tensor-parallel ranks ask with the same
data-parallel rank and so get the same batch; the global generator is never touched.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tpwatch.lab.config import LabConfig


@dataclass(frozen=True, slots=True)
class Batch:
    """One microbatch."""

    tokens: torch.Tensor
    """Input token ids, int64 `[batch, seq]`."""

    labels: torch.Tensor
    """Next token ids, int64 `[batch, seq]`."""

    loss_mask: torch.Tensor
    """1.0 where the loss counts, float32 `[batch, seq]`."""

    positions: torch.Tensor
    """Position ids, int64 `[batch, seq]`."""

    attention_mask: torch.Tensor
    """True where attention is forbidden, bool `[1, 1, seq, seq]`."""


def batches(config: LabConfig, step: int, dp_rank: int) -> list[Batch]:
    """The microbatches of one step for one data-parallel rank."""
    seed = (config.seed * 100_003 + step) * 1_009 + dp_rank
    generator = torch.Generator().manual_seed(seed)
    return [_batch(config, generator) for _ in range(config.microbatches)]


def _batch(config: LabConfig, generator: torch.Generator) -> Batch:
    """Sequences that walk through the vocabulary by a fixed stride: there is something to learn."""
    start = torch.randint(config.vocab, (config.batch, 1), generator=generator)
    stride = torch.randint(1, 4, (config.batch, 1), generator=generator)
    walk = (start + stride * torch.arange(config.seq + 1)) % config.vocab
    position = torch.arange(config.seq)
    loss_mask = (position >= int(config.prompt_fraction * config.seq)).float()
    return Batch(
        tokens=walk[:, :-1].contiguous(),
        labels=walk[:, 1:].contiguous(),
        loss_mask=loss_mask.expand(config.batch, -1),
        positions=position.expand(config.batch, -1),
        attention_mask=torch.ones(1, 1, config.seq, config.seq).triu(1).bool(),
    )
