"""Run directories to make reports of, written by the package's own writer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.unit._samples import finding, plan, step_report
from tpwatch.config import Config
from tpwatch.export.jsonl import RunLog
from tpwatch.records import Finding, StepReport, WatchPlan

HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "</script x",
    "<!--<script>",
    '"><img src=x onerror="document.title=\'owned\'">',
    "x' onmouseover='document.title=1' y='",
    "</style><style>*{display:none}",
    "javascript:document.title='owned'",
    "&lt;b&gt;&amp;",
    "reversed \u202e name",
    "bell \x07 and \ud800 half",
)
"""Names that would break out of a script, a comment, an attribute, a style sheet or a line."""


def write_run(
    directory: Path,
    watched: WatchPlan,
    *,
    findings: Iterable[tuple[int, Finding]] = (),
    checks: Sequence[StepReport] = (),
    **other: Any,
) -> Path:
    """A run of one replica group that ended in order; findings stand with the step they were written at.

    Other parts are `config`, and the names that are `not_exercised` or `unverified`.
    """
    log = RunLog(directory, watched.group, "first")
    log.start(watched, 0, other.get("config", Config()), versions={"torch": "2.13.0"})
    for check in checks:
        log.check(check)
    for step, found in findings:
        log.finding(step, found)
    log.status(len(checks), other.get("not_exercised", ()), other.get("unverified", ()))
    log.end(len(checks))
    log.close()
    return directory


def steps(number: int, **changes: object) -> list[StepReport]:
    """Checked steps from 1 on."""
    return [step_report(step, **changes) for step in range(1, number + 1)]


def hostile_run(directory: Path) -> Path:
    """Every hostile text stands everywhere a model or a user can put one."""
    found = [
        finding(
            parameter=name,
            advice=name,
            observed=name,
            expected=name,
            group=name,
            evidence={"threshold": name, "gradient": {"before": name, "reduction": name}},
        )
        for name in HOSTILE
    ]
    followers = [finding(kind="drift", parameter=f"{n}.b", role="consequence", caused_by=n) for n in HOSTILE]
    watched = plan(*HOSTILE, not_watched=tuple((f"{name}.c", name) for name in HOSTILE))
    return write_run(
        directory,
        watched,
        findings=[(2, f) for f in (*found, *followers)],
        checks=steps(2),
        not_exercised=[f"{name}.d" for name in HOSTILE],
        unverified=[f"{name}.e" for name in HOSTILE],
        config=Config(out=HOSTILE[0]),
    )


def large_run(directory: Path, parameters: int = 5000) -> Path:
    """Many parameters over many layers, a fifth of them faulty, half of the rest following."""
    names = [f"decoder.layers.{i // 25}.block_{i % 25}.layernorm.weight" for i in range(parameters)]
    faulty, following = names[::5], names[1::10]
    evidence = {
        "gradient": {"before": "partials", "reduction": "none"},
        "exact": True,
        "norms_pre": [0.25, 0.5],
        "norms_post": [0.25, 0.5],
        "camps_param": [[0], [1]],
        "spread_param": {"max_abs": 0.01, "max_rel": 0.5, "l2": 0.1, "differing": 64, "elements": 64},
    }
    missing = {"kind": "missing-reduce", "code": "TPW103", "ratio": None, "evidence": evidence}
    found = [
        (step, finding(parameter=name, max_abs=1e-6 * (at + 1) * step, last_step=step, count=step, **missing))
        for at, name in enumerate(faulty)
        for step in (3, 6, 12)
    ]
    found += [
        (12, finding(parameter=name, role="consequence", caused_by=faulty[0], max_abs=1e-7, **missing))
        for name in following
    ]
    differing = {"param": len(faulty), "grad_pre": len(faulty), "grad_post": len(faulty)}
    return write_run(
        directory, plan(*names), findings=found, checks=steps(400, differing=differing, max_abs=0.01, max_rel=0.5)
    )
