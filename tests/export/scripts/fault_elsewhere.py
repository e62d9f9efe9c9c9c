"""DP2xTP2 in which only the first TP group has the fault, and the last rank, in the other group, logs to W&B.

fault_elsewhere.py OUT
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import tpwatch
from tpwatch.lab import catalog, cpu

cpu.install()
torch.set_num_threads(1)
dist.init_process_group("gloo")

from tpwatch.lab import faults  # noqa: E402 - Megatron-core is imported after the doubles

out, rank = Path(sys.argv[1]), dist.get_rank()
entry = catalog.get("ple-double-sum")
run, _ = faults.build(entry, entry.at(2, 2), fixed=rank >= 2)
config = {"on_fault": "log", "out": str(out / "run"), "wandb": {"enabled": True}}
watch = tpwatch.attach(run.chunks, run.optimizer, config, adapter="megatron")
if rank == 3:
    import wandb

    wandb.init(project="p", dir=out, mode="offline", settings=wandb.Settings(console="off", silent=True))
for step in range(1, 8):
    run.step(step)
    if rank == 3:
        wandb.log({"lm loss": 1.0 / step}, step)  # as Megatron-LM does
watch.finish()
if rank == 3:
    wandb.finish()
dist.destroy_process_group()
