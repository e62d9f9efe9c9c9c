"""Saves and loads real Megatron-core checkpoints at TP2 while optimizer state differs on one rank; says what happened.

checkpoints.py OUT LAYOUT-POLICY..., LAYOUT being fp32, bf16 or distributed (bf16 with the distributed optimizer)
"""

import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tpwatch
from tpwatch.lab import cpu
from tpwatch.lab.config import LabConfig

NORM = "decoder.layers.0.input_layernorm.weight"


def say(case: Path, text: str) -> None:
    """One line a rank."""
    sys.stdout.write(f"rank {dist.get_rank()} {case.name} {text}\n")
    sys.stdout.flush()


def save(run: Any, directory: Path) -> None:
    """Save the model as trainers do, by the attribute of the module; say how it ended."""
    from megatron.core import dist_checkpointing

    directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    try:
        dist_checkpointing.save({"model": run.model.sharded_state_dict()}, str(directory))
    except tpwatch.ReplicaFault as fault:
        say(directory.parent, f"{directory.name}: {fault}")
    else:
        say(directory.parent, f"{directory.name}: saved")


def train(out: Path) -> None:
    """Save with copies that agree, save with a moment that does not, load both."""
    from megatron.core import dist_checkpointing

    from tpwatch.adapters.megatron_checkpoints import states
    from tpwatch.lab.model import build
    from tpwatch.parts import STATES

    layout, policy = out.name.split("-")
    precision = "fp32" if layout == "fp32" else "bf16"
    run = build(LabConfig(precision=precision, distributed_optimizer=layout == "distributed"))
    original = dist_checkpointing.save
    knobs = {"checkpoint": policy, "out": str(out / "run")}
    watch = tpwatch.attach(run.chunks, run.optimizer, knobs, adapter="megatron")
    for step in (1, 2):
        run.step(step)
    save(run, out / "healthy")
    norm = dict(run.model.named_parameters())[NORM]
    kept = dict(zip(STATES, states(run.optimizer, [norm])[0], strict=True))
    say(out, "keeps " + " ".join(label for label, state in kept.items() if state is not None))
    moment = kept["exp_avg"]
    before = moment.clone()
    moment.add_(dist.get_rank())
    save(run, out / "broken")
    broken = deepcopy(run.optimizer.state_dict())
    moment.copy_(before)
    healthy = deepcopy(run.optimizer.state_dict())
    for state in (healthy, broken, broken, healthy):
        run.optimizer.load_state_dict(state)
    say(out, "loaded")
    watch.finish()
    say(out, f"restored {dist_checkpointing.save is original} {'load_state_dict' not in vars(run.optimizer)}")
    for finding in watch.findings:
        say(out, f"finding {finding.kind} {finding.parameter}: {finding.observed}")
    run.close()


if __name__ == "__main__":  # Megatron-core's writer starts a process that imports this file
    cpu.install()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in sys.argv[2:]:
        train(Path(sys.argv[1]) / name)
    dist.destroy_process_group()
