"""A small gated delta-rule attention, the block that field reports P0 and P1 are about.

Knows: the gated delta rule, and how a block that computes on the full sequence sits in a layer
under sequence parallelism. Must not know: what is wrong with it, the monitor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from torch.nn import functional

from tpwatch.lab.config import LabConfig
from tpwatch.lab.faults.mechanism import gather_sequence, output_of, scatter_sequence

HEAD_DIM = 8
KERNEL = 4
CHANNELS = 4 * HEAD_DIM + 2
"""Channels per head behind `in_proj`: query, key, value, gate, decay, write strength."""


class GatedDeltaNet(torch.nn.Module):
    """Gated delta-rule attention over `[seq, batch, hidden]` (Yang et al., 2024).

    Per head, with decay a_t and write strength b_t,
    S_t = a_t S_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T and o_t = S_t q_t, behind a short causal
    convolution and in front of a gated norm. `conv1d` `[heads, 3 * HEAD_DIM, KERNEL]`, `A_log` and
    `dt_bias` `[heads]` act within one head; all heads share the gain of `norm`.
    """

    def __init__(
        self,
        in_proj: torch.nn.Module,
        out_proj: torch.nn.Module,
        heads: int,
        block: int | None = None,
    ) -> None:
        """Take projections to `heads * CHANNELS` and from `heads * HEAD_DIM` channels.

        `block` is how many tokens a token-wise kernel takes at a time (None: all of them). Every
        gradient of a weight is a sum over tokens, within a block and then over blocks.
        """
        super().__init__()
        self.in_proj = in_proj
        self.out_proj = out_proj
        self.block = block
        self.conv1d = torch.nn.Parameter(torch.rand(heads, 3 * HEAD_DIM, KERNEL) / KERNEL)
        self.A_log = torch.nn.Parameter(torch.rand(heads))
        self.dt_bias = torch.nn.Parameter(torch.rand(heads) - 3)
        self.norm = torch.nn.RMSNorm(HEAD_DIM)

    def split_heads(self, rank: int, size: int) -> None:
        """Keep one rank's share of the per-head weights, marked as Megatron marks a shard."""
        for name in ("conv1d", "A_log", "dt_bias"):
            share = torch.nn.Parameter(getattr(self, name).detach().chunk(size)[rank].clone())
            tensor_parallel.set_tensor_model_parallel_attributes(share, is_parallel=True, dim=0, stride=1)
            setattr(self, name, share)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Mix `[seq, batch, hidden]` causally along the sequence."""
        mixed = by_block(self.in_proj, hidden, self.block).unflatten(-1, (-1, CHANNELS))
        qkv, gate, decay, write = mixed.split([3 * HEAD_DIM, HEAD_DIM, 1, 1], dim=-1)
        windows = functional.pad(qkv, (0, 0, 0, 0, 0, 0, KERNEL - 1, 0)).unfold(0, KERNEL, 1)
        query, key, value = by_block(self._convolve, windows, self.block).chunk(3, dim=-1)
        log_decay = by_block(self._log_decay, decay.squeeze(-1), self.block)
        read = delta_rule(query, key, value, log_decay, write.squeeze(-1).sigmoid())
        gated = by_block(self.norm, read, self.block) * functional.silu(gate)
        return by_block(self.out_proj, gated.flatten(-2), self.block)

    def _convolve(self, windows: torch.Tensor) -> torch.Tensor:
        """Depthwise causal convolution of windows `[tokens, batch, heads, channels, KERNEL]`."""
        return functional.silu((windows * self.conv1d).sum(-1))

    def _log_decay(self, decay: torch.Tensor) -> torch.Tensor:
        """Logarithm of the decay per head, at most 0."""
        return -self.A_log.exp() * functional.softplus(decay + self.dt_bias)


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    write: torch.Tensor,
) -> torch.Tensor:
    """The gated delta rule over a whole sequence, `[seq, batch, heads, HEAD_DIM]` in and out.

    With G_tj the decay from j to t, the rows u_t that are written solve the unit-triangular system
    u_t + b_t sum_{j<t} G_tj (k_t . k_j) u_j = b_t v_t, and o_t = sum_{j<=t} G_tj (q_t . k_j) u_j.
    `log_decay` and `write` are `[seq, batch, heads]`. Computed in float32, as published kernels do.
    """
    dtype = value.dtype
    query, key, value = (x.float().movedim(0, -2) for x in (query, key, value))
    query, key = (functional.normalize(x, dim=-1) for x in (query, key))
    total, write = (x.float().movedim(0, -1).unsqueeze(-1) for x in (log_decay, write))
    total = total.cumsum(-2)
    decay = (total - total.mT).tril().exp()
    overlap = (write * decay * (key @ key.mT)).tril(-1)
    rows = torch.linalg.solve_triangular(overlap, write * value, upper=False, unitriangular=True)
    read: torch.Tensor = (decay * (query @ key.mT)).tril() @ rows
    return read.movedim(-2, 0).to(dtype)


class GatheredAttention(torch.nn.Module):
    """Stands for a layer's attention: gathers the sequence, runs on it, returns its slice."""

    def __init__(self, config: LabConfig, linear_attn: GatedDeltaNet, input_layernorm: torch.nn.Module) -> None:
        """Own the layer's input norm as well (an identity where it is fused into `in_proj`)."""
        super().__init__()
        self.config = config
        self.input_layernorm = input_layernorm
        self.linear_attn = linear_attn

    def forward(self, hidden: torch.Tensor, *_args: object, **_kwargs: object) -> tuple[torch.Tensor, None]:
        """Answer as Megatron's attention does, with an output and no bias."""
        hidden = gather_sequence(hidden, self.config)
        hidden = by_block(self.input_layernorm, hidden, self.linear_attn.block)
        return scatter_sequence(self.linear_attn(hidden), self.config), None


def by_block(kernel: Callable[[torch.Tensor], Any], tokens: torch.Tensor, block: int | None) -> torch.Tensor:
    """Run a token-wise kernel on `block` tokens at a time, along dimension 0."""
    return torch.cat([output_of(kernel(part)) for part in tokens.split(block or len(tokens))])
