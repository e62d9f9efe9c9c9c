"""Four ranks of which only one TP group has the fault, case by case; says how every rank ended.

fault_in_one_group.py OUT LAYOUT ON_FAULT:FAULT...

LAYOUT `dp2`: two data-parallel groups, the fault in the first. `pp2`: two pipeline stages, the fault in the last.
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
from tpwatch.lab.model import TrainingRun  # noqa: E402 - as above

OUT, LAYOUT = Path(sys.argv[1]), sys.argv[2]
RANK = dist.get_rank()
FAULTY = {"dp2": RANK < 2, "pp2": RANK >= 2}[LAYOUT]


def build(fault: str) -> TrainingRun:
    """The run of one fault in this layout."""
    entry = catalog.get(fault)
    config = entry.at(2, 2) if LAYOUT == "dp2" else entry.at(2, 1, pp=2)
    run, _ = faults.build(entry, config, fixed=not FAULTY)
    return run


def play(case: str) -> None:
    """Train until tpwatch stops the run."""
    on_fault, _, fault = case.partition(":")
    run, out = build(fault), OUT / case.replace(":", "-")
    watch = tpwatch.attach(run.chunks, run.optimizer, {"on_fault": on_fault, "out": str(out)}, adapter="megatron")

    def save(step: int) -> None:
        """Save this rank's weights, and meet the others as a trainer's own save function would."""
        torch.save({"step": step, "model": run.model.state_dict()}, out / f"rank{RANK}.pt")
        dist.barrier()

    watch.save_before_abort(save)
    step = 0
    try:
        for step in range(1, 9):
            run.step(step)
    except tpwatch.ReplicaFault as stop:
        own, everywhere = len(stop.findings), sum(watch.job_view.counts.values())
        sys.stdout.write(f"{case}: rank {RANK} stopped at step {stop.step} in step {step}: {own} of {everywhere}\n")
        sys.stdout.flush()
        watch.abandon()
        go_on(case, run, out / f"rank{RANK}.pt")
    run.close()


def go_on(case: str, run: TrainingRun, saved: Path) -> None:
    """Load the checkpoint, where one was saved, and train one step from it, unwatched."""
    if saved.is_file():
        checkpoint = torch.load(saved)
        run.model.load_state_dict(checkpoint["model"])
        loss = run.step(checkpoint["step"])
        sys.stdout.write(f"{case}: rank {RANK} goes on from its checkpoint, loss {loss:.3f}\n")
        sys.stdout.flush()


for case in sys.argv[3:]:
    play(case)
dist.destroy_process_group()
