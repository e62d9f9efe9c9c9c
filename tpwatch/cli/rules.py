"""Verbs about the rules, `rules` and `explain`, and `docs/rules.md`: one source for all of them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from tpwatch.cli.codes import CLEAN
from tpwatch.cli.output import say
from tpwatch.config.fields import nearest
from tpwatch.diagnose.rules import RULES, RuleDoc
from tpwatch.errors import ConfigError
from tpwatch.export.jsonl import encode
from tpwatch.report.table import table

SECTIONS = (
    ("signal", "Signal"),
    ("why", "Why it matters"),
    ("causes", "Likely causes"),
    ("cannot_tell", "What it cannot tell"),
    ("example", "Example"),
    ("next_step", "Next step"),
)
"""Field and heading of each section, in reading order."""

PREAMBLE = """\
# Rules

Generated from `tpwatch/diagnose/rules.py` by `scripts/generate_rules_doc.py`; do not edit.
`tpwatch explain CODE` shows the same in a terminal. Codes and kinds are stable: they are added,
never renamed. The severity is the highest that the rule gives.
"""


def add_verbs(verbs: Any) -> None:  # noqa: ANN401 - argparse gives its sub-parsers no public type
    """Add `explain` and `rules`."""
    explain = verbs.add_parser("explain", help="what a finding means and what to do about it")
    explain.add_argument("name", metavar="CODE", help="code (TPW104) or kind (double-reduce)")
    explain.add_argument("--format", choices=("text", "json"), default="text")
    explain.set_defaults(verb=_explain)
    rules = verbs.add_parser("rules", help="list all rules")
    rules.add_argument("--format", choices=("text", "json"), default="text")
    rules.set_defaults(verb=_rules)


def _explain(args: argparse.Namespace) -> int:
    by_name = {name: rule for rule in RULES for name in (rule.code, rule.kind)}
    lower = {name.lower(): rule for name, rule in by_name.items()}
    rule = lower.get(args.name.lower())
    if rule is None:
        name, remedy = "explain", nearest(args.name, list(by_name))
        raise ConfigError(name, args.name, "is neither code nor kind of a rule", remedy)
    say(encode(asdict(rule), indent=2) if args.format == "json" else rule_text(rule))
    return CLEAN


def _rules(args: argparse.Namespace) -> int:
    if args.format == "json":
        say(encode([asdict(rule) for rule in RULES], indent=2))
    else:
        say(rules_table(RULES))
    return CLEAN


# ------------------------------------------------------------------------------- rendering


def rules_table(rules: Iterable[RuleDoc]) -> str:
    """One line per rule."""
    rows = [(rule.code, rule.kind, rule.severity, rule.title) for rule in rules]
    return "\n".join(table(("code", "kind", "severity", "what it says"), rows))


def rule_text(rule: RuleDoc) -> str:
    """One rule in full, for a terminal."""
    parts = [f"{rule.code} {rule.kind} ({rule.severity}): {rule.title}"]
    parts += [f"\n{heading}\n  {getattr(rule, name)}" for name, heading in SECTIONS]
    return "\n".join(parts)


def rules_markdown(rules: Iterable[RuleDoc]) -> str:
    """All rules, as `docs/rules.md`."""
    rules = list(rules)
    index = [f"| {_link(r)} | `{r.kind}` | {r.severity} | {r.title} |" for r in rules]
    head = [PREAMBLE, "| Code | Kind | Severity | What it says |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *index, *(line for rule in rules for line in _chapter(rule)), ""])


def _chapter(rule: RuleDoc) -> Iterator[str]:
    yield f"\n## {rule.code} {rule.kind}\n"
    yield f"{rule.title}."
    for name, heading in SECTIONS:
        yield f"\n**{heading}.** {getattr(rule, name)}"


def _link(rule: RuleDoc) -> str:
    """Link to the chapter, by the anchor that Markdown renderers make of its heading."""
    anchor = f"{rule.code} {rule.kind}".lower().replace(" ", "-")
    return f"[{rule.code}](#{anchor})"
