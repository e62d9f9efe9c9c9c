"""P0 and P1: linear attention replicated with rounding noise, or sharded with a stale mark.

Knows: where the two stacks went wrong. Must not know: the monitor.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from torch.nn import functional

from tpwatch.lab.faults.gated_delta_net import (
    CHANNELS,
    HEAD_DIM,
    GatedDeltaNet,
    GatheredAttention,
)
from tpwatch.lab.faults.mechanism import Mechanism, tp_rank
from tpwatch.lab.model import mark

AUTOTUNED_BLOCKS = (32, 5, 11, 7)
"""Tokens per block that autotuning happened to pick on each rank: the order of summation."""


class ReplicatedBlock(Mechanism):
    """P0: every rank runs the whole block, its kernels sum in another order, nothing averages."""

    def edit_model(self, model: Any) -> None:
        """Replace the attention of layer 0, input norm included, by the replicated block."""
        hidden, layer = self.config.hidden, model.decoder.layers[0]
        heads = hidden // HEAD_DIM
        linear_attn = GatedDeltaNet(
            torch.nn.Linear(hidden, heads * CHANNELS, bias=False),
            torch.nn.Linear(heads * HEAD_DIM, hidden, bias=False),
            heads,
            AUTOTUNED_BLOCKS[tp_rank() % len(AUTOTUNED_BLOCKS)],
        )
        layer.input_layernorm = IdentityOp()
        layer.self_attention = GatheredAttention(self.config, linear_attn, torch.nn.RMSNorm(hidden))
        if self.fixed:
            mark(layer.self_attention.parameters(), average_gradients_across_tp_domain=True)


class LayerNormColumnParallelLinear(tensor_parallel.ColumnParallelLinear):
    """A norm fused in front of a column-parallel linear, like Transformer Engine's module.

    Its backward is that module's too: without sequence parallelism the gradient of the linear's
    input is all-reduced and only then goes through the norm, so that the gain's gradient is already
    complete on every rank.
    """

    def __init__(self, input_size: int, output_size: int, config: TransformerConfig) -> None:
        """Build the linear and a gain `[input_size]`, which keeps the configuration's mark."""
        super().__init__(input_size, output_size, config=config, init_method=config.init_method, bias=False)
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size))
        mark([self.layer_norm_weight], sequence_parallel=config.sequence_parallel)

    def forward(self, hidden: torch.Tensor) -> Any:
        """Norm, then project to this rank's columns."""
        gain = self.layer_norm_weight
        return super().forward(functional.rms_norm(hidden, gain.shape, gain, self.eps))


class GatheredOutside(Mechanism):
    """P1: the sequence is gathered outside, the projections are told, the gain's mark is not."""

    def edit_model(self, model: Any) -> None:
        """Replace the attention of layer 0 by one whose heads are split over TP ranks."""
        hidden, layer = self.config.hidden, model.decoder.layers[0]
        heads = hidden // HEAD_DIM
        in_proj = self.build_in_proj(hidden, heads * CHANNELS, model.config)
        out_proj = tensor_parallel.RowParallelLinear(
            heads * HEAD_DIM,
            hidden,
            config=model.config,
            init_method=model.config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=False,
        )
        linear_attn = GatedDeltaNet(in_proj, out_proj, heads)
        linear_attn.split_heads(tp_rank(), self.config.tp)
        # Every rank sees its own heads: this gain's gradient really is a partial sum.
        mark(linear_attn.norm.parameters(), sequence_parallel=self.config.sequence_parallel)
        self._gather_outside(in_proj, out_proj)
        layer.input_layernorm = IdentityOp()
        layer.self_attention = GatheredAttention(self.config, linear_attn, IdentityOp())

    def build_in_proj(self, hidden: int, channels: int, config: TransformerConfig) -> Any:
        """Build the input projection with its fused norm."""
        return LayerNormColumnParallelLinear(hidden, channels, config)

    def _gather_outside(self, in_proj: Any, out_proj: Any) -> None:
        """Tell the projections that they see the full sequence: what the bridge does, and all."""
        in_proj.sequence_parallel = out_proj.sequence_parallel = False
        in_proj.allreduce_dgrad = self.config.tp > 1
        if self.fixed:
            mark(
                [in_proj.layer_norm_weight],
                sequence_parallel=False,
                average_gradients_across_tp_domain=True,
            )


class GatheredOutsideTransformerEngine(GatheredOutside):
    """P1 with Transformer Engine's own LayerNormLinear, in Megatron-core's wrapper."""

    def build_in_proj(self, hidden: int, channels: int, config: TransformerConfig) -> Any:
        """Build the input projection with its fused norm."""
        from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear

        return TELayerNormColumnParallelLinear(
            hidden,
            channels,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
        )
