"""Public reports of wrong replicas, retold as what each rank held at each step, and what has to be found.

Shapes are small, orders of magnitude are those of the reports. A story is a function from the step
to one picture per parameter, in model order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tests.unit._builders import (
    GRADIENT,
    VALUE,
    ZERO,
    Picture,
    Vector,
    apart,
    averaged,
    copies,
    in_camps,
    kept,
    partials,
    silent,
    spec,
    summed,
)
from tpwatch.records import ReplicaSpec

Story = Callable[[int], Mapping[str, Picture]]


@dataclass(frozen=True)
class Expected:
    """What has to be said of one parameter."""

    kind: str
    first_step: int
    severity: str = "error"
    role: str = "cause"
    caused_by: str | None = None
    odd_ranks: tuple[int, ...] = ()
    facts: Mapping[str, object] = field(default_factory=dict)
    """Entries of the evidence."""


@dataclass(frozen=True)
class Report:
    """One report: the group, the story, the steps it takes, and what has to be found, by parameter."""

    size: int
    steps: int
    story: Story
    expected: Mapping[str, Expected]
    loss_scaler: bool = False
    not_exercised: tuple[str, ...] = ()


def moved(by: float, size: int = 2) -> list[Vector]:
    """Values that are this far apart from rank to rank."""
    return apart(size, by=by, vector=VALUE)


# -------------------------------------------------------------------------- kernels that are not bitwise

# Largest difference of values by step, as reported for slime; between the reported steps interpolated.
SLIME = {1: 0.0, 2: 3.1e-5, 3: 6.0e-5, 4: 9.0e-5, 5: 1.2e-4, 6: 1.25e-4, 7: 1.3e-4}


def slime(step: int) -> Mapping[str, Picture]:
    """Linear attention replicated on every rank: gradients equal to rounding, nothing averages them."""
    noise = apart(by=1e-6)
    return {
        "linear_attn.in_proj": kept(noise, values=moved(SLIME[step])),
        "input_layernorm": kept(noise, values=moved(SLIME[step] / 2)),
        "final_layernorm": summed(partials()),
    }


def slime_fixed(_step: int) -> Mapping[str, Picture]:
    """The same with `average_gradients_across_tp_domain`."""
    return {name: averaged(apart(by=1e-6)) for name in ("linear_attn.in_proj", "input_layernorm")}


# ------------------------------------------------------------------------------ complete gradients summed


def gathered_outside(_step: int) -> Mapping[str, Picture]:
    """The bridge gathers the sequence itself, the mark stays: the gain's gradient is complete and summed once more."""
    return {"in_proj.layer_norm_weight": summed(copies(4)), "input_layernorm": summed(partials(4))}


def silent_convolution(step: int) -> Mapping[str, Picture]:
    """The convolution is zero at initialisation and hides its gradient until the third step."""
    return {"ple.norm_key": summed(copies(8)), "ple.conv1d": silent(8) if step < 3 else summed(copies(8))}


# ---------------------------------------------------------------------------------- custom modules, LoRA


def unsynced(step: int) -> Mapping[str, Picture]:
    """A custom module initialised differently on each rank, its gradient unreduced; the layer behind it follows."""
    return {
        "custom.weight": kept(partials(), values=moved(0.5)),
        "behind.weight": kept(apart(by=0.5), values=moved(1e-3 * (step - 1))),
    }


def one_sided(_step: int) -> Mapping[str, Picture]:
    """One rank of four froze the router after wrapping."""
    return {"router.weight": kept([GRADIENT, GRADIENT, GRADIENT, None]), "norm": summed(partials(4))}


def lora(step: int) -> Mapping[str, Picture]:
    """Each rank has the gradient of its own sequence shard; masked prompts leave all but the last rank at zero.

    The last layer's factor A has no gradient before factor B has moved.
    """
    own = [ZERO, ZERO, ZERO, (0.0077, 0.0, 0.003, -0.001)]
    values = moved(1e-4 * (step - 1), 4)
    return {
        "lora_B": kept(own, values=values),
        "lora_A": silent(4) if step == 1 else kept(partials(4), values=moved(1e-4 * (step - 2), 4)),
    }


# ------------------------------------------------------------------------------------- wrong group, NaN


def key_value_groups(_step: int) -> Mapping[str, Picture]:
    """Groups of key-value heads, created in another order, take the place of the TP group."""
    return {"k_layernorm": in_camps(partials(4), [[0, 1], [2, 3]]), "norm": summed(partials(4))}


def uninitialised(step: int) -> Mapping[str, Picture]:
    """Rows that nobody initialised give NaN from step 2 on, and the update spreads it into the values."""
    nan: Vector = (math.nan, *GRADIENT[1:])
    bad = [(math.nan, *VALUE[1:])] * 2
    return {"embedding.norm": kept(copies()) if step < 2 else kept([nan, nan], values=bad if step > 2 else ())}


