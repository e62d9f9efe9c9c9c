"""Train a tiny GPT with Megatron-core under tensor and sequence parallelism, on CPU over gloo.

torchrun --standalone --nproc_per_node 2 train_plain_megatron.py --steps 6
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.overrides import TorchFunctionMode

warnings.filterwarnings("ignore")
logging.getLogger("megatron").setLevel(logging.ERROR)


class NoStream:
    """There are no CUDA streams on a CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what a stream takes."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""


class OnCpu(TorchFunctionMode):
    """Megatron-core asks for CUDA tensors by name; here they are CPU tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the device, and name the type as Megatron's optimizers expect it."""
        del types
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        is_type_name = func is torch.Tensor.type and len(args) == 1
        return result.replace("torch.", "torch.cuda.") if is_type_name else result


torch.cuda.Stream = torch.cuda.current_stream = torch.cuda.default_stream = NoStream
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.synchronize = lambda *_args: None
torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
torch.cuda.manual_seed = torch.default_generator.manual_seed
torch.cuda.default_generators = {torch.device("cpu"): torch.default_generator}
torch.cuda._lazy_call = lambda call, **_kwargs: call()
OnCpu().__enter__()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.transformer_block import (  # noqa: E402
    TransformerBlockSubmodules,
)

VOCAB, SEQ, HIDDEN = 128, 32, 64


class Norm(torch.nn.RMSNorm):
    """RMSNorm that works on a slice of the sequence, its gradient to be summed."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_kwargs: Any) -> None:
        """Build and mark the gain."""
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


class Memory(torch.nn.Module):
    """What the layer remembers of each token: a gated value, added to its output."""

    def __init__(self) -> None:
        """Build it in full on every rank."""
        super().__init__()
        self.key_proj = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.value_proj = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.norm_key = torch.nn.RMSNorm(HIDDEN)
        for parameter in self.parameters():
            parameter.sequence_parallel = True

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Gather the sequence, compute on all of it, return this rank's slice."""
        hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        gate = functional.silu(self.norm_key(self.key_proj(hidden)))
        return tensor_parallel.scatter_to_sequence_parallel_region(gate * self.value_proj(hidden))


def build_model(tp: int, fault: str) -> GPTModel:
    """Build this rank's share of the model."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        ffn_hidden_size=2 * HIDDEN,
        num_attention_heads=4,
        normalization="RMSNorm",
        add_bias_linear=False,
        tensor_model_parallel_size=tp,
        sequence_parallel=True,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    model = GPTModel(
        config,
        TransformerBlockSubmodules([layer] * config.num_layers, layer_norm=Norm),
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        position_embedding_type="rope",
    )
    if fault == "ple":
        first = model.decoder.layers[0]
        memory = first.memory = Memory()
        first.register_forward_hook(lambda _, __, out: (out[0] + memory(out[0]), *out[1:]))
    return model


def batches(steps: int) -> Iterator[torch.Tensor]:
    """Draw token ids `[batch, SEQ + 1]`, the same on all ranks."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        start = torch.randint(VOCAB, (2, 1), generator=generator)
        yield (start + torch.arange(SEQ + 1)) % VOCAB


def forward_step(data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    """One microbatch of next-token prediction."""
    tokens = next(data)
    mask = torch.ones(1, 1, SEQ, SEQ).triu(1).bool()
    positions = torch.arange(SEQ).expand(len(tokens), -1)
    losses = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous())
    return losses, lambda output: (output.mean(), output.mean().detach())


def train(args: argparse.Namespace) -> list[float]:
    """Train and return the losses."""
    tp = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    torch.manual_seed(1234)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    model = build_model(tp, args.fault)
    config = model.config
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=args.distributed_optimizer
    )
    model = DistributedDataParallel(config, ddp_config, model)
    optimizer_config = OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=args.distributed_optimizer)
    optimizer = get_megatron_optimizer(optimizer_config, [model])
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    data, losses = batches(args.steps), []
    for step in range(1, args.steps + 1):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        (loss,) = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data,
            model=[model],
            num_microbatches=1,
            seq_length=SEQ,
            micro_batch_size=2,
        )
        optimizer.step()
        losses.append(float(loss))
        if dist.get_rank() == 0:
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)  # noqa: T201
    return losses


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--distributed-optimizer", action="store_true")
    parser.add_argument("--fault", choices=("none", "ple"), default="none")
    parser.add_argument("--losses", type=Path, help="file for the exact losses of rank 0")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    losses = train(args)
    if args.losses and dist.get_rank() == 0:
        args.losses.write_text(json.dumps([loss.hex() for loss in losses]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
