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
the cost; and "inside tpwatch, all hooks": the seconds that the training thread spends in the calls which an adapter
makes into a `Watch`, from outside and with nothing subtracted. Those include waiting there for the other rank, the
meeting of the job, listeners, and the hand-over to log and sinks. "Every 10th step" is told for an average step,
checked or not.

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
import time
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
ENTRY_POINTS = ("finalizer_entered", "notice", "finalizer_left", "gradients_ready", "stepped")
"""The calls that an adapter makes into a `Watch` in the course of a step, all on the training thread."""
INSIDE = "inside tpwatch, all hooks, in an average step"


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


class Hooks:
    """A clock around the entry points of one Watch: all that tpwatch does on the training thread."""

    def __init__(self, watch: Any) -> None:  # noqa: ANN401 - a Watch, importable once torch is
        """Put the clock around `watch`, which nobody has called yet."""
        self._seconds = dict.fromkeys(ENTRY_POINTS, 0.0)
        for name in ENTRY_POINTS:
            setattr(watch, name, self._timed(name, getattr(watch, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the entry point takes and returns
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._seconds[name] += time.perf_counter() - begin

        return timed

    def take(self) -> dict[str, float]:
        """Seconds of each entry point since the last call."""
        seconds, self._seconds = self._seconds, dict.fromkeys(ENTRY_POINTS, 0.0)
        return seconds


class Training:
    """One model in training, and who watches it just now."""

    def __init__(self, run: Any, modes: Modes, folder: Path, warm: int) -> None:  # noqa: ANN401 - a TrainingRun
        """Train `run`; every block begins with `warm` steps that are not timed."""
        self.run = run
        self.inside: dict[str, list[float]] = {name: [] for name in modes}
        """Seconds inside tpwatch in every timed step."""
        self.checked: dict[str, list[float]] = {name: [] for name in modes}
        """The same of those steps that were checked."""
        self.meeting: dict[str, list[float]] = {name: [] for name in modes}
        """Seconds of every timed step just before the update, where the ranks of the job meet."""
        self.beside: dict[str, list[float]] = {name: [] for name in modes}
        """Processor seconds of all other threads of this process in every timed step."""
        self._modes, self._folder, self._warm = modes, folder, warm
        self._mode, self._watch, self._hooks = "", None, None
        self._steps, self._blocks = itertools.count(1), itertools.count()

    def train(self, mode: str) -> None:
        """One timed step, or the start of a block if another mode was on before."""
        if mode != self._mode:
            self._enter(mode)
        else:
            self._timed_step(mode)

    def _enter(self, mode: str) -> None:
        self.leave()
        self._mode = mode
        if (knobs := self._modes[mode]) is not None:
            self._watch = self._attach(knobs)
            self._hooks = Hooks(self._watch)
        for _ in range(self._warm):
            self.run.step(next(self._steps))

    def _attach(self, knobs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - a Watch, importable once torch is
        import tpwatch

        out = {"out": str(self._folder / str(next(self._blocks)))}
        return tpwatch.attach(self.run.chunks, self.run.optimizer, {**knobs, **out}, adapter="megatron")

    def _timed_step(self, mode: str) -> None:
        before = self._watch.last_report if self._watch else None
        beside = other_threads()
        if self._hooks:
            self._hooks.take()
        self.run.step(next(self._steps))
        self.beside[mode].append(other_threads() - beside)
        if self._hooks:
            taken = self._hooks.take()
            self.inside[mode].append(sum(taken.values()))
            self.meeting[mode].append(taken["gradients_ready"])
            if self._watch.last_report is not before:
                self.checked[mode].append(self.inside[mode][-1])

    def leave(self) -> None:
        """Detach; stop the benchmark if what it watched was not a healthy run."""
        if self._watch is not None:
            if not self._watch.enabled or self._watch.findings:
                sys.exit(f"not a healthy watched run: {self._watch.reason} {self._watch.findings}")
            if self._watch.config.meets and self._watch.job_view is None:
                sys.exit("the ranks of the job should have met, and did not")
            self._watch.detach()
        self._watch, self._mode, self._hooks = None, "", None

    def replicated(self) -> tuple[int, int, int]:
        """Number and bytes of the watched parameters, and bytes of all parameters, on this rank."""
        from tpwatch.adapters.megatron_params import parameters

        found = parameters(self.run.chunks, self.run.optimizer)
        watched = [p.tensor.nbytes for p in found if p.candidate.replicated]
        return len(watched), sum(watched), sum(p.tensor.nbytes for p in found)


def other_threads() -> float:
    """Processor seconds that threads of this process other than the calling one have taken."""
    return time.process_time() - time.thread_time()


def steps(rank: int, date: str, tiny: bool) -> None:  # noqa: FBT001
    """Both models, in one set of processes."""
    from tpwatch.lab.model import build

    logging.getLogger("tpwatch").setLevel(logging.ERROR)
    rounds, calls, warm = (1, 2, 1) if tiny else (4, TIMED, WARM)
    cases, notes = {}, []
    with scratch() as folder:
        for name, edit in MODELS.items():
            training = Training(build(TINY if tiny else SECOND, edit), MODES, Path(folder) / name, warm)
            subjects = [Subject(mode, partial(training.train, mode)) for mode in MODES]
            times = measure(subjects, rounds, calls, untimed=0)
            training.leave()
            count, watched, everything = training.replicated()
            moved = POINTS * watched + 2 * payload(count)
            a_step = {"every step": moved, "every 10th step": moved // 10}
            share = f"{watched / everything:.1%} of {everything / 1e6:.1f} MB a rank"
            cases[f"{name}: {count} replicated, {share}"] = times, a_step
            cases[f"{INSIDE}: {name}"] = {"a step, off": times["off"], **by_round(training.inside, calls)}, a_step
            notes.append(f"{name}: {in_words(times, training)}")
            training.run.close()
    report = Record("step_overhead", " ".join(["TP2.", *notes]), rank=rank, date=date, tiny=tiny)
    for case, (times, moved_by) in cases.items():
        report.add(case, times, moved_by)


def by_round(seconds: Mapping[str, list[float]], steps_a_round: int) -> dict[str, list[float]]:
    """Seconds of an average step in each round, of the modes that have any."""
    starts = {mode: range(0, len(taken), steps_a_round) for mode, taken in seconds.items() if taken}
    return {
        mode: [statistics.mean(seconds[mode][start : start + steps_a_round]) for start in begun]
        for mode, begun in starts.items()
    }


def in_words(times: Mapping[str, list[float]], training: Training) -> str:
    """What the times say: cost of each mode against the first, and the noise of that."""
    first, off = next(iter(times.items()))
    parts = []
    for mode, seconds in times.items():
        said = []
        if mode != first:
            pairs = sorted(watched / reference - 1.0 for watched, reference in zip(seconds, off, strict=True))
            ends = f"(rounds {pairs[0]:+.2%} to {pairs[-1]:+.2%})"
            said.append(f"{statistics.median(pairs):+.2%} of the step time {ends}")
        if inside := training.inside[mode]:
            checked = statistics.median(training.checked[mode]) * 1e3
            share = statistics.mean(inside) / statistics.mean(seconds)
            said.append(f"inside tpwatch, all hooks: {checked:.2f} ms a checked step, {share:.3%} of the time")
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
