"""The rules as documented data.

`tpwatch rules`, `tpwatch explain`, docs/rules.md and runbook links render from here.

Each rule's decision is one pure function of the same kind in `judges`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tpwatch.records import Severity


@dataclass(frozen=True, slots=True)
class RuleDoc:
    """One rule in fixed sections; `code` and `kind` are stable names that other tools match on."""

    code: str
    kind: str
    severity: Severity
    """Highest severity the rule gives."""
    title: str
    signal: str
    why: str
    causes: str
    cannot_tell: str
    example: str
    next_step: str
    """Also the `advice` of a finding."""


RULES: tuple[RuleDoc, ...] = (
    RuleDoc(
        code="TPW101",
        kind="init-mismatch",
        severity="error",
        title="Copies differ before the first watched update",
        signal=(
            "The values of a replicated parameter are not bit-identical at the first check (hash of the raw bytes)."
        ),
        why=(
            "The ranks train different models; a gradient reduction cannot remove an offset that"
            " was there at the start."
        ),
        causes=(
            "A custom module initialised outside the framework's RNG tracker; a rank-dependent"
            " seed; a checkpoint that was saved from copies that had already drifted; a shard that"
            " carries no mark and looks like a replica."
        ),
        cannot_tell=(
            "Whether the tensor is meant to be replicated. If it is a shard, declare it:"
            " `watch.declare: {NAME: sharded}`."
        ),
        example=(
            "NeMo AutoModel: custom modules left replicated under DTensor were initialised differently on each rank."
        ),
        next_step=(
            "Broadcast the parameter from rank 0 of the TP group after initialisation, and check its gradient rule too."
        ),
    ),
    RuleDoc(
        code="TPW102",
        kind="drift",
        severity="error",
        title="Copies that nothing keeps equal move apart",
        signal=(
            "Gradients are equal up to rounding on all ranks, nothing averages them, and they are not bit-identical."
        ),
        why=(
            "Rounding differences add up: the copies become different parameters, and the checkpoint keeps one of them."
        ),
        causes=("A block replicated on every TP rank whose kernels are not bitwise deterministic, with no averaging."),
        cannot_tell=(
            "Whether a constant rounding-level spread will ever matter; that is information, growth"
            " is a warning, a jump an error."
        ),
        example=(
            "slime, Qwen3.5 linear attention: 74 of 120 parameters differ at step 2, max abs 3.1e-5, growing to 2.4e-4."
        ),
        next_step=(
            "Average the gradient over the TP group: set `average_gradients_across_tp_domain = True` on the parameter."
        ),
    ),
    RuleDoc(
        code="TPW103",
        kind="missing-reduce",
        severity="error",
        title="Partial gradients are never summed",
        signal=(
            "Gradients differ between ranks by far more than rounding, and after the reduction each"
            " rank still has its own."
        ),
        why=(
            "Every rank updates its copy with a part of the gradient; the copies diverge by about"
            " one learning rate a step."
        ),
        causes=(
            "A norm, router, bias or LoRA factor used on a sequence shard without the"
            " `sequence_parallel` mark; a mark lost by re-wrapping, deepcopy or"
            " load_state_dict(assign=True); a finalizer that is never called."
        ),
        cannot_tell=("Whether the sum or the mean was intended: that depends on how the loss is scaled."),
        example=(
            "LoRA under sequence parallelism: the replicated factor gets only its own shard's"
            " gradient, exactly zero on some ranks."
        ),
        next_step=(
            "Have the gradient summed over the TP group: mark the parameter `sequence_parallel`, or reduce it yourself."
        ),
    ),
    RuleDoc(
        code="TPW104",
        kind="double-reduce",
        severity="error",
        title="A complete gradient is summed again",
        signal=(
            "Gradients are bit-identical (or equal to rounding) before the reduction and N times"
            " larger after it, N the group size."
        ),
        why=(
            "The gradient is exactly N times too large while all copies agree: no comparison of"
            " copies can see it, and the global gradient norm and with it the clipping of every"
            " parameter is wrong."
        ),
        causes=(
            "A module that gathers the full sequence itself while its parameter keeps the"
            " `sequence_parallel` mark; a backward that already all-reduces."
        ),
        cannot_tell=(
            "A hand-scaled 1/N copy that is summed on purpose looks the same: declare it with"
            " `watch.declare: {NAME: sum}`."
        ),
        example=(
            "Transformer Engine RMSNorm gain of a GatedDeltaNet in-projection with module sequence"
            " parallelism off: x2 at TP2, x4 at TP4."
        ),
        next_step=(
            "Remove the `sequence_parallel` mark from this parameter (or average instead): its"
            " gradient is already complete."
        ),
    ),
    RuleDoc(
        code="TPW105",
        kind="averaged-partial",
        severity="error",
        title="Partial gradients are averaged instead of summed",
        signal=(
            "Gradients differ between ranks, and after the reduction every rank has their mean,"
            " which no marker asked for."
        ),
        why="The gradient is N times too small; with Adam the step size hides it.",
        causes=(
            "ReduceOp.AVG, or a division by the group size, on a parameter whose ranks each hold a part of the sum."
        ),
        cannot_tell=(
            "Whether the loss was already scaled by N, which makes the mean right: declare it with"
            " `watch.declare: {NAME: avg}`."
        ),
        example=(
            "A hook written for redundant compute (mean) applied to a norm that sees one sequence shard per rank."
        ),
        next_step="Sum this gradient over the TP group instead of averaging it.",
    ),
    RuleDoc(
        code="TPW106",
        kind="wrong-group",
        severity="error",
        title="The reduction ran over another group",
        signal=("After the reduction the ranks fall into camps that agree inside and differ between each other."),
        why="Each camp trains its own copy.",
        causes=("A sub-group (expert-TP, KV-head replicas, a stale process group) passed where the TP group belongs."),
        cannot_tell=(
            "Which of the two groups was meant: the camps are in the evidence, compare them with your groups."
        ),
        example="KV-head replica groups created in another order on some ranks.",
        next_step=(
            "Reduce this gradient over the whole TP group; the camps in the evidence name the group that was used."
        ),
    ),
    RuleDoc(
        code="TPW107",
        kind="external-write",
        severity="warning",
        title="Values changed on some ranks only, though gradients agree",
        signal=(
            "Copies stop being bit-identical after an update whose reduced gradients were bit-identical on every rank."
        ),
        why=("Something other than the gradient wrote the parameter, or the optimizer states differ."),
        causes=(
            "A checkpoint or weight sync loaded on some ranks, a hand-written update, different"
            " optimizer state, learning rate or weight decay per rank."
        ),
        cannot_tell=(
            "A write from an optimizer that treats the ranks differently; steps that were not"
            " checked hide a gradient fault."
        ),
        example="bigscience: rank 0 alone was out of sync after a restart, ranks 1-3 agreed.",
        next_step=("Look at what ran between the two named steps: checkpoint load, weight sync, optimizer state."),
    ),
    RuleDoc(
        code="TPW108",
        kind="wrong-scale",
        severity="error",
        title="The reduction scales a complete gradient past your threshold",
        signal=("Gradients are copies before the reduction, and norm(post) / norm(pre) exceeds `thresholds.ratio`."),
        why="A factor other than 1 and N fits no reduction; you said how much of it you accept.",
        causes=("A hand-written scaling of the gradient, two reductions over groups of different size."),
        cannot_tell=(
            "Which factor is right. Without the threshold such a parameter is listed as unverified, not as a fault."
        ),
        example=("A hook that sums over every listed group, harmless while one of them has size 1 (makani #103)."),
        next_step=(
            "Find what multiplies this gradient between backward and the optimizer; declare the rule if it is intended."
        ),
    ),
    RuleDoc(
        code="TPW109",
        kind="optimizer-mismatch",
        severity="error",
        title="Optimizer state differs between copies",
        signal=(
            "Where a checkpoint is saved or loaded (knob `checkpoint`): values agree bit for bit, and the fp32 master"
            " or a moment of the same parameter does not."
        ),
        why="The next update moves the copies apart, and the checkpoint keeps the state of one of them.",
        causes=(
            "Optimizer state loaded on some ranks only, or from different files; a step that ran on some ranks only;"
            " gradients that differed while weights were frozen."
        ),
        cannot_tell="Which copy is right, and when they parted: state is compared at checkpoints, not at every step.",
        example="A resume in which one rank kept its old moments while the others loaded theirs.",
        next_step="Compare the optimizer state files of the named ranks, and how each rank loads its own.",
    ),
    RuleDoc(
        code="TPW201",
        kind="grad-presence",
        severity="error",
        title="A gradient exists on some ranks only",
        signal=(
            "The parameter is trainable and has a gradient on some TP ranks, and none on others, before the reduction."
        ),
        why=(
            "Megatron-core >= 0.14 skips missing gradients before it flattens: the ranks then"
            " all-reduce buffers of different size, which hangs or pairs the wrong elements."
        ),
        causes=("A parameter frozen on one rank after wrapping; a module outside DDP that a rank did not use."),
        cannot_tell=(
            "Nothing: presence is counted on every rank. A backward that never fired shows as zero, not as absent."
        ),
        example="NeMo AutoModel: gradients of custom modules present on some TP ranks only.",
        next_step=(
            "Make the parameter trainable (or frozen) on every rank of the group; the ranks without"
            " it are in the evidence."
        ),
    ),
    RuleDoc(
        code="TPW202",
        kind="nonfinite",
        severity="error",
        title="NaN or Inf in a replica",
        signal=(
            "Non-finite elements with no loss scaler that would skip the step, or on some ranks only, or persisting."
        ),
        why=("One rank's NaN reaches every rank with the next reduction, or ranks skip different steps."),
        causes="Overflow, an uninitialised row, a division by a masked count.",
        cannot_tell=(
            "Where it arose: the first parameter in backward order is named, sharded parameters are not watched."
        ),
        example="huggingface/transformers #48205: uninitialised rows give NaN at step 2.",
        next_step=("Look at the first named parameter in backward order and at what feeds it on the named ranks."),
    ),
    RuleDoc(
        code="TPW301",
        kind="replica-layout",
        severity="error",
        title="Ranks do not agree on what is replicated",
        signal=(
            "Lists of replicated parameters (name, shape, dtype, owned slice, reduction rule,"
            " order) or buffer headers differ."
        ),
        why="The framework's coalesced reduction pairs buffers of different content.",
        causes=("A module built on some ranks only, a mark set on some ranks only, another order of construction."),
        cannot_tell="Which rank is right.",
        example="A custom head that only the rank owning the last shard builds.",
        next_step=(
            "Build the same modules with the same marks on every rank of the group; the first"
            " difference is in the evidence."
        ),
    ),
    RuleDoc(
        code="TPW302",
        kind="finalize-skipped",
        severity="error",
        title="The gradient finalizer did not run in this step",
        signal=("The optimizer stepped, and the framework's TP reduction was not called since the previous step."),
        why=("No replicated gradient is reduced: every sequence-parallel norm drifts by one learning rate a step."),
        causes=(
            "A training loop of its own that bypasses `finalize_model_grads`; the finalizer set on"
            " one model chunk only."
        ),
        cannot_tell=(
            "Whether a reduction of your own took its place: then the next lines of the report show"
            " replicas that agree."
        ),
        example="NVIDIA-NeMo/RL #3716: the split train-step API bypassed the finalizer.",
        next_step=(
            "Call `finalize_model_grads` once per step, after the last micro-batch and before `optimizer.step()`."
        ),
    ),
)

BY_KIND = {rule.kind: rule for rule in RULES}
