"""What every benchmark shares: interleaved timing, a table on the screen, a line in the CSV.

    python benchmarks/_harness.py README.md

rewrites the tables between ``<!-- bench: NAME -->`` and ``<!-- end -->`` in a Markdown file from the
latest run of each benchmark in `results/results.csv`.

Subjects of one case run in turn, round after round, so that a busy minute of the machine hits all of
them; ratios are those of medians. Nothing here asserts a time.
"""

from __future__ import annotations

import csv
import datetime as dt
import importlib.metadata
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import tpwatch

RESULTS = Path(__file__).parent / "results" / "results.csv"
PACKAGES = ("torch", "megatron-core", "triton", "traincheck")


@dataclass(frozen=True, slots=True)
class Subject:
    """One thing to time.

    Attributes:
        name: as it appears in tables.
        call: does the work once.
        moved: bytes that any implementation of this work must at least move; 0 if unknown.
        baseline: names the subject that the others of its case are compared with.
    """

    name: str
    call: Callable[[], object]
    moved: int = 0
    baseline: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the CSV. Times in seconds; `ratio` is the speed relative to the baseline."""

    date: str
    benchmark: str
    case: str
    subject: str
    median: float
    best: float
    rounds: int
    moved: int
    ratio: float
    note: str
    machine: str
    versions: str


def machine() -> str:
    """Processor, cores this process may use, threads torch may use, and the accelerator if any."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        models = re.findall(r"model name\s*: (.*)", info.read_text())
        name = models[0] if models else name
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}"


def versions() -> str:
    """Versions of Python and of the packages that matter."""
    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    found = [f"{name} {installed[name]}" for name in PACKAGES if name in installed]
    own = f"tpwatch {tpwatch.__version__}"
    return ", ".join([own, f"python {platform.python_version()}", *found])


def measure(subjects: Sequence[Subject], rounds: int = 11, calls: int = 1) -> dict[str, list[float]]:
    """Time the subjects in turn.

    Args:
        subjects: in the order in which they run.
        rounds: how often each is timed; one more round, not timed, comes first.
        calls: calls in a row that are timed as one; with more than one, the first call after the
            change of subject is left out, so that data which fit in a cache are found there.

    Returns:
        Seconds per call, round by round, by name.
    """
    times: dict[str, list[float]] = {subject.name: [] for subject in subjects}
    for number in range(rounds + 1):
        for subject in subjects:
            if calls > 1:
                subject.call()
            begin = time.perf_counter()
            for _ in range(calls):
                subject.call()
            if number:
                times[subject.name].append((time.perf_counter() - begin) / calls)
    return times


class Report:
    """Collects the cases of one benchmark run, prints each, and appends them to the CSV."""

    def __init__(self, benchmark: str, note: str = "", path: Path = RESULTS) -> None:
        """Start a run of `benchmark`; `note` says what a reader of the CSV must know."""
        self._benchmark = benchmark
        self._note = note
        self._path = path
        self._date = dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")
        self._machine = machine()
        self._versions = versions()
        print(f"# {benchmark}: {self._machine}; {self._versions}")

    def case(self, name: str, subjects: Sequence[Subject], rounds: int = 11, calls: int = 1) -> dict[str, Result]:
        """Measure one case, print it, append it, and return its results by subject."""
        times = measure(subjects, rounds, calls)
        base = next((times[s.name] for s in subjects if s.baseline), times[subjects[0].name])
        reference = statistics.median(base)
        results = {
            subject.name: Result(
                date=self._date,
                benchmark=self._benchmark,
                case=name,
                subject=subject.name,
                median=statistics.median(times[subject.name]),
                best=min(times[subject.name]),
                rounds=rounds,
                moved=subject.moved,
                ratio=reference / statistics.median(times[subject.name]),
                note=self._note,
                machine=self._machine,
                versions=self._versions,
            )
            for subject in subjects
        }
        print(f"\n## {name}\n{table(results.values())}", flush=True)
        append(results.values(), self._path)
        return results


def append(results: Iterable[Result], path: Path = RESULTS) -> None:
    """Append results to the CSV, with a header if it is new."""
    path.parent.mkdir(exist_ok=True)
    names = [field.name for field in fields(Result)]
    new = not path.is_file()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(names)
        for result in results:
            writer.writerow([getattr(result, name) for name in names])


def load(path: Path = RESULTS) -> list[Result]:
    """Read the CSV back."""
    with path.open(newline="") as file:
        return [
            Result(
                **{
                    **row,
                    "median": float(row["median"]),
                    "best": float(row["best"]),
                    "ratio": float(row["ratio"]),
                    "rounds": int(row["rounds"]),
                    "moved": int(row["moved"]),
                }
            )
            for row in csv.DictReader(file)
        ]


def table(results: Iterable[Result]) -> str:
    """Return results of one case as a Markdown table."""
    lines = [
        "| subject | median | best | must move | GB/s | speed |",
        "|---|---|---|---|---|---|",
    ]
    for r in results:
        rate = f"{r.moved / r.median / 1e9:.2f}" if r.moved else ""
        moved = f"{r.moved / 1e6:.2f} MB" if r.moved else ""
        times = f"{duration(r.median)} | {duration(r.best)}"
        lines.append(f"| {r.subject} | {times} | {moved} | {rate} | {r.ratio:.3g}x |")
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """Seconds with a fitting unit."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def latest(benchmark: str, results: Sequence[Result]) -> str:
    """Return the tables of the latest run of a benchmark, with where and when it ran."""
    chosen = [r for r in results if r.benchmark == benchmark]
    if not chosen:
        return "Not yet run."
    date = max(r.date for r in chosen)
    chosen = [r for r in chosen if r.date == date]
    cases = dict.fromkeys(r.case for r in chosen)
    parts = [f"**{case}**\n\n{table(r for r in chosen if r.case == case)}" for case in cases]
    first = chosen[0]
    note = f" {first.note}" if first.note else ""
    return "\n\n".join([*parts, f"{date[:10]}; {first.machine}; {first.versions}.{note}"])


def rewrite(path: Path, results: Sequence[Result]) -> None:
    """Replace the tables between the markers of a Markdown file."""
    marked = re.compile(r"(<!-- bench: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    text = path.read_text()
    path.write_text(marked.sub(lambda m: f"{m[1]}{latest(m[2], results)}\n{m[3]}", text))


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        rewrite(Path(argument), load())
