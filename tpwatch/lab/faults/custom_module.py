"""P2: a custom module that nobody declared to the framework.

Knows: what an undeclared replicated module lacks. Must not know: the monitor.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from tpwatch.lab.config import LabConfig
from tpwatch.lab.faults.mechanism import Mechanism, gather_sequence, scatter_sequence, tp_rank
from tpwatch.lab.model import mark

BOTTLENECK = 8


class GatedAdapter(torch.nn.Module):
    """A gated bottleneck beside the MLP, computed in full on every tensor-parallel rank."""

    def __init__(self, config: LabConfig) -> None:
        """Draw all weights from the global generator."""
        super().__init__()
        self.config = config
        self.gate = torch.nn.Linear(config.hidden, BOTTLENECK, bias=False)
        self.down = torch.nn.Linear(config.hidden, BOTTLENECK, bias=False)
        self.up = torch.nn.Linear(BOTTLENECK, config.hidden, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map `[seq / tp, batch, hidden]` to the same shape."""
        full = gather_sequence(hidden, self.config)
        return scatter_sequence(self.up(self.gate(full).sigmoid() * self.down(full)), self.config)


class UnsyncedAdapter(Mechanism):
    """P2: initialised from a seed that depends on the rank, and without any mark."""

    def edit_model(self, model: Any) -> None:
        """Hang the adapter beside the MLP of layer 0."""
        mlp = model.decoder.layers[0].mlp
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.config.seed + tp_rank())
            adapter = mlp.adapter = GatedAdapter(self.config)
        mlp.register_forward_hook(lambda _mlp, args, out: (out[0] + adapter(args[0]), out[1]))
        if self.fixed:
            source = parallel_state.get_tensor_model_parallel_src_rank()
            for parameter in adapter.parameters():
                group = parallel_state.get_tensor_model_parallel_group()
                dist.broadcast(parameter.data, source, group)
            mark(adapter.parameters(), average_gradients_across_tp_domain=True)
