"""One rank of a measurement: trains catalogue entries and stores what the TP reduction did, without tpwatch's core.

Run under ``torch.distributed.run``: ``probe.py OUT tp JOB...`` with jobs ``name[:fixed][:steps]``. Every rank writes
``OUT/<job>.rank<r>.pt``: ``{"names": [...], "losses": [...], "steps": [{name: Row}]}`` with replicated parameters only.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

REDUCTION = "_allreduce_non_tensor_model_parallel_grads"


class StopBeforeReduction(Exception):  # noqa: N818 - not an error: the measurement is done
    """Raised in place of the framework's reduction, where that would hang."""


def gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """Copy the gradient the finalizer would read, or None where it would skip the parameter."""
    value = getattr(parameter, "main_grad", parameter.grad)
    return value.clone() if parameter.requires_grad and value is not None else None


def replicated(chunks: list[Any]) -> dict[str, torch.nn.Parameter]:
    """Return the parameters every TP rank holds in full, named as in the bare chunk."""
    return {
        name.replace("module.", ""): parameter
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        if not getattr(parameter, "tensor_model_parallel", False)
    }


def measure(run: Any, steps: int, *, stop: bool) -> tuple[list[float], list[dict[str, Any]]]:
    """Train ``steps`` steps; per step, map each parameter to its calls of the reduction: (value, [(pre, post)])."""
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    original = getattr(module, REDUCTION)
    rows: list[dict[str, Any]] = []

    def observed(model: list[Any], *args: Any, **kwargs: Any) -> None:
        parameters = replicated(model)
        pre = {name: gradient(p) for name, p in parameters.items()}
        value = {name: p.detach().clone() for name, p in parameters.items()}
        if not stop:
            original(model, *args, **kwargs)
        for name, p in parameters.items():
            _, calls = rows[-1].setdefault(name, (value[name], []))
            calls.append((pre[name], gradient(p)))
        if stop:
            raise StopBeforeReduction

    setattr(module, REDUCTION, observed)
    losses: list[float] = []
    try:
        for index in range(1, steps + 1):
            rows.append({})
            losses.append(run.step(index))
    except StopBeforeReduction:
        pass
    finally:
        setattr(module, REDUCTION, original)
    return losses, rows


def main(out: str, tp: int, jobs: list[str]) -> None:
    """Measure every job and write this rank's file for each."""
    from tpwatch.lab import catalog, cpu, faults

    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if any(catalog.get(job.split(":")[0]).transformer_engine for job in jobs):
        from tpwatch.lab import te

        te.install()
    cpu.install()
    for job in jobs:
        name, *options = job.split(":")
        fixed = "fixed" in options
        steps = next((int(option) for option in options if option.isdigit()), 3)
        fault = catalog.get(name)
        reference = "reference" in options
        config = dataclasses.replace(
            fault.config,
            tp=tp,
            dp=world // tp,
            sequence_parallel=fault.config.sequence_parallel and not reference,
        )
        run, mechanism = faults.build(fault, config, fixed=fixed)
        mechanism.after_attach(run)
        names = [n for chunk in run.chunks for n, _ in getattr(chunk, "module", chunk).named_parameters()]
        losses, rows = measure(run, steps, stop=fault.wedges and not fixed)
        run.close()
        data = {"names": names, "losses": losses, "steps": rows}
        torch.save(data, Path(out) / f"{job.replace(':', '-')}.rank{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
