"""DP2xTP2 in which only the first TP group has the fault; says how every rank ended.

fault_in_one_group.py OUT ON_FAULT [FAULT]
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

out, on_fault = Path(sys.argv[1]), sys.argv[2]
rank = dist.get_rank()
entry = catalog.get(sys.argv[3] if len(sys.argv) > 3 else "ple-double-sum")
run, _ = faults.build(entry, entry.at(2, 2), fixed=rank >= 2)
watch = tpwatch.attach(run.chunks, run.optimizer, {"on_fault": on_fault, "out": str(out)}, adapter="megatron")


def save(step: int) -> None:
    """Save this rank's weights, and meet the others as a trainer's own save function would."""
    torch.save({"step": step, "model": run.model.state_dict()}, out / f"rank{rank}.pt")
    dist.barrier()


watch.save_before_abort(save)
step = 0
try:
    for step in range(1, 9):
        run.step(step)
except tpwatch.ReplicaFault as fault:
    view = watch.job_view
    own, all_groups = len(fault.findings), dict(view.counts)
    sys.stdout.write(f"rank {rank} stopped at step {fault.step} in step {step}: {own} own, {all_groups}\n")
    sys.stdout.flush()
    watch.abandon()
dist.destroy_process_group()
