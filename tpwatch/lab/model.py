"""Builds the real thing: Megatron-core's GPTModel, DDP, schedule, finalizer, optimizer, on CPU.

Knows: Megatron-core's construction API (0.16 to 0.19). Must not know: the catalogue, tpwatch. A
fault reaches in through two seams: `edit_model` before DDP wraps the model, and the attributes of
the finished `TrainingRun`. Importing this file imports Megatron-core: `tpwatch.lab.cpu.install`
comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from tpwatch.lab.config import LabConfig
from tpwatch.lab.data import Batch, batches

SEEDS_APART = 100
"""Distance between the seeds of two pipeline stages."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class MarkedRMSNorm(torch.nn.RMSNorm):
    """The RMSNorm of torch with the mark that Megatron's own norms put on their gain.

    Why: Megatron's wrapper around this norm refuses `sequence_parallel`, and its other norms need
    CUDA kernels.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: object) -> None:
        """Build a gain `[hidden_size]`, marked as the configuration says."""
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        mark([self.weight], sequence_parallel=config.sequence_parallel)


class TrainingRun:
    """One model in training, driven the way Megatron's own loop drives it.

    A fault or a test may change these before the first step: `chunks` (model chunks as the
    framework sees them), `optimizer`, `transformer_config` (its `finalize_model_grads_func` is what
    the schedule calls), `extra_losses` (added to the loss of each microbatch), `after_update`
    (called behind the optimizer) and `on_close` (undoes what was changed outside this run).
    """

    def __init__(self, config: LabConfig, chunk: Any) -> None:
        """Wire one DDP-wrapped chunk to its optimizer and to the schedule."""
        self.config = config
        self.chunks: list[Any] = [chunk]
        self.transformer_config = chunk.config
        self.optimizer = get_megatron_optimizer(_optimizer_config(config), self.chunks)
        self.extra_losses: list[Callable[[Batch], torch.Tensor]] = []
        self.after_update: list[Callable[[], object]] = []
        self.on_close = ExitStack()
        self.transformer_config.grad_scale_func = self.optimizer.scale_loss
        self.transformer_config.finalize_model_grads_func = self.finalize
        if config.overlap_grad_reduce:
            self.transformer_config.no_sync_func = chunk.no_sync

    @property
    def model(self) -> Any:
        """The bare GPTModel; the catalogue uses the names of its parameters."""
        return unwrap(self.chunks[0])

    def finalize(self, _chunks: list[Any], *args: Any, **kwargs: Any) -> None:
        """Finalize the gradients of every chunk; the schedule itself knows only the first."""
        finalize_model_grads(self.chunks, *args, **kwargs)

    def step(self, index: int) -> float:
        """Train on the batches of step `index`; the loss, averaged over microbatches.

        Zero the gradients; Megatron's schedule runs forward, backward and finalizer; update.
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self._schedule(index)
        self.optimizer.step()
        for call in self.after_update:
            call()
        return loss

    def evaluate(self, index: int) -> float:
        """The loss on the batches of step `index`, forward only: no gradient, no finalizer, no update."""
        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad():
            loss = self._schedule(index, forward_only=True)
        for chunk in self.chunks:
            chunk.train()
        return loss

    def close(self) -> None:
        """Undo what the run changed outside itself; it is not to be stepped any more."""
        self.on_close.close()

    def _schedule(self, index: int, *, forward_only: bool = False) -> float:
        """Run Megatron's own schedule over the microbatches of step `index`."""
        dp_rank = parallel_state.get_data_parallel_rank()
        losses: list[torch.Tensor] = get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=iter(batches(self.config, index, dp_rank)),
            model=self.chunks[0],
            num_microbatches=self.config.microbatches,
            seq_length=self.config.seq,
            micro_batch_size=self.config.batch,
            forward_only=forward_only,
        )
        # Only the last pipeline stage has computed a loss, and tells the others.
        mean = torch.stack(losses).mean() if losses else torch.zeros(())
        if self.config.pp > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(mean, last, parallel_state.get_pipeline_model_parallel_group())
        return float(mean)

    def _forward_step(self, data: Iterator[Batch], model: Any) -> tuple[Any, Any]:
        """Answer the schedule: the output of one microbatch and what makes it a loss."""
        batch = next(data)
        losses = model(batch.tokens, batch.positions, batch.attention_mask, labels=batch.labels)
        return losses, lambda per_token: self._loss(per_token, batch)

    def _loss(self, per_token: torch.Tensor, batch: Batch) -> tuple[Any, ...]:
        """Reduce losses `[batch, seq]`; with `per_token_loss` Megatron divides, by all tokens."""
        tokens = batch.loss_mask.sum()
        total = (per_token.float() * batch.loss_mask).sum()
        extra = sum((loss(batch) for loss in self.extra_losses), torch.zeros(()))
        mean = (total / tokens).detach()
        if self.config.per_token_loss:
            return total + extra * tokens, tokens.int(), mean
        return total / tokens + extra, mean


