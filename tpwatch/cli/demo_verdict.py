"""Was a fault of the catalogue named as it should be? A summary against what its entry says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tpwatch.errors import printable
from tpwatch.lab.catalog import Fault
from tpwatch.records import Finding, Summary
from tpwatch.report.table import number, table

RATIO_TOLERANCE = 1e-3
HEADERS = ("fault", "named as", "parameter", "first step", "ratio / max abs", "verdict")


@dataclass(frozen=True, slots=True)
class Judged:
    """One entry of the catalogue after its run."""

    fault: Fault
    causes: tuple[Finding, ...]
    problems: tuple[str, ...]
    """What is not as expected; empty if all is."""

    @property
    def row(self) -> tuple[str, ...]:
        """Cells below `HEADERS`."""
        verdict = "unexpected" if self.problems else "as expected"
        if not self.causes:
            return (self.fault.name, "-", "-", "-", "-", verdict)
        first = min(self.causes, key=lambda f: f.first_step)
        more = f" and {len(self.causes) - 1} more" if len(self.causes) > 1 else ""
        return (
            self.fault.name,
            ", ".join(sorted({f.kind for f in self.causes})),
            f"{printable(first.parameter)}{more}",
            str(first.first_step),
            _measure(self.causes),
            verdict,
        )


def judge(fault: Fault, summary: Summary, names: Sequence[str], *, tp: int, fixed: bool = False) -> Judged:
    """Compare a run with its entry; `names` are the parameters that were watched."""
    causes = tuple(f for f in summary.findings if f.role == "cause")
    if fixed or fault.kind is None:
        return Judged(fault, causes, tuple(_unclean(summary)))
    problems = [*_kinds(fault, causes), *_parameters(fault, causes, names)]
    problems += [p for finding in causes for p in _measures(fault, finding, names, tp)]
    if summary.verdict != "faults":
        problems.append(f"the verdict is {summary.verdict}")
    return Judged(fault, causes, tuple(problems))


def closing_table(judged: Sequence[Judged]) -> str:
    """One row per fault, and below it what was unexpected."""
    lines = table(HEADERS, [one.row for one in judged])
    lines += [f"{one.fault.name}: {problem}" for one in judged for problem in one.problems]
    return "\n".join(lines)


def _unclean(summary: Summary) -> Iterator[str]:
    """A healthy run is clean, and silent too: not even information."""
    if summary.verdict != "clean":
        yield f"the verdict is {summary.verdict}, not clean"
    for finding in summary.findings:
        yield f"finding on a healthy run: {finding.kind} of {printable(finding.parameter)}"


def _kinds(fault: Fault, causes: Sequence[Finding]) -> Iterator[str]:
    for kind in sorted({f.kind for f in causes} - {str(fault.kind)}):
        yield f"named {kind}, not {fault.kind}"
    if not causes:
        yield f"no cause was named, {fault.kind} was expected"


def _parameters(fault: Fault, causes: Sequence[Finding], names: Sequence[str]) -> Iterator[str]:
    if not fault.faulty:
        return
    expected, found = set(fault.first_steps(names)), {f.parameter for f in causes}
    yield from (f"not named: {printable(name)}" for name in sorted(expected - found))
    yield from (f"named though healthy: {printable(name)}" for name in sorted(found - expected))


def _measures(fault: Fault, finding: Finding, names: Sequence[str], tp: int) -> Iterator[str]:
    """First step and ratio of one cause."""
    step = fault.first_steps(names).get(finding.parameter)
    # What is seen in the values is labelled with the update that made them: 0 for the initial ones.
    if step is not None and finding.first_step != step - (finding.point == "param"):
        yield f"{printable(finding.parameter)}: first step {finding.first_step}, not {step}"
    ratio = fault.ratio(tp)
    if ratio is None:
        return
    if finding.ratio is None or abs(finding.ratio - ratio) > RATIO_TOLERANCE:
        yield f"{printable(finding.parameter)}: ratio {finding.ratio}, not {ratio:g}"


def _measure(causes: Sequence[Finding]) -> str:
    """The ratio where copies were multiplied, else the largest difference between copies."""
    ratios = [f.ratio for f in causes if f.ratio is not None and f.kind == "double-reduce"]
    if ratios:
        return f"x{number(max(ratios))}"
    largest = max(f.max_abs for f in causes)
    return number(largest) if largest > 0.0 else "-"
