"""A training script that trains three steps and then has trouble of its own."""

import torch
import torch.distributed as dist

from tpwatch.lab import catalog, cpu

cpu.install()
torch.set_num_threads(1)
dist.init_process_group("gloo")

from tpwatch.lab import faults  # noqa: E402 - Megatron-core is imported after the doubles

entry = catalog.get("dense-sp")
run, _ = faults.build(entry, entry.at(dist.get_world_size()))
for step in range(1, 4):
    run.step(step)
message = "the script's own trouble"
raise RuntimeError(message)
