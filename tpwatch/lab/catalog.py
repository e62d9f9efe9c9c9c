"""The catalogue: which faults the lab can build, what each one is, and what a monitor has to say about it.

Knows: names, stories, expected findings. Must not know: torch, Megatron, how a fault is built (`tpwatch.lab.faults`).
Parameter names are those of ``named_parameters()`` of the bare model chunk, without ``module.`` prefixes.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from tpwatch.errors import ConfigError
from tpwatch.lab.config import LabConfig

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Faulty:
    """Faulty parameters that share a pattern and a first step."""

    pattern: str
    """Shell pattern of parameter names."""

    first_step: int = 1
    """First step (from 1) at which the gradient is not exactly zero everywhere."""

    zero_on_all_but_last: bool = False
    """The gradient is exactly zero on every tensor-parallel rank but the last, step after step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One entry of the catalogue: a fault, a healthy control or a variant of the finalizer's protocol."""

    name: str
    """Name on the command line."""

    story: str
    """One line for people."""

    report: str = ""
    """Field report the mechanism is taken from."""

    kind: str | None = None
    """Kind of finding that is expected as cause; None where the run is healthy."""

    faulty: tuple[Faulty, ...] = ()
    """Exactly the parameters that are at fault."""

    multiplied_by_tp: bool = False
    """The norm of the gradient grows by the tensor-parallel size in the reduction."""

    mechanism: str = "mechanism:Mechanism"
    """``module:class`` below `tpwatch.lab.faults` that builds it."""

    fix: str = ""
    """What the upstream fix does; empty where there is nothing to fix."""

    config: LabConfig = field(default_factory=LabConfig)
    """The run it needs."""

    wedges: bool = False
    """Unwatched, the framework's own collective hangs or is mis-paired: the processes cannot be used again."""

    transformer_engine: bool = False
    """Needs Transformer Engine's Python package (extra ``lab-te``)."""

    def first_steps(self, names: Iterable[str]) -> dict[str, int]:
        """Return the faulty ones of ``names``, each with the first step at which it is exercised."""
        return {name: entry.first_step for name, entry in self._matches(names)}

    def zero_ranked(self, names: Iterable[str]) -> set[str]:
        """Return the faulty ones of ``names`` whose gradient is exactly zero on all ranks but the last."""
        return {name for name, entry in self._matches(names) if entry.zero_on_all_but_last}

    def ratio(self, tp: int) -> float | None:
        """Return the expected norm(post) / norm(pre) at tensor-parallel size ``tp``, where one is expected."""
        return float(tp) if self.multiplied_by_tp else None

    def _matches(self, names: Iterable[str]) -> list[tuple[str, Faulty]]:
        """Pair each faulty name with the first entry whose pattern it matches."""
        pairs = ((name, next((e for e in self.faulty if fnmatchcase(name, e.pattern)), None)) for name in names)
        return [(name, entry) for name, entry in pairs if entry is not None]


def get(name: str) -> Fault:
    """Return the entry called ``name``; an unknown name is an error that suggests the nearest one."""
    known = {entry.name: entry for entry in ENTRIES}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        remedy = f"Did you mean {near[0]!r}?" if near else f"Known names: {', '.join(known)}."
        raise ConfigError("fault", name, "is not in the catalogue", remedy)
    return known[name]


_ATTENTION = "decoder.layers.0.self_attention"
_ADAPTER = "decoder.layers.0.mlp.adapter"
_PLE = "decoder.layers.0.per_layer_embedding"

