"""What tpwatch set out to reach, and how far it got: one line a goal, its figures from the latest results.

Knows the goals, which rows of the CSV answer them, and what stands in the way. Measures nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from _harness import Result, duration

SUM, CHECK, SHA1, NATIVE = "torch.sum", "Megatron check", "SHA-1 of the bytes", "tpwatch native"
PROBE, OURS = "MAX and MIN per tensor", "tpwatch check"
IMPORT = "import tpwatch, torch being there"
MODELS = ("GPT, norms replicated", "GPT with replicated bottlenecks")
INSIDE = "inside tpwatch, all hooks, in an average step"
SINKS = "step_overhead_sinks"


class Latest:
    """The latest run of each benchmark."""

    def __init__(self, results: Sequence[Result]) -> None:
        """Keep of each benchmark the results of its last date."""
        dates: dict[str, str] = {}
        for r in results:
            dates[r.benchmark] = max(r.date, dates.get(r.benchmark, ""))
        self._results = [r for r in results if r.date == dates[r.benchmark]]

    def row(self, benchmark: str, case: str, subject: str = "") -> Result:
        """The first row of a subject, or of any, whose case begins so.

        Raises:
            LookupError: it has not been measured.
        """
        for r in self._results:
            if r.benchmark == benchmark and r.case.startswith(case) and subject in {"", r.subject}:
                return r
        raise LookupError(benchmark, case, subject)

    def speed(self, benchmark: str, case: str, subject: str, other: str) -> float:
        """How many times as fast as `other` a subject is."""
        return self.row(benchmark, case, other).median / self.row(benchmark, case, subject).median


Read = Callable[[Latest], float]
Why = Callable[[Latest], str]


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal.

    Attributes:
        what: is to be reached.
        limit: of the figure.
        read: the figure; raises LookupError where it has not been measured. None: no benchmark here can say.
        why: how far the possible is, and what stands between; raises LookupError likewise.
        show: the figure, and the limit, as text.
        most: the limit is the most, not the least.
        noise: a figure nearer to zero than this says nothing.
        verdict: where there is no `read`.
    """

    what: str
    limit: float
    read: Read | None
    why: Why
    show: Callable[[float], str]
    most: bool = False
    noise: Read = lambda _: 0.0
    verdict: str = "not yet run"


def goals_table(goals: Sequence[Goal], latest: Latest) -> str:
    """Return all goals as a Markdown table."""
    head = "| to reach | goal | measured | | how far the limit is, and why |\n|---|---|---|---|---|"
    return "\n".join([head, *(_line(goal, latest) for goal in goals)])


def _line(goal: Goal, latest: Latest) -> str:
    try:
        cells = _cells(goal, latest)
    except LookupError:
        cells = ("", "not yet run", "")
    aim = f"{'at most' if goal.most else 'at least'} {goal.show(goal.limit)}"
    return f"| {' | '.join((goal.what, aim, *cells))} |"


def _cells(goal: Goal, latest: Latest) -> tuple[str, str, str]:
    if goal.read is None:
        return "", goal.verdict, goal.why(latest)
    figure = goal.read(latest)
    met = figure <= goal.limit if goal.most else figure >= goal.limit
    verdict = "not decided" if abs(figure) < goal.noise(latest) else "met" if met else "**missed**"
    return goal.show(figure), verdict, goal.why(latest)


def speed(figure: float) -> str:
    """A factor, to three digits."""
    return f"{float(f'{figure:.3g}'):,g}x"


def percent(figure: float) -> str:
    """A share, to three digits."""
    return f"{figure * 100:.3g} %"


def count(figure: float) -> str:
    """A whole number."""
    return f"{figure:,.0f}"


def rate(r: Result) -> str:
    """How fast a result moved its bytes."""
    return f"{r.moved / r.median / 1e9:.3g} GB/s"


# --- fingerprints ----------------------------------------------------------------------------------

YARDSTICKS = {CHECK: "`check_param_hashes_across_dp_replicas`", SHA1: "SHA-1 of the same bytes", SUM: "`torch.sum`"}
NEAR = {
    "1 MiB": "in cache arithmetic decides",
    "64 MiB": "memory decides",
    "3,000 x 4 KiB": "one call for all tensors, where a sum pays one for each",
}
"""What decides how far from `torch.sum` a case is."""
ROOF = 64 * 3.2e9 / 6
"""Bytes a second that the arithmetic on float32 allows: 64 bytes in six cycles (README, "How far from the limit")."""


