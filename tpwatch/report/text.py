"""A run for people to read in a terminal: verdict, findings with their evidence, open questions.

Formats a `Summary` and its timeline; decides nothing. Plain text, unless colour is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from tpwatch.errors import printable
from tpwatch.records import Finding, Summary
from tpwatch.report.summary import UNMEASURED, StepRow, equal_copies
from tpwatch.report.table import NOT_MEASURED, measure, number, some, table

RED, YELLOW, GREEN, BOLD, RESET = "\033[31m", "\033[33m", "\033[32m", "\033[1m", "\033[0m"
COLOURS = {
    "error": RED,
    "warning": YELLOW,
    "info": BOLD,
    "faults": RED,
    "clean": GREEN,
    "nothing-checked": YELLOW,
}

SPREADING = frozenset({"drift", "missing-reduce", "init-mismatch", "external-write"})
"""Kinds whose copies move apart: their course over the steps is shown."""

EDGE_ROWS = 15
"""Rows shown from each end of a long timeline."""


def render(summary: Summary, steps: Sequence[StepRow] = (), *, title: str, color: bool) -> str:
    """The report as text; `title` names the run, `steps` is its timeline."""
    causes = [f for f in summary.findings if f.role == "cause"]
    lines = [
        *_head(summary, title, color=color),
        *_findings("Faults", [f for f in causes if f.counts], summary, color=color),
        *_findings("For information", [f for f in causes if not f.counts], summary, color=color),
        *_orphans(summary),
        *_timeline(summary, steps),
        *_not_claimed(summary),
        *_section("Notes", [printable(note) for note in summary.notes]),
        *_overhead(summary),
    ]
    return "\n".join(lines)


def verdict_line(summary: Summary) -> str:
    """Verdict, how many faults of what kinds, and how much was checked, on one line."""
    causes = summary.causes
    kinds = ", ".join(sorted({f.kind for f in causes}))
    found = f": {_count(len(causes), 'fault')} ({kinds})" if causes else ""
    checked = f"{_count(summary.steps_checked, 'step')} checked"
    return f"{summary.verdict}{found}; {checked}, {_count(summary.replicas, 'replica')}"


# ---------------------------------------------------------------------------------------- parts


def _head(summary: Summary, title: str, *, color: bool) -> Iterator[str]:
    yield f"tpwatch report: {printable(title)}"
    yield f"Verdict: {_paint(verdict_line(summary), summary.verdict, color=color)}"
    if summary.groups:
        yield f"Replica groups: {some(summary.groups, 16)}"
    if summary.aborted_at is not None:
        yield f"tpwatch stopped the run at step {summary.aborted_at}."


def _findings(heading: str, findings: Sequence[Finding], summary: Summary, *, color: bool) -> Iterator[str]:
    """One block per finding; the advice once for neighbours of the same kind."""
    if not findings:
        return
    yield from ("", f"{heading} ({len(findings)})")
    for _, alike in groupby(findings, key=lambda f: (f.kind, f.severity, f.advice)):
        *_, last = block = list(alike)
        for finding in block:
            yield ""
            label = f"{finding.severity.upper()} {finding.kind} [{finding.code}]"
            yield f"  {_paint(label, finding.severity, color=color)} {printable(finding.parameter)}"
            yield from (f"      {line}" for line in _facts(finding))
            yield from _consequences(finding, summary)
        yield f"      advice: {printable(last.advice)}"


def _facts(finding: Finding) -> Iterator[str]:
    """What was seen of one finding, most telling first."""
    yield f"seen: {printable(finding.observed)}; expected: {printable(finding.expected)}"
    yield (
        f"when: {_steps(finding)}, at {finding.point}, "
        f"on ranks {_ranks(finding.ranks)}; confidence {finding.confidence:.2f}"
    )
    if finding.ratio is not None:
        yield f"gradient norm after / before the reduction: {number(finding.ratio)}"
    if equal_copies(finding):
        yield "copies: equal on all ranks, max abs difference 0. That is the point of this finding:"
        yield "        comparing copies cannot see it, only the step from before to after can"
    elif finding.max_abs > 0.0:
        largest, relative = number(finding.max_abs), number(finding.max_rel)
        yield f"copies: max abs difference {largest}, max rel {relative}"
    yield from _rank_facts(finding)


def _rank_facts(finding: Finding) -> Iterator[str]:
    if finding.odd_ranks:
        yield f"odd ranks, outvoted by the others: {_ranks(finding.odd_ranks)}"
    for key, text in (
        ("zero_ranks", "gradient exactly zero on ranks"),
        ("absent_ranks", "no gradient on ranks"),
    ):
        if finding.evidence.get(key):
            yield f"{text}: {_ranks(finding.evidence[key])}"
    for point in ("param", "grad_post"):
        camps = finding.evidence.get(f"camps_{point}", ())
        if any(len(camp) > 1 for camp in camps):  # else every rank stands alone
            yield f"camps of equal ranks at {point}: {' | '.join(_ranks(camp) for camp in camps)}"
    if "threshold" in finding.evidence:
        yield f"past your threshold: {printable(str(finding.evidence['threshold']))}"
    if "values_elsewhere" in finding.evidence:
        yield "values elsewhere had already moved apart, hence the lower confidence"


def _consequences(cause: Finding, summary: Summary) -> Iterator[str]:
    """Parameters that differ because of this cause, in one line."""
    names = [f.parameter for f in summary.findings if _follows(f) == cause.parameter]
    first = next((f for f in summary.findings if f.parameter == cause.parameter), cause)
    if names and first is cause:
        yield f"      consequences ({len(names)}): {some(names)}"


def _follows(finding: Finding) -> str | None:
    return finding.caused_by if finding.role == "consequence" else None


def _orphans(summary: Summary) -> list[str]:
    """Consequences whose cause is not in this summary."""
    causes = {f.parameter for f in summary.findings if f.role == "cause"}
    left = [f for f in summary.findings if f.role == "consequence" and f.caused_by not in causes]
    lines = [f"{f.kind}: {printable(f.parameter)}, {_steps(f)}" for f in left]
    return _section("Consequences of causes elsewhere", lines)


def _timeline(summary: Summary, steps: Sequence[StepRow]) -> list[str]:
    """How many copies differ at each step, and by how much, where that is what was found."""
    if not any(f.kind in SPREADING for f in summary.findings):
        return []
    rows = [
        (
            str(row.step),
            *(str(row.differing.get(point, 0)) for point in ("param", "grad_pre", "grad_post")),
            measure(row.max_abs),
            measure(row.max_rel),
        )
        for row in steps
    ]
    if len(rows) > 2 * EDGE_ROWS:
        rows = [*rows[:EDGE_ROWS], ("...",) * 6, *rows[-EDGE_ROWS:]]
    headers = ("step", "values differ", "gradients before", "after", "max abs", "max rel")
    heading = "Replicas not bit-identical, per step (partial gradients differ before by design)"
    unknown = [f"  {NOT_MEASURED}: {UNMEASURED}"] if any(NOT_MEASURED in row for row in rows) else []
    return ["", heading, *table(headers, rows, "  "), *unknown]


def _not_claimed(summary: Summary) -> list[str]:
    """What the verdict does not cover."""
    unwatched = [f"{printable(name)}: {printable(why)}" for name, why in summary.not_watched]
    return [
        *_names("Not exercised: the gradient was never seen non-zero", summary.not_exercised),
        *_names("Unverified: which reduction was applied is not known", summary.unverified),
        *_section(f"Not watched ({len(unwatched)})", _shortened(unwatched)),
    ]


def _overhead(summary: Summary) -> Iterator[str]:
    cost = summary.overhead
    if not cost:
        return
    yield ""
    yield (
        f"Overhead: {1e3 * cost['check_seconds_mean']:.2f} ms a check, "
        f"{100 * cost['step_fraction']:.2f} % of the checked steps; per check "
        f"{number(cost['collectives_per_check'])} collectives, "
        f"{number(cost['deep_collectives_per_check'])} more for drill-down"
    )


# --------------------------------------------------------------------------------------- pieces


def _names(heading: str, names: Sequence[str]) -> list[str]:
    return _section(f"{heading} ({len(names)})", [some(names)] if names else [])


def _section(heading: str, lines: Sequence[str]) -> list[str]:
    return ["", heading, *(f"  {line}" for line in lines)] if lines else []


def _shortened(lines: Sequence[str], limit: int = 12) -> list[str]:
    more = [f"... and {len(lines) - limit} more"] if len(lines) > limit else []
    return [*lines[:limit], *more]


def _steps(finding: Finding) -> str:
    seen = f"{_count(finding.count, 'check')} up to step {finding.last_step}"
    return f"since step {finding.first_step}, {seen}"


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _paint(text: str, what: str, *, color: bool) -> str:
    return f"{COLOURS[what]}{text}{RESET}" if color else text
