"""What training feels: steps of a real Megatron-core GPT with tpwatch off, every step and every 10th step.

    OMP_NUM_THREADS=1 python benchmarks/bench_step_overhead.py [--smoke]

Method. Two ranks over gloo train one model, built once: Megatron-core's GPTModel, DDP, schedule, finalizer and Adam on
CPU, one thread a rank, at a size whose step takes about a second. The three ways to watch it take turns in blocks:

- a block begins by detaching what watched before and attaching anew (or not), and a few steps that are not timed, so
  that every parameter is settled; "off" takes the same steps;
- then come the timed steps, at least one of them checked in either watched mode;
- "every step" verifies the reduction of partial gradients in each tenth check, five times as often as by default.

Blocks alternate round by round, so that a busy minute of the machine hits all modes. Two figures result: the step time
against "off", pair by pair within a round, with the spread over rounds, which on a machine of two cores is larger than
the cost; and the seconds spent inside tpwatch's own calls, which include waiting there for the other rank.

Second model: a bottleneck beside every MLP, held in full by every rank, so that more than 5 % of the parameter bytes
are replicated.

At the end: the seconds of a check for 100 to 10,000 parameters of 4 KiB, without a model. TrainCheck is not among the
subjects: benchmarks/README.md says what became of it on this loop.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _harness import Subject, measure
from _ranks import POINTS, Record, Replicas, checks, finish_together, launch, now, payload, scratch, smoke

from tpwatch.lab.config import LabConfig

WARM = 6
TIMED = 10
Modes = Mapping[str, Mapping[str, Any] | None]
"""Ways to watch, by name: knobs, or None for not at all."""

MODES: Modes = {
    "off": None,
    "every step": {"interval": 1, "deep_interval": 10},
    "every 10th step": {"interval": 10, "warmup": WARM},
}
SECOND = LabConfig(hidden=512, layers=8, heads=8, vocab=4096, seq=256, batch=4)
TINY = LabConfig()
BOTTLENECK = 96
COUNTS = (100, 1000, 3000, 10000)


class Bottleneck(torch.nn.Module):
    """A small feed-forward block computed on this rank's slice of the sequence; Megatron sums its gradients."""

    def __init__(self, hidden: int, width: int) -> None:
        """Draw weights from the global generator, which is the same on every tensor-parallel rank."""
        super().__init__()
        self.down = torch.nn.Linear(hidden, width, bias=False)
        self.up = torch.nn.Linear(width, hidden, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map `[seq / tp, batch, hidden]` to the same shape."""
        return self.up(self.down(hidden).relu())


def add_bottlenecks(model: Any) -> None:  # noqa: ANN401 - Megatron's GPTModel has no types
    """Hang a bottleneck beside the MLP of every layer."""
    from tpwatch.lab.model import mark

    hidden = model.config.hidden_size
    for layer in model.decoder.layers:
        block = layer.mlp.bottleneck = Bottleneck(hidden, BOTTLENECK * hidden // SECOND.hidden)
        mark(block.parameters(), sequence_parallel=True)
        layer.mlp.register_forward_hook(lambda _mlp, args, out, block=block: (out[0] + block(args[0]), out[1]))


MODELS: Mapping[str, Callable[[Any], None]] = {
    "GPT, norms replicated": lambda _model: None,
    "GPT with replicated bottlenecks": add_bottlenecks,
}


class Training:
    """One model in training, and who watches it just now."""

    def __init__(self, run: Any, modes: Modes, folder: Path, warm: int) -> None:  # noqa: ANN401 - a TrainingRun
        """Train `run`; every block begins with `warm` steps that are not timed."""
        self.run = run
        self.spent: dict[str, list[float]] = {name: [] for name in modes}
        self._modes, self._folder, self._warm = modes, folder, warm
        self._mode, self._watch = "", None
        self._steps, self._blocks = itertools.count(1), itertools.count()

    def train(self, mode: str) -> None:
        """One timed step, or the start of a block if another mode was on before."""
        if mode != self._mode:
            self._enter(mode)
        else:
            self._step(mode)

    def _enter(self, mode: str) -> None:
        self.leave()
        self._mode = mode
        if (knobs := self._modes[mode]) is not None:
            self._watch = self._attach(knobs)
        for _ in range(self._warm):
            self._step("")

    def _attach(self, knobs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - a Watch, importable once torch is
        import tpwatch

        out = {"out": str(self._folder / str(next(self._blocks)))}
        return tpwatch.attach(self.run.chunks, self.run.optimizer, {**knobs, **out}, adapter="megatron")

    def _step(self, mode: str) -> None:
        before = self._watch.last_report if self._watch else None
        self.run.step(next(self._steps))
        report = self._watch.last_report if self._watch else None
        if mode and report is not None and report is not before:
            self.spent[mode].append(report.seconds)

    def leave(self) -> None:
        """Detach; stop the benchmark if what it watched was not a healthy run."""
        if self._watch is not None:
            if not self._watch.enabled or self._watch.findings:
                sys.exit(f"not a healthy watched run: {self._watch.reason} {self._watch.findings}")
            self._watch.detach()
        self._watch, self._mode = None, ""

    def replicated(self) -> tuple[int, int, int]:
        """Number and bytes of the watched parameters, and bytes of all parameters, on this rank."""
        from tpwatch.adapters.megatron_params import parameters

        found = parameters(self.run.chunks, self.run.optimizer)
        watched = [p.tensor.nbytes for p in found if p.candidate.replicated]
        return len(watched), sum(watched), sum(p.tensor.nbytes for p in found)


def steps(rank: int, date: str, tiny: bool) -> None:  # noqa: FBT001
    """Both models, in one set of processes."""
    from tpwatch.lab.model import build

    logging.getLogger("tpwatch").setLevel(logging.ERROR)
    rounds, calls, warm = (1, 2, 1) if tiny else (6, TIMED, WARM)
    cases, notes = {}, []
    with scratch() as folder:
        for name, edit in MODELS.items():
            training = Training(build(TINY if tiny else SECOND, edit), MODES, Path(folder) / name, warm)
            subjects = [Subject(mode, partial(training.train, mode)) for mode in MODES]
            times = measure(subjects, rounds, calls)
            training.leave()
            count, watched, everything = training.replicated()
            moved = POINTS * watched + 2 * payload(count)
            share = f"{watched / everything:.1%} of {everything / 1e6:.1f} MB a rank"
            checked = dict.fromkeys(list(MODES)[1:], moved)
            cases[f"{name}: {count} replicated, {share}"] = times, checked
            notes.append(f"{name}: {in_words(times, training.spent, calls)}")
            training.run.close()
    report = Record("step_overhead", " ".join(["TP2.", *notes]), rank=rank, date=date, tiny=tiny)
    for case, (times, checked) in cases.items():
        report.add(case, times, checked)


def in_words(times: Mapping[str, list[float]], spent: Mapping[str, list[float]], steps_a_round: int) -> str:
    """What the times say: cost of each mode against the first, and the noise of that."""
    first, off = next(iter(times.items()))
    taken = (len(off) + 1) * steps_a_round  # the round that is not timed was watched too
    parts = []
    for mode, seconds in times.items():
        said = []
        if mode != first:
            pairs = sorted(watched / reference - 1.0 for watched, reference in zip(seconds, off, strict=True))
            ends = f"(rounds {pairs[0]:+.2%} to {pairs[-1]:+.2%})"
            said.append(f"{statistics.median(pairs):+.2%} of the step time {ends}")
        if spent[mode]:
            inside, share = statistics.median(spent[mode]), sum(spent[mode]) / taken / statistics.mean(seconds)
            said.append(f"inside tpwatch {inside * 1e3:.2f} ms a check, {share:.3%} of the time")
        if said:
            parts.append(f"{mode} {', '.join(said)}")
    spread = (max(off) - min(off)) / statistics.median(off)
    return f"{'; '.join(parts)}; {first} varies by {spread:.2%} over {len(off)} rounds."


def host(rank: int, date: str, tiny: bool) -> None:  # noqa: FBT001
    """The seconds of a check against the number of parameters."""
    note = "TP2; a check at all three points, through the Megatron-core adapter. 10 ms are 1 % of a step of 1 s."
    report = Record("step_overhead_host", note, rank=rank, date=date, tiny=tiny)
    subjects = []
    for count in (10, 20) if tiny else COUNTS:
        replicas = Replicas(count, 1024)
        check = finish_together(checks(replicas, rank, 2))
        subjects.append(Subject(f"{count:,} parameters", check, replicas.nbytes + replicas.payload))
    report.case("a check, parameters of 4 KiB", subjects, rounds=1 if tiny else 21)


def main() -> None:
    """Checks alone first: they are timed without the stand-ins for CUDA that the model needs here."""
    tiny, date = smoke(__doc__), now()
    warnings.simplefilter("ignore")  # Megatron's remarks about packages it does without
    logging.getLogger("megatron").setLevel(logging.ERROR)
    launch(2, host, date, tiny)
    from tpwatch.lab import cpu

    cpu.install()
    import tpwatch.adapters.megatron
    import tpwatch.lab.model  # noqa: F401 - both before the fork, so that ranks share them

    launch(2, steps, date, tiny)


if __name__ == "__main__":
    main()