def fingerprint(case: str, other: str, least: float, why: Callable[[Latest, str], str]) -> Goal:
    """A goal for the fingerprints of one case beside a yardstick."""
    return Goal(
        what=f"fingerprints of {case}, beside {YARDSTICKS[other]}",
        limit=least,
        read=lambda latest: latest.speed("fingerprint", case, NATIVE, other),
        why=lambda latest: why(latest, case),
        show=speed,
    )


def beside_megatron(latest: Latest, case: str) -> str:
    """One read of every byte, against Megatron's check."""
    return f"one read of every byte would be {speed(latest.speed('fingerprint', case, SUM, CHECK))}"


def beside_sha1(latest: Latest, case: str) -> str:
    """One read of every byte, against SHA-1 of them."""
    read, sha1 = latest.row("fingerprint", case, SUM), latest.row("fingerprint", case, SHA1)
    text = f"one read of every byte would be {speed(sha1.median / read.median)}"
    if not case.endswith("bfloat16"):
        return text
    beyond = f"20x would be {20 * sha1.moved / sha1.median / 1e9:.3g} GB/s where `torch.sum` reads {rate(read)}"
    return f"{text}; {beyond}. Meant is Megatron's SHA-1, of what it casts to float32: the line above"


def beside_sum(latest: Latest, case: str) -> str:
    """The speed, and what limits it."""
    text = f"{rate(latest.row('fingerprint', case, NATIVE))}; {NEAR[case.rpartition(' ')[0]]}"
    if case != "1 MiB float32":
        return text
    read = latest.row("fingerprint", case, SUM)
    return f"{text}, and allows {ROOF / 1e9:.3g} GB/s, {speed(ROOF * read.median / read.moved)} (roofline below)"


# --- checks ----------------------------------------------------------------------------------------


def exchange(ranks: int, case: str, least: float) -> Goal:
    """A goal for a whole check beside the probe that people write."""
    benchmark, start = {2: "exchange", 4: "exchange_4"}[ranks], f"{case}, {ranks} ranks"

    def why(latest: Latest) -> str:
        ours, read = latest.row(benchmark, start, OURS), latest.row(benchmark, start, SUM)
        rest = "the rest is arithmetic, gloo's two all-reduces, and waiting for the slowest rank"
        return f"{duration(ours.median)}, where reading all once takes {duration(read.median)}; {rest}"

    return Goal(
        what=f"a check of {start}, beside an all-reduce MAX and MIN for every tensor",
        limit=least,
        read=lambda latest: latest.speed(benchmark, start, OURS, PROBE),
        why=why,
        show=speed,
    )


def in_the_hooks(model: str) -> Read:
    """Share of a step that the training thread spends inside tpwatch, every step checked."""
    case = f"{INSIDE}: {model}"
    return lambda latest: 1 / latest.speed("step_overhead", case, "every step", "a step, off")


def why_in_the_hooks(model: str) -> Why:
    """What reading the bytes takes, and what the rest is."""

    def why(latest: Latest) -> str:
        inside = latest.row("step_overhead", f"{INSIDE}: {model}", "every step")
        read = latest.row("fingerprint", "64 MiB float32", SUM)
        least = inside.moved * read.median / read.moved
        rest = "the rest is gloo's two all-reduces, waiting there for the other rank, and calls into torch"
        return f"{duration(inside.median)}, where moving the bytes takes {duration(least)}; {rest}"

    return why


def step_time(what: str, limit: float, row: tuple[str, str], watched: str, plain: str) -> Goal:
    """A goal for the step time as a whole; what is smaller than the spread of an unwatched step is not decided."""

    def noise(latest: Latest) -> float:
        model, note = row[1], latest.row(*row, plain).note
        spread = re.search(r"varies by ([0-9.]+)%", note[max(0, note.find(model)) :])
        return float(spread[1]) / 100 if spread else 0.0

    return Goal(
        what=what,
        limit=limit,
        read=lambda latest: latest.row(*row, watched).median / latest.row(*row, plain).median - 1,
        why=lambda latest: f'"{plain}" by itself varies by {percent(noise(latest))} from round to round',
        show=percent,
        most=True,
        noise=noise,
    )


def overhead(model: str) -> tuple[Goal, Goal]:
    """The goal for one model, by both figures."""
    what = f"every step checked, {model}"
    inside = Goal(f"{what}: inside tpwatch", 0.01, in_the_hooks(model), why_in_the_hooks(model), percent, most=True)
    row = ("step_overhead", f"{model}:")
    return inside, step_time(f"{what}: step time", 0.01, row, "every step", "off")


def replicated(latest: Latest) -> float:
    """Share of the second model's parameter bytes that is replicated."""
    found = re.search(r"([0-9.]+)% of", latest.row("step_overhead", f"{MODELS[1]}:").case)
    return float(found[1]) / 100 if found else 0.0


