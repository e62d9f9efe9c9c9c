r"""One process of a lab run: trains entries of the catalogue, one after the other, watched.

    torchrun --standalone --nproc_per_node 2 -m tpwatch.lab.worker \
        --fault dense-sp,ple-double-sum --tp 2 --steps 6 --out DIR

Importing Megatron-core takes seconds, so that one set of processes serves many entries. Knows: the
command line, and where the monitor is attached (`_attach`). Must not know: what it finds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import sys
import threading
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tpwatch.errors import ConfigError, ReplicaFault
from tpwatch.lab import catalog, cpu, te

if TYPE_CHECKING:
    from tpwatch.lab.model import TrainingRun
    from tpwatch.watch import Watch

LAUNCHER_GONE = 143
"""Exit code of a worker whose launcher has ended: as after SIGTERM."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What training one entry left behind, exactly enough to compare two runs bit by bit."""

    losses: list[str]
    """Loss of rank 0 in each step, as `float.hex` writes it."""

    weights: list[str]
    """SHA-256 of all parameters after the last step, by global rank."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train every entry that the command line names; 0 if all ran to their end."""
    args = _parser().parse_args(argv)
    entries = [catalog.get(name) for name in args.fault.split(",")]
    if args.end_with_stdin:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    _start(transformer_engine=any(entry.transformer_engine for entry in entries))
    try:
        outcomes = {entry.name: _train(entry, args, len(entries) > 1) for entry in entries}
        if args.losses and dist.get_rank() == 0:
            rows = {name: {"losses": outcome.losses, "weights": outcome.weights} for name, outcome in outcomes.items()}
            Path(args.losses).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    finally:
        dist.destroy_process_group()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tpwatch.lab.worker")
    parser.add_argument("--fault", required=True, help="names from the catalogue, with commas")
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel size")
    parser.add_argument("--dp", type=int, help="data-parallel size; by default what is left")
    parser.add_argument("--pp", type=int, default=1, help="pipeline-parallel size")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", required=True, help="run directory; DIR/<fault> if several")
    parser.add_argument("--fixed", action="store_true", help="apply the upstream fix")
    parser.add_argument("--seed", type=int, help="seed of weights and data")
    parser.add_argument("--config", help="YAML configuration of tpwatch")
    parser.add_argument("--no-watch", action="store_true", help="train without tpwatch")
    parser.add_argument("--losses", help="file for exact losses and hashes of the weights")
    parser.add_argument("--end-with-stdin", action="store_true", help="exit as soon as standard input closes")
    return parser


def _end_with_stdin() -> None:
    """Leave no orphan: the launcher holds the other end of this pipe as long as it lives."""
    while os.read(0, 1):  # not through sys.stdin, whose lock would trip the interpreter's exit
        pass
    os._exit(LAUNCHER_GONE)


def _start(*, transformer_engine: bool) -> None:
    """Prepare the process: doubles for CUDA before Megatron is imported, one thread, gloo."""
    warnings.simplefilter("ignore")  # the host's remarks about packages it does without
    logging.getLogger("megatron").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if transformer_engine:
        te.install()
    cpu.install()
    dist.init_process_group("gloo")


def _train(entry: catalog.Fault, args: argparse.Namespace, several: bool) -> Outcome:  # noqa: FBT001
    """Train one entry for `args.steps` steps, or until tpwatch stops it."""
    from tpwatch.lab import faults

    dp = args.dp or dist.get_world_size() // (args.tp * args.pp)
    config = entry.at(args.tp, dp, args.seed, pp=args.pp)
    if config.world != dist.get_world_size():
        knob, rule = "tp x dp x pp", f"must be the {dist.get_world_size()} ranks that were launched"
        raise ConfigError(knob, f"{config.tp} x {config.dp} x {config.pp}", rule, "Launch as many ranks.")
    losses: list[float] = []
    run, mechanism = faults.build(entry, config, fixed=args.fixed)
    with ExitStack() as cleanup:
        cleanup.callback(run.close)
        watch = None if args.no_watch else _attach(run, args, entry.name if several else ".")
        if watch:
            cleanup.callback(watch.detach)
        mechanism.after_attach(run)
        try:
            for step in range(1, args.steps + 1):
                losses.append(run.step(step))
                _say(f"{entry.name}: step {step} of {args.steps}, loss {losses[-1]:.4f}")
            if watch:
                watch.finish()
        except ReplicaFault as fault:
            _say(f"{entry.name}: {fault}")
    return Outcome([loss.hex() for loss in losses], _hashes(run) if args.losses else [])


def _attach(run: TrainingRun, args: argparse.Namespace, directory: str) -> Watch:
    """Attach tpwatch as a user would: this is the one place where the lab meets the monitor."""
    import tpwatch
    from tpwatch.config import load

    out = {"out": str(Path(args.out) / directory)}
    settings = load(code=out, env=os.environ, file=args.config)
    return tpwatch.attach(run.chunks, run.optimizer, settings, adapter="megatron")


def _hashes(run: TrainingRun) -> list[str]:
    """Hash the weights of every rank, gathered on all; a collective."""
    digest = hashlib.sha256()
    for chunk in run.chunks:
        for parameter in chunk.parameters():
            digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, digest.hexdigest())
    return gathered


def _say(line: str) -> None:
    """Let rank 0 speak."""
    if dist.get_rank() == 0:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
