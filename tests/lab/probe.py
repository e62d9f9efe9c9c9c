"""One rank of a measurement: trains entries of the catalogue and stores what the TP reduction did.

Independent of tpwatch's monitor, on purpose. Every rank writes `OUT/<job>.rank<r>.pt`, the fields of
`tests.lab.measured.Run`; jobs are `name[:fixed][:<steps>][:tp<size>]`, by default at TP = world.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tpwatch.lab import catalog, cpu, faults, te

REDUCTION = "_allreduce_non_tensor_model_parallel_grads"
DEFAULT_STEPS = 3


class StoppedBeforeReduction(Exception):
    """Raised in place of the framework's reduction, where that would hang."""


def gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """Copy the gradient that the finalizer would read; None where it would pass on."""
    value = getattr(parameter, "main_grad", parameter.grad)
    return value.clone() if parameter.requires_grad and value is not None else None


def replicated(chunks: list[Any]) -> dict[str, torch.nn.Parameter]:
    """Return what every TP rank holds in full, named as in the bare chunk."""
    return {
        name.replace("module.", ""): parameter
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        if not getattr(parameter, "tensor_model_parallel", False)
    }


def measure(run: Any, steps: int, *, stop: bool) -> dict[str, Any]:
    """Train, recording value, gradient before and gradient after each call of the reduction."""
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    original = getattr(module, REDUCTION)
    rows: list[dict[str, list[Any]]] = []
    losses: list[float] = []

    def observed(model: list[Any], *args: Any, **kwargs: Any) -> None:
        parameters = replicated(model)
        pre = {name: gradient(parameter) for name, parameter in parameters.items()}
        if not stop:
            original(model, *args, **kwargs)
        for name, parameter in parameters.items():
            row = (parameter.detach().clone(), pre[name], gradient(parameter))
            rows[-1].setdefault(name, []).append(row)
        if stop:
            raise StoppedBeforeReduction

    setattr(module, REDUCTION, observed)
    try:
        for index in range(1, steps + 1):
            rows.append({})
            losses.append(run.step(index))
    except StoppedBeforeReduction:
        pass
    finally:
        setattr(module, REDUCTION, original)
    return {"losses": losses, "steps": rows, "reduction": original.__name__}


def run_job(job: str) -> dict[str, Any]:
    """Build and measure one entry of the catalogue."""
    name, *options = job.split(":")
    fixed, world = "fixed" in options, dist.get_world_size()
    steps = next((int(option) for option in options if option.isdigit()), DEFAULT_STEPS)
    tp = next((int(option[2:]) for option in options if option.startswith("tp")), world)
    entry = catalog.get(name)
    config = entry.at(tp, world // tp)
    run, mechanism = faults.build(entry, config, fixed=fixed)
    mechanism.after_attach(run)
    data = measure(run, steps, stop=entry.wedges and not fixed)
    run.close()
    return {**data, "tp": tp}


def main(out: Path, jobs: list[str]) -> None:
    """Measure every job and write this rank's file for each."""
    if any(catalog.get(job.split(":")[0]).transformer_engine for job in jobs):
        te.install()
    cpu.install()
    dist.init_process_group("gloo")
    for job in jobs:
        torch.save(run_job(job), out / f"{job.replace(':', '-')}.rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