# --- sinks, import, memory -------------------------------------------------------------------------


def sinks_inside(latest: Latest) -> float:
    """Share of a step that every sink adds inside tpwatch."""
    without, every = (latest.row(SINKS, INSIDE, mode) for mode in ("every step", "every step, every sink"))
    return (every.median - without.median) / latest.row(SINKS, INSIDE, "a step, no sink").median


def why_sinks(latest: Latest) -> str:
    """Where that goes, from the note of the run."""
    said = re.search(r"Every sink adds: (.*)\.$", latest.row(SINKS, INSIDE).note)
    return said[1] if said else ""


def optional_packages(latest: Latest) -> float:
    """Number of optional packages that were imported."""
    found = re.search(r"tpwatch imported: (.*)\.$", latest.row("import", "seconds").note)
    return 0.0 if found is None or found[1] == "none" else float(len(found[1].split(",")))


def why_import(latest: Latest) -> str:
    """The bytes that have to be read."""
    kilobytes = latest.row("import", "seconds", IMPORT).moved / 1e3
    return f"{kilobytes:.0f} kB of compiled modules are read and executed" if kilobytes else "modules were not compiled"


def memory_facts(latest: Latest, pattern: str) -> float:
    """The largest of the figures of one kind in the note on memory."""
    found = re.findall(pattern, latest.row("scale_memory", "building").note)
    return max(float(figure.replace(",", "")) for figure in found)


def why_memory(latest: Latest) -> str:
    """The size at which it stays."""
    most = memory_facts(latest, r"grew by ([\d,]+)")
    return f"allocated at attach; the process grows by {most:,.0f} bytes a replica at most"


DTYPES = ("float32", "bfloat16")
GOALS = (
    fingerprint("64 MiB float32", CHECK, 10, beside_megatron),
    fingerprint("64 MiB float32", SHA1, 10, beside_sha1),
    fingerprint("64 MiB bfloat16", CHECK, 20, beside_megatron),
    fingerprint("64 MiB bfloat16", SHA1, 20, beside_sha1),
    *(fingerprint(f"{size} {dtype}", SUM, 0.5, beside_sum) for size in NEAR for dtype in DTYPES),
    *(exchange(ranks, "3,000 x 4 KiB", 500) for ranks in (2, 4)),
    *(exchange(ranks, "64 MiB", 15) for ranks in (2, 4)),
    *overhead(MODELS[0]),
    *overhead(MODELS[1]),
    Goal(
        what="every step checked, either model, beside the least cost that others publish (AEGIS)",
        limit=0.0086,
        read=lambda latest: max(in_the_hooks(model)(latest) for model in MODELS),
        why=lambda _: "the dearer of both models, inside tpwatch",
        show=percent,
        most=True,
    ),
    Goal(
        what="a check of 3,000 parameters, beside AutoModel's replica sync",
        limit=0.033,
        read=lambda latest: latest.row("step_overhead_host", "a check", "3,000 parameters").median,
        why=lambda _: "over all three points; the checks above say what it consists of",
        show=duration,
        most=True,
    ),
    Goal("replicated share of the second model", 0.05, replicated, lambda _: "", percent),
    Goal(
        what="every step checked, on GPUs",
        limit=0.001,
        read=None,
        why=lambda _: "needs a card that trains; `gpu.py` measures speed, launch and waiting",
        show=percent,
        most=True,
    ),
    Goal(
        what="`import tpwatch` beyond torch",
        limit=0.03,
        read=lambda latest: latest.row("import", "seconds", IMPORT).median,
        why=why_import,
        show=duration,
        most=True,
    ),
    Goal("optional packages imported by it", 0, optional_packages, lambda _: "", count, most=True),
    Goal(
        what="bytes of tensors added by 30 more checks",
        limit=0,
        read=lambda latest: memory_facts(latest, r"checks added ([\d,]+)"),
        why=why_memory,
        show=count,
        most=True,
    ),
    Goal("every sink on: what they add inside tpwatch", 0.001, sinks_inside, why_sinks, percent, most=True),
    step_time(
        "every sink on: what they add to the step time", 0.001, (SINKS, "GPT"), "every step, every sink", "every step"
    ),
    Goal(
        what="a report on 5,000 parameters loads in the browser",
        limit=2.0,
        read=None,
        why=lambda _: "asserted in Chromium, by the page's own clock: `tests/browser/test_report_in_chromium.py`",
        show=duration,
        most=True,
        verdict="tested",
    ),
)
"""All goals that have a number."""
