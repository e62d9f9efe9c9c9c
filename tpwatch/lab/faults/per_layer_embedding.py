"""P3: a per-layer embedding that computes on the full sequence, marked as if on a slice.

Knows: the module and its wrong marks. Must not know: the monitor.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer import TransformerConfig
from torch.nn import functional

from tpwatch.lab.config import LabConfig
from tpwatch.lab.faults.mechanism import Mechanism, gather_sequence, scatter_sequence
from tpwatch.lab.model import mark

MEMORY = 32
KERNEL = 4


class PerLayerEmbedding(torch.nn.Module):
    """Adds to a layer's output what a gate lets through of an embedding of the token.

    It gathers the sequence, repeats the work on every tensor-parallel rank and keeps its slice; the
    embedding table itself is split over the vocabulary.
    """

    def __init__(self, config: LabConfig, transformer_config: TransformerConfig) -> None:
        """Build the table `[vocab / tp, MEMORY]` and the replicated rest; conv1d starts at zero."""
        super().__init__()
        hidden = config.hidden
        self.config = config
        self.tokens: torch.Tensor | None = None
        self.table = tensor_parallel.VocabParallelEmbedding(
            config.vocab,
            MEMORY,
            init_method=transformer_config.init_method,
            config=transformer_config,
        )
        self.key_proj = torch.nn.Linear(MEMORY, hidden, bias=False)
        self.value_proj = torch.nn.Linear(MEMORY, hidden, bias=False)
        self.norm_key = torch.nn.RMSNorm(hidden)
        self.norm_query = torch.nn.RMSNorm(hidden)
        self.norm_conv = torch.nn.RMSNorm(hidden)
        self.conv1d = torch.nn.Conv1d(hidden, hidden, KERNEL, groups=hidden, bias=False)
        torch.nn.init.zeros_(self.conv1d.weight)

    def replicated(self) -> list[torch.nn.Parameter]:
        """The weights that every rank holds in full."""
        return [p for name, p in self.named_parameters() if not name.startswith("table.")]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map a layer's output `[seq / tp, batch, hidden]` to what is added to it."""
        query = self.norm_query(gather_sequence(hidden, self.config))
        memory = self.table(self.tokens).transpose(0, 1)
        key = self.norm_key(self.key_proj(memory))
        gate = (query * key).mean(-1, keepdim=True).sigmoid()
        value = gate * self.value_proj(memory)
        return scatter_sequence(value + self._smooth(self.norm_conv(value)), self.config)

    def _smooth(self, value: torch.Tensor) -> torch.Tensor:
        """Causal depthwise convolution of `[seq, batch, hidden]` along the sequence."""
        padded = functional.pad(value.permute(1, 2, 0), (KERNEL - 1, 0))
        return functional.silu(self.conv1d(padded)).permute(2, 0, 1)


class MarkedButGathered(Mechanism):
    """P3: the replicated weights are marked `sequence_parallel`; their gradient is complete."""

    def edit_model(self, model: Any) -> None:
        """Hang the embedding behind layer 0 and show it the token ids."""
        layer = model.decoder.layers[0]
        embedding = layer.per_layer_embedding = PerLayerEmbedding(self.config, model.config)
        model.register_forward_pre_hook(lambda _model, args: setattr(embedding, "tokens", args[0]))
        layer.register_forward_hook(lambda _layer, _args, out: (out[0] + embedding(out[0]), *out[1:]))
        mark(
            embedding.replicated(),
            sequence_parallel=not self.fixed,
            average_gradients_across_tp_domain=self.fixed,
        )
