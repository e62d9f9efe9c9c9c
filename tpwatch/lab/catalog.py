"""The catalogue: what the lab can build, and what a monitor has to say about each of it.

Knows: names, stories, expected findings. Must not know: torch, Megatron, how a fault is built
(`tpwatch.lab.faults`). Parameter names are those of `named_parameters()` of the bare model chunk,
without `module.` prefixes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from tpwatch.errors import ConfigError
from tpwatch.lab.config import LabConfig


@dataclass(frozen=True, slots=True)
class Faulty:
    """Faulty parameters that share a pattern and a first step."""

    pattern: str
    """Shell pattern of parameter names."""

    first_step: int = 1
    """First step (from 1) in which the gradient is not exactly zero on all ranks."""

    zero_on_all_but_last: bool = False
    """The gradient is exactly zero on every tensor-parallel rank but the last, in every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One entry: a fault, a healthy control, or a variant of how the finalizer is called."""

    name: str
    """Name on the command line."""

    story: str
    """One line for people."""

    report: str = ""
    """Field report that the mechanism is taken from."""

    kind: str | None = None
    """Kind of finding that is expected as a cause; None where the run is healthy."""

    faulty: tuple[Faulty, ...] = ()
    """Exactly the parameters at fault; of two patterns that match, the first one counts."""

    multiplied_by_tp: bool = False
    """The reduction makes the gradient larger by the tensor-parallel size."""

    mechanism: str = "mechanism:Mechanism"
    """`module:class` below `tpwatch.lab.faults` that builds it."""

    fix: str = ""
    """What the upstream fix does; empty where there is nothing to fix."""

    config: LabConfig = field(default_factory=LabConfig)
    """The run that shows it."""

    wedges: bool = False
    """Unwatched, a collective of the framework hangs or mispairs: the processes are lost."""

    transformer_engine: bool = False
    """Needs Transformer Engine's Python package (extra `lab-te`)."""

    def first_steps(self, names: Iterable[str]) -> dict[str, int]:
        """The faulty ones of `names`, each with the first step in which it is exercised."""
        return {name: entry.first_step for name, entry in self._matches(names)}

    def zero_ranked(self, names: Iterable[str]) -> set[str]:
        """The faulty ones of `names` whose gradient is exactly zero on all ranks but the last."""
        return {name for name, entry in self._matches(names) if entry.zero_on_all_but_last}

    def ratio(self, tp: int) -> float | None:
        """Expected norm(post) / norm(pre) at tensor-parallel size `tp`, where one is expected."""
        return float(tp) if self.multiplied_by_tp else None

    def at(self, tp: int, dp: int | None = None, seed: int | None = None, *, pp: int = 1) -> LabConfig:
        """The run of this entry at another layout and seed; None leaves what the entry says.

        Each of `pp` pipeline stages is as deep as the whole model of the entry, so that a fault finds its layers in it.

        Raises:
            ConfigError: a size of the model does not divide by `tp`.
        """
        own = self.config
        return replace(
            own,
            tp=tp,
            dp=own.dp if dp is None else dp,
            pp=pp,
            layers=own.layers * pp,
            seed=own.seed if seed is None else seed,
            sequence_parallel=own.sequence_parallel and tp > 1,
        )

    def _matches(self, names: Iterable[str]) -> Iterator[tuple[str, Faulty]]:
        for name in names:
            for entry in self.faulty:
                if fnmatchcase(name, entry.pattern):
                    yield name, entry
                    break


def get(name: str) -> Fault:
    """The entry called `name`.

    Raises:
        ConfigError: there is none; the message suggests the nearest name.
    """
    known = {entry.name: entry for entry in ENTRIES}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    remedy = f"Did you mean {near[0]!r}?" if near else f"Known names: {', '.join(known)}."
    knob, rule = "fault", "is not in the catalogue"
    raise ConfigError(knob, name, rule, remedy)


_ATTENTION = "decoder.layers.0.self_attention"
_GAMMA = f"{_ATTENTION}.linear_attn.in_proj.layer_norm_weight"
_MLP = "decoder.layers.0.mlp"
_ADAPTER = f"{_MLP}.adapter"
_PLE = "decoder.layers.0.per_layer_embedding"
_LAST = "decoder.layers.1"
_AVERAGE = "average_gradients_across_tp_domain = True"

