"""What one lab run is: sizes, parallel layout, precision.

Knows: the knobs of the lab's model and what they may be. Must not know: Megatron, torch, faults.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tpwatch.errors import ConfigError

Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabConfig:
    """A tiny GPT under tensor parallelism; the defaults take some tens of milliseconds a step.

    Raises:
        ConfigError: a size does not divide by the tensor-parallel or the pipeline-parallel size.
    """

    tp: int = 2
    """Tensor-parallel size."""

    dp: int = 1
    """Data-parallel size; the world has `tp * dp * pp` ranks."""

    pp: int = 1
    """Pipeline-parallel size; each stage has `layers / pp` of the layers."""

    sequence_parallel: bool = True
    """Norms work on a slice of the sequence, Megatron sums their gradients; needs `tp` > 1."""

    qk_layernorm: bool = False
    """Norms on queries and keys; Megatron sums their gradients by name."""

    bias: bool = False
    """Biases in linear layers; those of row-parallel layers are replicated."""

    distributed_optimizer: bool = False
    """Shard the optimizer over data-parallel ranks; gradients arrive by reduce-scatter."""

    overlap_grad_reduce: bool = False
    """Reduce gradient buckets over data-parallel ranks while the backward pass still runs."""

    precision: Precision = "fp32"
    """Dtype of the parameters; `fp16` trains with a dynamic loss scaler."""

    per_token_loss: bool = False
    """Divide by the number of tokens behind the reductions (`calculate_per_token_loss`)."""

    prompt_fraction: float = 0.0
    """Leading share of every sequence that the loss mask hides, as in supervised fine-tuning."""

    hidden: int = 64
    """Hidden size."""

    layers: int = 2
    """Transformer layers; a multiple of `pp`."""

    heads: int = 4
    """Attention heads; a multiple of `tp`."""

    vocab: int = 128
    """Vocabulary size; a multiple of `tp`."""

    seq: int = 32
    """Tokens per sequence; a multiple of `tp`."""

    batch: int = 2
    """Sequences per microbatch and data-parallel rank."""

    microbatches: int = 1
    """Microbatches accumulated in one step."""

    seed: int = 1234
    """Seed of the initial weights and of the data."""

    lr: float = 1e-3
    """Learning rate of Adam."""

    clip_grad: float = 1.0
    """Limit of the global gradient norm; 0 switches clipping off."""

    def __post_init__(self) -> None:
        parts = {"heads": self.tp, "vocab": self.tp, "seq": self.tp, "layers": self.pp}
        for knob, size in parts.items():
            value = getattr(self, knob)
            if value % size:
                name = f"lab.{knob}"
                what = "pipeline-parallel" if knob == "layers" else "tensor-parallel"
                rule = f"must be a multiple of the {what} size {size}"
                raise ConfigError(name, value, rule, "Choose another size.")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.dp * self.pp
