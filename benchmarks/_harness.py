"""What every benchmark shares: interleaved timing, a table on the screen, a line in the CSV.

Subjects of one case run in turn, round after round, so that a busy minute of the machine hits all of
them; ratios are those of medians. Nothing here asserts a time, and nothing knows of pages (`_pages`).
"""

from __future__ import annotations

import csv
import datetime as dt
import importlib.metadata
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        repeat: times of a round, each of its own; quick subjects beside slow ones need more than one.
    """

    name: str
    call: Callable[[], object]
    moved: int = 0
    baseline: bool = False
    repeat: int = 1


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
    """Versions of Python and of the packages that matter, and the commit that was measured."""
    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    found = [f"{name} {installed[name]}" for name in PACKAGES if name in installed]
    own = " at ".join(filter(None, [f"tpwatch {tpwatch.__version__}", commit()]))
    return ", ".join([own, f"python {platform.python_version()}", *found])


def commit(folder: Path = Path(__file__).parent.parent) -> str:
    """The commit that `folder` has, with "+" if anything but results and pages was changed since; "" without git."""
    git = ("git", "--no-optional-locks", "-C", str(folder))
    unmeasured = (":!benchmarks/results", ":!*.md")
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True)
        status = [*git, "status", "--porcelain", "--", str(folder), *unmeasured]
        changed = subprocess.run(status, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + "+" * bool(changed.stdout.strip())


def measure(
    subjects: Sequence[Subject], rounds: int = 11, calls: int = 1, *, untimed: int = 1
) -> dict[str, list[float]]:
    """Time the subjects in turn.

    Args:
        subjects: in the order in which they run.
        rounds: how often each is timed.
        calls: calls in a row that are timed as one; with more than one, the first call after the
            change of subject is left out, so that data which fit in a cache are found there.
        untimed: rounds that come first and are not timed.

    Returns:
        Seconds per call, round by round, by name.
    """
    times: dict[str, list[float]] = {subject.name: [] for subject in subjects}
    for number in range(untimed + rounds):
        for subject in subjects:
            if calls > 1:
                subject.call()
            for _ in range(subject.repeat):
                begin = time.perf_counter()
                for _ in range(calls):
                    subject.call()
                if number >= untimed:
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
        base = next((s.name for s in subjects if s.baseline), subjects[0].name)
        return self.add(name, times, {s.name: s.moved for s in subjects}, base)

    def add(
        self, name: str, times: Mapping[str, list[float]], moved: Mapping[str, int], base: str = ""
    ) -> dict[str, Result]:
        """Print and append a case that was timed elsewhere or modelled; `base`, or the first, is the baseline."""
        reference = statistics.median(times[base or next(iter(times))])
        results = {
            subject: Result(
                date=self._date,
                benchmark=self._benchmark,
                case=name,
                subject=subject,
                median=statistics.median(seconds),
                best=min(seconds),
                rounds=len(seconds),
                moved=moved.get(subject, 0),
                ratio=reference / statistics.median(seconds),
                note=self._note,
                machine=self._machine,
                versions=self._versions,
            )
            for subject, seconds in times.items()
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
