"""One card per kind of fault: what it means, what to do, how sure it is, and its evidence.

Explanations come from the rules; findings of one kind share theirs. Consequences are folded under
the cause that they follow from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tpwatch.diagnose.rules import BY_KIND
from tpwatch.records import SEVERITIES, Finding
from tpwatch.report.html_data import RunView
from tpwatch.report.html_evidence import TIMES, certainty, count, evidence, ranks_text
from tpwatch.report.markup import Child, Html, dotted, el
from tpwatch.report.summary import equal_copies
from tpwatch.report.table import number

EVIDENCE_SHOWN = 7
"""Findings of a card with their evidence; that of others opens in the list of parameters."""

NAMES_SHOWN = 50
"""Consequences named in a card."""

ALL_EQUAL = (
    "The copies agree on every rank: max abs difference 0. That is the point of this finding. Comparing copies"
    " cannot see it; only the step from before the reduction to after it can."
)


def cards(view: RunView) -> Html:
    """All findings that are causes, by kind; what is only information comes last."""
    causes = [f for f in view.summary.findings if f.role == "cause"]
    kinds = dict.fromkeys(f.kind for f in causes)
    by_kind = [[f for f in causes if f.kind == kind] for kind in kinds]
    faults = [alike for alike in by_kind if any(f.counts for f in alike)]
    others = [alike for alike in by_kind if not any(f.counts for f in alike)]
    return Html(_section("Faults", faults, view) + _section("For information", others, view) + _orphans(view))


def title_of(kind: str) -> str:
    """The rule's title; the kind itself if a newer version found it."""
    return BY_KIND[kind].title if kind in BY_KIND else kind


def _section(heading: str, by_kind: Sequence[Sequence[Finding]], view: RunView) -> str:
    if not by_kind:
        return ""
    identifier = heading.lower().replace(" ", "-")
    shown = [_card(alike, view) for alike in by_kind]
    return el("section", el("h2", heading), shown, id=identifier)


def _card(alike: Sequence[Finding], view: RunView) -> Html:
    """`alike` are the causes of one kind, most severe first."""
    lead = max(alike, key=lambda f: (SEVERITIES.index(f.severity), f.max_abs, f.ratio or 0.0))
    rest = [f for f in alike if f is not lead]
    body = el("div", el("div", list(_meaning(lead, alike)), class_="meaning"), _exhibits(lead, view), class_="body")
    return el(
        "article",
        _heading(lead, alike),
        body,
        _more(rest, view),
        _consequences(alike, view),
        class_=f"card {lead.severity}",
        id=f"kind-{lead.kind}",
    )


def _heading(lead: Finding, alike: Sequence[Finding]) -> Html:
    first = min(f.first_step for f in alike)
    ranks = sorted({rank for f in alike for rank in f.ranks})
    facts = f"{count(len(alike), 'parameter')}, since step {first}, ranks {ranks_text(ranks)}"
    return el(
        "header",
        el("p", el("span", lead.severity, class_="badge"), el("code", f"{lead.kind} {lead.code}"), class_="tags"),
        el("h3", title_of(lead.kind)),
        el("p", facts + _severities(alike), class_="muted"),
    )


def _severities(alike: Sequence[Finding]) -> str:
    """How many of each severity, if they are not all of one."""
    counts = {severity: sum(f.severity == severity for f in alike) for severity in reversed(SEVERITIES)}
    named = [f"{n} {severity}" for severity, n in counts.items() if n]
    return f" ({', '.join(named)})" if len(named) > 1 else ""


def _meaning(lead: Finding, alike: Sequence[Finding]) -> Iterator[Html]:
    """What it means, what to do, how sure it is: once for all of a kind."""
    rule = BY_KIND.get(lead.kind)
    if any(equal_copies(f) for f in alike):
        yield el("p", ALL_EQUAL, class_="point")
    if rule:
        yield from _passage("What it means", rule.why)
    yield from _passage("What to do", lead.advice, class_="advice")
    if rule:
        yield from _passage("Likely causes", rule.causes)
    low, high = (pick(f.confidence for f in alike) for pick in (min, max))
    sure = certainty(high) if low == high else f"{certainty(low)} to {certainty(high)}"
    seen = f" It was seen in {count(max(f.count for f in alike), 'check')}."
    yield from _passage("How sure", f"{sure[0].upper()}{sure[1:]}.{seen}")
    if rule:
        yield from _passage("What it cannot tell", rule.cannot_tell)


def _passage(heading: str, text: str, class_: str | None = None) -> tuple[Html, Html]:
    pieces: list[Child] = [el("code", part) if i % 2 else part for i, part in enumerate(text.split("`"))]
    return el("h4", heading), el("p", pieces, class_=class_)


def _exhibits(lead: Finding, view: RunView) -> Html:
    return el("div", el("h4", "Evidence: ", dotted(lead.parameter)), evidence(lead, view))


def _more(rest: Sequence[Finding], view: RunView) -> Child:
    """The other findings of a card, closed."""
    folded = [
        el("details", el("summary", dotted(f.parameter), el("span", _brief(f), class_="muted")), evidence(f, view))
        for f in rest[:EVIDENCE_SHOWN]
    ]
    if len(rest) <= EVIDENCE_SHOWN:
        return folded
    everything = f"{len(rest) - EVIDENCE_SHOWN:,} more of this kind: show all in the list"
    button = el("button", everything, type="button", class_="link", data_query=rest[0].kind, data_status="all")
    return [*folded, el("p", button, class_="more")]


def _brief(finding: Finding) -> str:
    """Its most telling number."""
    since = f"since step {finding.first_step}"
    if finding.role == "cause":
        since = f"{finding.severity}, {since}"
    if finding.max_abs > 0.0:
        return f"{since}, max abs {number(finding.max_abs)}"
    return since if finding.ratio is None else f"{since}, {TIMES} {number(finding.ratio)}"


def _consequences(alike: Sequence[Finding], view: RunView) -> Child:
    """Parameters that differ because those of this card do."""
    causes = {f.parameter for f in alike}
    first = {f.parameter: f.kind for f in reversed(view.summary.findings) if f.role == "cause"}
    mine = {name for name in causes if first[name] == alike[0].kind}  # one cause, one card
    following = [f for f in view.summary.findings if f.role == "consequence" and f.caused_by in mine]
    heading = f"{count(len(following), 'consequence')}: differing only because of the above, no faults themselves"
    return _folded(heading, following) if following else ""


def _orphans(view: RunView) -> str:
    causes = {f.parameter for f in view.summary.findings if f.role == "cause"}
    left = [f for f in view.summary.findings if f.role == "consequence" and f.caused_by not in causes]
    if not left:
        return ""
    return el("section", el("h2", "Consequences of causes elsewhere"), _folded(count(len(left), "parameter"), left))


def _folded(heading: str, findings: Sequence[Finding]) -> Html:
    items = [el("li", dotted(f.parameter), el("span", _brief(f), class_="muted")) for f in findings[:NAMES_SHOWN]]
    if len(findings) > NAMES_SHOWN:
        items.append(el("li", f"and {len(findings) - NAMES_SHOWN:,} more, in the list of parameters"))
    return el("details", el("summary", heading), el("ul", items, class_="names"), class_="consequences")