def scaler_finds_its_scale(step: int) -> Mapping[str, Picture]:
    """Four overflows before the first update of an fp16 run; every seventh step after that."""
    infinite = kept([(math.inf, *GRADIENT[1:])] * 2)
    return {"norm": infinite if step < 5 or step % 7 == 0 else summed(partials())}


def scaler_hides_a_double_sum(step: int) -> Mapping[str, Picture]:
    """The same run with a gain that is summed twice."""
    infinite = kept([(math.inf, *GRADIENT[1:])] * 2)
    return {"norm": infinite if step < 5 or step == 7 else summed(copies())}


# ---------------------------------------------------------------------------------------- restarts, marks


def out_of_sync(step: int) -> Mapping[str, Picture]:
    """At step 6 rank 0 alone goes on from another checkpoint; its other activations change all gradients behind it."""
    if step < 6:
        return {"norm": kept(copies(4)), "behind": kept(copies(4))}
    other = [(9.0, 9.0, 9.0, 9.0), VALUE, VALUE, VALUE]
    odd = [(1.5, 0.5, 1.0, -0.75), GRADIENT, GRADIENT, GRADIENT]
    return {"norm": kept(odd, values=other), "behind": kept(odd, values=moved(1e-3 * (step - 6), 4))}


def mark_lost(step: int) -> Mapping[str, Picture]:
    """A reload at step 8 drops the mark of one norm: its sum is not taken any more."""
    after = kept(partials(), values=moved(1e-3 * max(0, step - 8)))
    return {"q_layernorm": summed(partials()) if step < 8 else after, "k_layernorm": summed(partials())}


REPORTS = {
    "slime: linear attention drifts": Report(
        size=2,
        steps=6,
        story=slime,
        expected={
            "linear_attn.in_proj": Expected("drift", 1, "warning"),
            "input_layernorm": Expected("drift", 1, "warning"),
        },
    ),
    "slime, fixed": Report(size=2, steps=30, story=slime_fixed, expected={}),
    "mcore-bridge: gain of in_proj summed twice": Report(
        size=4, steps=3, story=gathered_outside, expected={"in_proj.layer_norm_weight": Expected("double-reduce", 1)}
    ),
    "mcore-bridge PLE: the convolution wakes up late": Report(
        size=8,
        steps=5,
        story=silent_convolution,
        expected={"ple.norm_key": Expected("double-reduce", 1), "ple.conv1d": Expected("double-reduce", 3)},
    ),
    "mcore-bridge PLE, before the convolution wakes up": Report(
        size=8,
        steps=2,
        story=silent_convolution,
        expected={},
        not_exercised=("ple.conv1d",),
    ),
    "NeMo AutoModel: unsynced custom module": Report(
        size=2,
        steps=6,
        story=unsynced,
        expected={
            "custom.weight": Expected(
                "init-mismatch", 0, facts={"gradient": {"before": "partials", "reduction": "none"}}
            ),
            "behind.weight": Expected("missing-reduce", 1, role="consequence", caused_by="custom.weight"),
        },
    ),
    "frozen on one rank": Report(
        size=4,
        steps=1,
        story=one_sided,
        expected={"router.weight": Expected("grad-presence", 1, odd_ranks=(3,), facts={"absent_ranks": [3]})},
    ),
    "mcore-bridge LoRA: factors never summed": Report(
        size=4,
        steps=6,
        story=lora,
        expected={
            "lora_B": Expected("missing-reduce", 1, odd_ranks=(3,), facts={"zero_ranks": [0, 1, 2]}),
            "lora_A": Expected("missing-reduce", 2),
        },
    ),
    "groups of key-value heads": Report(
        size=4,
        steps=4,
        story=key_value_groups,
        expected={"k_layernorm": Expected("wrong-group", 1, facts={"camps_grad_post": [[0, 1], [2, 3]]})},
    ),
    "transformers: uninitialised rows": Report(
        size=2, steps=4, story=uninitialised, expected={"embedding.norm": Expected("nonfinite", 2)}
    ),
    "fp16: the scaler finds its scale": Report(
        size=2, steps=30, story=scaler_finds_its_scale, expected={}, loss_scaler=True
    ),
    "fp16: a double sum between overflows": Report(
        size=2,
        steps=8,
        story=scaler_hides_a_double_sum,
        expected={"norm": Expected("double-reduce", 5)},
        loss_scaler=True,
    ),
    "bigscience: rank 0 out of sync after a restart": Report(
        size=4,
        steps=9,
        story=out_of_sync,
        expected={
            "norm": Expected("external-write", 5, "warning", odd_ranks=(0,)),
            "behind": Expected("missing-reduce", 6, role="consequence", caused_by="norm", odd_ranks=(0,)),
        },
    ),
    "a mark lost in mid-run": Report(
        size=2, steps=11, story=mark_lost, expected={"q_layernorm": Expected("missing-reduce", 8)}
    ),
}


def specs(report: Report) -> list[ReplicaSpec]:
    """The parameters of a report, in model order."""
    return [spec(name) for name in report.story(1)]