FAULTS: tuple[Fault, ...] = (
    Fault(
        name="slime-gdn-drift",
        story="linear attention replicated on every rank, kernels that round differently, nothing averages",
        report="P0",
        kind="drift",
        faulty=(Faulty(f"{_ATTENTION}.*"),),
        mechanism="linear_attention:ReplicatedBlock",
        fix="average_gradients_across_tp_domain = True on every parameter of the block",
        config=LabConfig(precision="bf16", lr=1e-5),
    ),
    Fault(
        name="gdn-gamma-double-sum",
        story="sequence gathered outside, module's sequence parallelism off, the norm gain keeps its mark",
        report="P1",
        kind="double-reduce",
        faulty=(Faulty(f"{_ATTENTION}.linear_attn.in_proj.layer_norm_weight"),),
        multiplied_by_tp=True,
        mechanism="linear_attention:GatheredOutside",
        fix="sequence_parallel = False on the gain, average_gradients_across_tp_domain = True",
    ),
    Fault(
        name="gdn-gamma-double-sum-te",
        story="the same inside Transformer Engine's own LayerNormLinear",
        report="P1",
        kind="double-reduce",
        faulty=(Faulty(f"{_ATTENTION}.linear_attn.in_proj.layer_norm_weight"),),
        multiplied_by_tp=True,
        mechanism="linear_attention:GatheredOutsideTransformerEngine",
        fix="sequence_parallel = False on the gain, average_gradients_across_tp_domain = True",
        transformer_engine=True,
    ),
    Fault(
        name="custom-module-unsynced",
        story="custom module left replicated: other initial weights on every rank, gradients never reduced",
        report="P2",
        kind="init-mismatch",
        faulty=(Faulty(f"{_ADAPTER}.*"),),
        mechanism="custom_module:UnsyncedAdapter",
        fix="broadcast at start, average_gradients_across_tp_domain = True",
    ),
    Fault(
        name="custom-module-unsynced-nosp",
        story="the same without sequence parallelism: every norm of the model is drawn into it",
        report="P2",
        kind="init-mismatch",
        faulty=(Faulty(f"{_ADAPTER}.*"),),
        mechanism="custom_module:UnsyncedAdapter",
        fix="broadcast at start, average_gradients_across_tp_domain = True",
        config=LabConfig(sequence_parallel=False),
    ),
    Fault(
        name="one-sided-gradient",
        story="a norm gain frozen on the last rank only, after wrapping",
        report="P2",
        kind="grad-presence",
        faulty=(Faulty("decoder.layers.1.pre_mlp_layernorm.weight"),),
        mechanism="one_sided:FrozenOnLastRank",
        fix="freeze on every rank",
        wedges=True,
    ),
    Fault(
        name="one-sided-chunk",
        story="a vision chunk outside DDP: the last rank's slice of the patches is empty, its gradients are None",
        report="P2",
        kind="grad-presence",
        faulty=(Faulty("vision_norm.weight"), Faulty("vision_proj.weight")),
        mechanism="one_sided:ChunkOutsideDdp",
        fix="ranks without a patch take part with an empty slice",
        wedges=True,
    ),
    Fault(
        name="ple-double-sum",
        story="per-layer embedding marked sequence_parallel, although it computes on the gathered sequence",
        report="P3",
        kind="double-reduce",
        faulty=(
            # The zero-initialised convolution passes no gradient back to its norm in the first step.
            Faulty(f"{_PLE}.norm_conv.weight", first_step=2),
            Faulty(f"{_PLE}.key_proj.weight"),
            Faulty(f"{_PLE}.value_proj.weight"),
            Faulty(f"{_PLE}.norm_key.weight"),
            Faulty(f"{_PLE}.norm_query.weight"),
            Faulty(f"{_PLE}.conv1d.weight"),
        ),
        multiplied_by_tp=True,
        mechanism="per_layer_embedding:MarkedButGathered",
        fix="sequence_parallel = False, average_gradients_across_tp_domain = True",
    ),
    Fault(
        name="lora-unsummed",
        story="LoRA under sequence parallelism: the replicated factor sees its own slice and is never summed",
        report="P4",
        kind="missing-reduce",
        faulty=(
            # In the last layer nothing carries gradient from the answer back to the prompt's positions behind the
            # attention. B = 0 hides the gradient of A in the first step.
            Faulty("decoder.layers.1.self_attention.linear_proj.lora_B.weight", zero_on_all_but_last=True),
            Faulty("decoder.layers.1.mlp.linear_fc2.lora_B.weight", zero_on_all_but_last=True),
            Faulty("decoder.layers.1.mlp.linear_fc1.lora_A.weight", 2, zero_on_all_but_last=True),
            Faulty("decoder.layers.?.self_attention.linear_qkv.lora_A.weight", 2),
            Faulty("decoder.layers.0.mlp.linear_fc1.lora_A.weight", 2),
            Faulty("decoder.layers.0.self_attention.linear_proj.lora_B.weight"),
            Faulty("decoder.layers.0.mlp.linear_fc2.lora_B.weight"),
        ),
        mechanism="lora:UnsummedFactors",
        fix="sequence_parallel = True on the replicated factor",
        config=LabConfig(prompt_fraction=0.75),
    ),
)

CONTROLS: tuple[Fault, ...] = (
    Fault(name="dense-sp", story="plain model, sequence parallelism on"),
    Fault(
        name="dense-nosp",
        story="plain model with biases, sequence parallelism off",
        config=LabConfig(sequence_parallel=False, bias=True),
    ),
    Fault(
        name="qk-layernorm",
        story="norms on queries and keys, summed by name, without sequence parallelism",
        config=LabConfig(sequence_parallel=False, qk_layernorm=True),
    ),
    Fault(
        name="distributed-optimizer",
        story="optimizer sharded over two data-parallel ranks, gradients by reduce-scatter",
        config=LabConfig(dp=2, distributed_optimizer=True, overlap_grad_reduce=True),
    ),
    Fault(name="dp2tp2", story="two data-parallel by two tensor-parallel ranks", config=LabConfig(dp=2)),
)

PROTOCOLS: tuple[Fault, ...] = (
    Fault(
        name="finalizer-skipped",
        story="the training loop reduces over data-parallel ranks by itself and never calls the finalizer",
        report="E",
        kind="finalize-skipped",
        mechanism="protocol:Skipped",
        fix="call finalize_model_grads",
    ),
    Fault(
        name="finalizer-twice",
        story="the training loop calls the finalizer again behind the schedule",
        kind="double-reduce",
        faulty=(Faulty("decoder.*layernorm.weight"),),
        mechanism="protocol:Twice",
        fix="call it once",
    ),
    Fault(
        name="finalizer-chunked",
        story="the finalizer's TP reduction is replaced late by one that reduces in several buckets",
        mechanism="protocol:Chunked",
    ),
)

ENTRIES: tuple[Fault, ...] = (*FAULTS, *CONTROLS, *PROTOCOLS)
"""Everything the lab can run, in the order the demo shows it."""
