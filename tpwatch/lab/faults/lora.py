"""P4: LoRA under sequence parallelism, whose replicated factor is never summed.

Knows: how adapters are split over tensor-parallel ranks. Must not know: the monitor.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel

from tpwatch.lab.faults.mechanism import Mechanism, output_of
from tpwatch.lab.model import mark

RANK = 4


class UnsummedFactors(Mechanism):
    """P4: base weights frozen, an adapter on every linear of both layers.

    A row-parallel target has its A split like itself and its B replicated, a column-parallel target
    the other way round. Under sequence parallelism the replicated factor works on this rank's slice
    of the sequence.
    """

    def edit_model(self, model: Any) -> None:
        """Freeze the model and add an adapter to each linear."""
        model.requires_grad_(requires_grad=False)
        for layer in model.decoder.layers:
            self._adapt_row_parallel(layer.self_attention.linear_proj)
            self._adapt_row_parallel(layer.mlp.linear_fc2)
            self._adapt_column_parallel(layer.self_attention.linear_qkv)
            self._adapt_column_parallel(layer.mlp.linear_fc1)

    def _adapt_row_parallel(self, target: Any) -> None:
        """A is row-parallel (its output arrives as a slice of the sequence), B is replicated."""
        target.lora_A = tensor_parallel.RowParallelLinear(
            target.input_size,
            RANK,
            config=target.config,
            init_method=torch.nn.init.kaiming_uniform_,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=False,
        )
        target.lora_B = torch.nn.Linear(RANK, target.output_size, bias=False)
        torch.nn.init.zeros_(target.lora_B.weight)
        self._install(target, replicated=target.lora_B)

    def _adapt_column_parallel(self, target: Any) -> None:
        """A is replicated (on the slice of the sequence), B is column-parallel and gathers it."""
        target.lora_A = torch.nn.Linear(target.input_size, RANK, bias=False)
        target.lora_B = tensor_parallel.ColumnParallelLinear(
            RANK,
            target.output_size,
            config=target.config,
            init_method=torch.nn.init.zeros_,
            bias=False,
        )
        self._install(target, replicated=target.lora_A)

    def _install(self, target: Any, replicated: torch.nn.Module) -> None:
        """Add B(A(x)) to the target's output; the fix marks the replicated factor."""
        target.register_forward_hook(_add_adapter)
        if self.fixed:
            mark(replicated.parameters(), sequence_parallel=True)


def _add_adapter(target: Any, args: tuple[Any, ...], answer: tuple[Any, Any]) -> tuple[Any, Any]:
    output, bias = answer
    return output + output_of(target.lora_B(output_of(target.lora_A(args[0])))), bias