def build(config: LabConfig, edit_model: Callable[[Any], None] = lambda _model: None) -> TrainingRun:
    """Initialise Megatron's parallel state for `config` and return a run that is ready to step.

    `torch.distributed` must be initialised with `config.world` ranks. `edit_model` may replace
    modules of the bare GPTModel. Weights and data depend on `config.seed` and the number of pipeline stages, not on the
    rest of the layout.
    """
    _initialize_parallel_state(config)
    transformer_config = _transformer_config(config)
    model = _gpt(config, transformer_config)
    edit_model(model)
    if config.precision != "fp32":
        model = Float16Module(transformer_config, model)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=config.overlap_grad_reduce,
        use_distributed_optimizer=config.distributed_optimizer,
    )
    return TrainingRun(config, DistributedDataParallel(transformer_config, ddp_config, model))


def unwrap(chunk: Any) -> Any:
    """Strip the wrappers for data parallelism and precision from a model chunk."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def mark(parameters: Any, **marks: bool) -> None:
    """Set Megatron's markers (`sequence_parallel`, `average_gradients_across_tp_domain`)."""
    for parameter in parameters:
        for name, value in marks.items():
            setattr(parameter, name, value)


def _initialize_parallel_state(config: LabConfig) -> None:
    """Set up process groups, keeping those of the run before if the layout is the same; seed."""
    if parallel_state.model_parallel_is_initialized():
        tp = parallel_state.get_tensor_model_parallel_world_size()
        pp = parallel_state.get_pipeline_model_parallel_world_size()
        if (tp, pp, dist.get_world_size()) != (config.tp, config.pp, config.world):
            parallel_state.destroy_model_parallel()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(config.tp, config.pp)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    seed = config.seed + SEEDS_APART * stage  # as Megatron does: no two stages begin alike
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _transformer_config(config: LabConfig) -> TransformerConfig:
    """Translate the lab's knobs; everything that needs a fused CUDA kernel is off."""
    return TransformerConfig(
        num_layers=config.layers,
        hidden_size=config.hidden,
        ffn_hidden_size=2 * config.hidden,
        num_attention_heads=config.heads,
        normalization="RMSNorm",
        qk_layernorm=config.qk_layernorm,
        add_bias_linear=config.bias,
        tensor_model_parallel_size=config.tp,
        pipeline_model_parallel_size=config.pp,
        sequence_parallel=config.sequence_parallel,
        calculate_per_token_loss=config.per_token_loss,
        use_cpu_initialization=True,
        params_dtype=DTYPES[config.precision],
        pipeline_dtype=DTYPES[config.precision],
        bf16=config.precision == "bf16",
        fp16=config.precision == "fp16",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def _gpt(config: LabConfig, transformer_config: TransformerConfig) -> GPTModel:
    """The GPTModel of Megatron's local layer spec, with `MarkedRMSNorm` for its norms."""
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer.submodules.input_layernorm = MarkedRMSNorm
    layer.submodules.pre_mlp_layernorm = MarkedRMSNorm
    if config.qk_layernorm:
        layer.submodules.self_attention.submodules.q_layernorm = MarkedRMSNorm
        layer.submodules.self_attention.submodules.k_layernorm = MarkedRMSNorm
    return GPTModel(
        transformer_config,
        TransformerBlockSubmodules([layer] * (config.layers // config.pp), layer_norm=MarkedRMSNorm),
        vocab_size=config.vocab,
        max_sequence_length=config.seq,
        position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


def _optimizer_config(config: LabConfig) -> OptimizerConfig:
    """Adam as Megatron sets it up; fp16 starts from a loss scale this model does not overflow."""
    return OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        weight_decay=0.0,
        clip_grad=config.clip_grad,
        use_distributed_optimizer=config.distributed_optimizer,
        params_dtype=DTYPES[config.precision],
        bf16=config.precision == "bf16",
        fp16=config.precision == "fp16",
        initial_loss_scale=2.0**12,
    )