FAULTS: tuple[Fault, ...] = (
    Fault(
        name="slime-gdn-drift",
        story="linear attention replicated on every rank, kernels round differently, no averaging",
        report="P0",
        kind="drift",
        faulty=(Faulty(f"{_ATTENTION}.*"),),
        mechanism="linear_attention:ReplicatedBlock",
        fix=f"{_AVERAGE} on every parameter of the block",
        config=LabConfig(precision="bf16", lr=1e-5),
    ),
    Fault(
        name="gdn-gamma-double-sum",
        story="sequence gathered outside, sequence parallelism off, the norm gain keeps its mark",
        report="P1",
        kind="double-reduce",
        faulty=(Faulty(_GAMMA),),
        multiplied_by_tp=True,
        mechanism="linear_attention:GatheredOutside",
        fix=f"sequence_parallel = False on the gain, {_AVERAGE}",
    ),
    Fault(
        name="gdn-gamma-double-sum-te",
        story="the same inside Transformer Engine's own LayerNormLinear",
        report="P1",
        kind="double-reduce",
        faulty=(Faulty(_GAMMA),),
        multiplied_by_tp=True,
        mechanism="linear_attention:GatheredOutsideTransformerEngine",
        fix=f"sequence_parallel = False on the gain, {_AVERAGE}",
        transformer_engine=True,
    ),
    Fault(
        name="custom-module-unsynced",
        story="custom module: other initial weights on every rank, gradients never reduced",
        report="P2",
        kind="init-mismatch",
        faulty=(Faulty(f"{_ADAPTER}.*"),),
        mechanism="custom_module:UnsyncedAdapter",
        fix=f"broadcast at start, {_AVERAGE}",
    ),
    Fault(
        name="custom-module-unsynced-nosp",
        story="the same without sequence parallelism: the norms behind it are drawn in",
        report="P2",
        kind="init-mismatch",
        faulty=(Faulty(f"{_ADAPTER}.*"),),
        mechanism="custom_module:UnsyncedAdapter",
        fix=f"broadcast at start, {_AVERAGE}",
        config=LabConfig(sequence_parallel=False),
    ),
    Fault(
        name="one-sided-gradient",
        story="a norm gain frozen on the last rank only, after wrapping",
        report="P2",
        kind="grad-presence",
        faulty=(Faulty(f"{_LAST}.pre_mlp_layernorm.weight"),),
        mechanism="one_sided:FrozenOnLastRank",
        fix="freeze on every rank",
        wedges=True,
    ),
    Fault(
        name="one-sided-chunk",
        story="a vision chunk outside DDP: the last rank has no patches and no gradients",
        report="P2",
        kind="grad-presence",
        faulty=(Faulty("vision_norm.weight"), Faulty("vision_proj.weight")),
        mechanism="one_sided:ChunkOutsideDdp",
        fix="a rank without patches takes part with none",
        wedges=True,
    ),
    Fault(
        name="ple-double-sum",
        story="per-layer embedding marked sequence_parallel, computed on the gathered sequence",
        report="P3",
        kind="double-reduce",
        faulty=(
            # The convolution starts at zero and passes nothing back to its norm in the first step.
            Faulty(f"{_PLE}.norm_conv.weight", first_step=2),
            Faulty(f"{_PLE}.key_proj.weight"),
            Faulty(f"{_PLE}.value_proj.weight"),
            Faulty(f"{_PLE}.norm_key.weight"),
            Faulty(f"{_PLE}.norm_query.weight"),
            Faulty(f"{_PLE}.conv1d.weight"),
        ),
        multiplied_by_tp=True,
        mechanism="per_layer_embedding:MarkedButGathered",
        fix=f"sequence_parallel = False, {_AVERAGE}",
    ),
    Fault(
        name="lora-unsummed",
        story="LoRA: the replicated factor sees its slice of the sequence and is never summed",
        report="P4",
        kind="missing-reduce",
        faulty=(
            # Behind the last attention nothing leads from the answer back to the prompt, which
            # fills the slices of all ranks but the last. B = 0 hides the gradient of A at first.
            Faulty(f"{_LAST}.self_attention.linear_proj.lora_B.weight", zero_on_all_but_last=True),
            Faulty(f"{_LAST}.mlp.linear_fc2.lora_B.weight", zero_on_all_but_last=True),
            Faulty(f"{_LAST}.mlp.linear_fc1.lora_A.weight", 2, zero_on_all_but_last=True),
            Faulty(f"{_LAST}.self_attention.linear_qkv.lora_A.weight", 2),
            Faulty(f"{_ATTENTION}.linear_proj.lora_B.weight"),
            Faulty(f"{_ATTENTION}.linear_qkv.lora_A.weight", 2),
            Faulty(f"{_MLP}.linear_fc2.lora_B.weight"),
            Faulty(f"{_MLP}.linear_fc1.lora_A.weight", 2),
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
    Fault(
        name="dp2tp2",
        story="two data-parallel by two tensor-parallel ranks",
        config=LabConfig(dp=2),
    ),
)

PROTOCOLS: tuple[Fault, ...] = (
    Fault(
        name="finalizer-skipped",
        story="the loop reduces over data-parallel ranks by itself and never calls the finalizer",
        report="B01",
        kind="finalize-skipped",
        mechanism="protocol:Skipped",
        fix="call finalize_model_grads",
    ),
    Fault(
        name="finalizer-twice",
        story="the loop calls the finalizer again behind the schedule",
        kind="double-reduce",
        faulty=(Faulty("decoder.*layernorm.weight"),),
        multiplied_by_tp=True,
        mechanism="protocol:Twice",
        fix="call it once",
    ),
    Fault(
        name="finalizer-chunked",
        story="the reduction over TP is replaced late by one that works in buckets",
        mechanism="protocol:Chunked",
    ),
)

ENTRIES: tuple[Fault, ...] = (*FAULTS, *CONTROLS, *PROTOCOLS)
"""Everything the lab can run, in the order the demo shows it."""
