"""A training script that lets ReplicaFault out, after saying at which step it was raised."""

import sys

import torch
import torch.distributed as dist

import tpwatch
from tpwatch.lab import catalog, cpu

cpu.install()
torch.set_num_threads(1)
dist.init_process_group("gloo")

from tpwatch.lab import faults  # noqa: E402 - Megatron-core is imported after the doubles

entry = catalog.get("gdn-gamma-double-sum")
run, _ = faults.build(entry, entry.at(dist.get_world_size()))
step = 0
try:
    for step in range(1, 20):
        run.step(step)
except tpwatch.ReplicaFault as fault:
    sys.stdout.write(f"fault at step {fault.step}\n")
    sys.stdout.flush()
    raise
