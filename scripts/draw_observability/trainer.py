"""One rank of the training run in the pictures: PP2xTP2 on CPU, healthy at first, logged to W&B by its last rank.

    trainer.py RUN_DIRECTORY CONFIG STEPS ONSET

From step ONSET on the first layer of the second stage has lost its `sequence_parallel` marks, so that Megatron no
longer sums the gradients of its norms. After STEPS steps the processes stay, watched and scraped, until their
standard input is closed.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import tpwatch
from tpwatch.config import load
from tpwatch.lab import catalog, cpu

PACE = 0.6
"""Seconds that a step takes at least: the run is to last for some tens of scrapes."""


def lose_marks(model: torch.nn.Module) -> None:
    """What a reload that builds new parameters does: values are right, marks are gone."""
    for name, parameter in model.named_parameters():
        if "layers.0." in name and "layernorm" in name:
            parameter.sequence_parallel = False


def open_run(directory: Path) -> None:
    """Open a run of W&B that stays on this machine and out of the user's home."""
    import wandb

    os.environ.update({f"WANDB_{name}_DIR": str(directory) for name in ("CACHE", "CONFIG", "DATA")})
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    settings = wandb.Settings(console="off", silent=True, x_disable_stats=True, disable_git=True)
    wandb.init(project="demo", dir=directory, mode="offline", settings=settings)


def train(out: Path, config: Path, steps: int, onset: int) -> None:
    """Train, watched; where the last rank logs its loss, tpwatch's numbers ride along."""
    from tpwatch.lab import faults  # Megatron-core is imported after the doubles

    entry = catalog.get("dense-sp")
    run, _ = faults.build(entry, entry.at(2, pp=2))
    settings = load(code={"out": str(out)}, file=config)
    watch = tpwatch.attach(run.chunks, run.optimizer, settings, adapter="megatron")
    wandb = None
    if dist.get_rank() == dist.get_world_size() - 1:
        open_run(out.parent)
        import wandb
    for step in range(1, steps + 1):
        began = time.monotonic()
        if step == onset and dist.get_rank() >= run.config.tp:
            lose_marks(run.model)
        loss = run.step(step)
        if wandb:
            wandb.log({"lm loss": loss}, step)  # as Megatron-LM does
        time.sleep(max(0.0, PACE - (time.monotonic() - began)))
    sys.stdin.read()
    watch.finish()
    if wandb:
        wandb.finish()


if __name__ == "__main__":
    cpu.install()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    dist.destroy_process_group()
