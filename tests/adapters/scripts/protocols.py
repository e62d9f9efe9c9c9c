"""What a training loop may do between two steps, one scenario after the other on two tensor-parallel ranks.

protocols.py OUT: each scenario has a run directory of its own, and in it `facts.<rank>.json`: what the script saw.
"""

import copy
import json
import resource
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tpwatch
from tpwatch.lab import catalog, cpu

cpu.install()
torch.set_num_threads(1)
dist.init_process_group("gloo")

from tpwatch.lab import faults  # noqa: E402 - Megatron-core is imported after the doubles
from tpwatch.lab.model import TrainingRun, mark  # noqa: E402 - as above

OUT, RANK = Path(sys.argv[1]), dist.get_rank()
OVERFLOWING, FITTING = 2.0**40, 2.0**12
"""Loss scales that this model in fp16 overflows at, and does not."""

Facts = dict[str, Any]


def train(run: TrainingRun, first: int, last: int) -> None:
    """Train from one step up to and with another."""
    for index in range(first, last + 1):
        run.step(index)


def gain(run: TrainingRun) -> torch.nn.Parameter:
    """A norm gain of the last layer."""
    found: torch.nn.Parameter = run.model.decoder.layers[1].pre_mlp_layernorm.weight
    return found


def plainly(run: TrainingRun) -> Facts:
    """Nothing but training."""
    train(run, 1, 6)
    return {}


def captured(run: TrainingRun) -> Facts:
    """From step 3 on the finalizer is recorded into a CUDA graph, whose replays call no Python.

    A double for the question whether a stream is being captured, and for the replay: there is no device here.
    """
    from tpwatch.adapters import megatron

    train(run, 1, 2)
    asked, finalize = megatron.capturing, run.transformer_config.finalize_model_grads_func
    megatron.capturing = lambda: True
    train(run, 3, 3)
    megatron.capturing = asked
    run.transformer_config.finalize_model_grads_func = lambda *_args, **_kwargs: None
    train(run, 4, 8)
    run.transformer_config.finalize_model_grads_func = finalize
    return {}


def with_evaluation(run: TrainingRun) -> Facts:
    """Forward only, in evaluation mode, between two steps."""
    train(run, 1, 3)
    losses = [run.evaluate(step) for step in (100, 101)]
    train(run, 4, 6)
    return {"losses": losses}


def without_sync(run: TrainingRun) -> Facts:
    """The schedule accumulates under `no_sync` and reduces with the last microbatch."""
    entered = [0]
    own: Callable[[], AbstractContextManager[None]] = run.transformer_config.no_sync_func

    def counted() -> AbstractContextManager[None]:
        entered[0] += 1
        return own()

    run.transformer_config.no_sync_func = counted
    train(run, 1, 6)
    return {"no_sync": entered[0]}


def frozen_alike(run: TrainingRun) -> Facts:
    """On every rank: frozen, thawed, frozen again."""
    for first, trainable in ((1, False), (4, True), (7, False)):
        gain(run).requires_grad_(trainable)
        train(run, first, first + 2)
    return {}


def frozen_on_one(run: TrainingRun) -> Facts:
    """Frozen in mid-run, on the last rank only."""
    train(run, 1, 3)
    gain(run).requires_grad_(RANK == 0)
    train(run, 4, 6)
    return {}


def moved(run: TrainingRun) -> Facts:
    """The values get another storage, on every rank."""
    train(run, 1, 3)
    before = gain(run).data_ptr()
    gain(run).data = gain(run).data.clone()
    train(run, 4, 6)
    return {"moved": gain(run).data_ptr() != before}


def moved_and_written(run: TrainingRun) -> Facts:
    """They get another storage, and two steps later one rank writes into that."""
    train(run, 1, 3)
    gain(run).data = gain(run).data.clone()
    train(run, 4, 5)
    if RANK == 1:
        gain(run).data.add_(1e-3)
    train(run, 6, 9)
    return {}


def added(run: TrainingRun) -> Facts:
    """A parameter and a module come in mid-run."""
    train(run, 1, 3)
    layers = run.model.decoder.layers
    layers[0].extra = torch.nn.Parameter(torch.ones(run.config.hidden))
    layers[1].adapter = torch.nn.Linear(4, 2)
    train(run, 4, 6)
    return {}


def replaced(run: TrainingRun) -> Facts:
    """Another parameter takes the place of one that is watched."""
    train(run, 1, 3)
    norm = run.model.decoder.layers[1].pre_mlp_layernorm
    norm.weight = torch.nn.Parameter(norm.weight.detach().clone())
    mark([norm.weight], sequence_parallel=True)
    train(run, 4, 6)
    return {}


def stepped_outside(run: TrainingRun) -> Facts:
    """The optimizer steps twice more than there are gradients: as step 4 and as step 7."""
    train(run, 1, 3)
    run.optimizer.step()
    train(run, 4, 5)
    run.optimizer.step()
    train(run, 6, 6)
    return {}


def state(run: TrainingRun) -> Any:
    """Model and optimizer as a checkpoint holds them."""
    return copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))


def load(run: TrainingRun, saved: Any) -> None:
    """Put a checkpoint into the run."""
    model, optimizer = copy.deepcopy(saved)
    run.model.load_state_dict(model)
    run.optimizer.load_state_dict(optimizer)


def loaded_alike(run: TrainingRun) -> Facts:
    """Every rank goes back to the same checkpoint."""
    train(run, 1, 2)
    saved = state(run)
    train(run, 3, 4)
    load(run, saved)
    train(run, 5, 8)
    return {}


def loaded_apart(run: TrainingRun) -> Facts:
    """After step 4 the last rank loads an older checkpoint than the first."""
    saved = []
    for index in (1, 2):
        run.step(index)
        saved.append(state(run))
    train(run, 3, 4)
    load(run, saved[1 - RANK])
    train(run, 5, 8)
    return {}


def overflowing(run: TrainingRun) -> Facts:
    """In step 3 the loss scale is too large: the optimizer finds an inf and skips the update."""
    (inner,) = run.optimizer.chained_optimizers
    scale = inner.grad_scaler._scale
    train(run, 1, 2)
    before = gain(run).detach().clone()
    scale.fill_(OVERFLOWING)
    run.step(3)
    scale.fill_(FITTING)
    updated = not torch.equal(before, gain(run))
    train(run, 4, 6)
    return {"updated": updated}


def on_a_full_disk(run: TrainingRun) -> Facts:
    """From step 2 to step 5 the event file of the leader cannot grow, by a limit of the operating system."""
    train(run, 1, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    files = list((OUT / "full-disk").glob("events.*.jsonl"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (files[0].stat().st_size + 40, hard))
    train(run, 2, 5)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    train(run, 6, 8)
    return {}


@dataclass(frozen=True)
class Scenario:
    """One run: what the loop does, and what it trains."""

    play: Callable[[TrainingRun], Facts]
    entry: str = "dense-sp"
    changes: dict[str, Any] = field(default_factory=dict)
    """Of the entry's configuration."""
    knobs: dict[str, Any] = field(default_factory=dict)
    """Of tpwatch."""


SCENARIOS = {
    "captured": Scenario(captured, knobs={"job_wide": True}),
    "evaluation": Scenario(with_evaluation),
    "accumulation": Scenario(plainly, changes={"microbatches": 3}),
    "no-sync": Scenario(without_sync, changes={"microbatches": 3, "overlap_grad_reduce": True}),
    "accumulated-fault": Scenario(
        without_sync, "ple-double-sum", changes={"microbatches": 3, "overlap_grad_reduce": True}
    ),
    "frozen-alike": Scenario(frozen_alike),
    "frozen-on-one": Scenario(frozen_on_one, knobs={"on_fault": "abort"}),
    "moved": Scenario(moved),
    "moved-and-written": Scenario(moved_and_written),
    "added": Scenario(added),
    "replaced": Scenario(replaced),
    "stepped-outside": Scenario(stepped_outside),
    "loaded-alike": Scenario(loaded_alike),
    "loaded-apart": Scenario(loaded_apart),
    "overflow": Scenario(overflowing, changes={"precision": "fp16"}),
    "overflow-in-a-fault": Scenario(overflowing, "ple-double-sum", changes={"precision": "fp16"}),
    "full-disk": Scenario(on_a_full_disk, "ple-double-sum"),
}


def play(name: str, scenario: Scenario) -> None:
    """Train one scenario, watched, and leave behind what was seen."""
    entry = catalog.get(scenario.entry)
    run, _ = faults.build(entry, replace(entry.at(2), **scenario.changes))
    knobs = {"out": str(OUT / name), **scenario.knobs}
    watch = tpwatch.attach(run.chunks, run.optimizer, knobs, adapter="megatron")
    facts: Facts = {}
    try:
        facts = scenario.play(run)
        watch.finish()
    except tpwatch.ReplicaFault as fault:
        facts = {"stopped": fault.step}
        watch.abandon()
    run.close()
    (OUT / name / f"facts.{RANK}.json").write_text(json.dumps(facts))


for name, scenario in SCENARIOS.items():
    play(name, scenario)
dist.destroy_process_group()
