"""The evidence of one finding in pictures: norms per rank, who agrees with whom, the course over steps.

Shows what the run recorded and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tpwatch.records import Finding
from tpwatch.report.charts import Bar, Series, bars, lines
from tpwatch.report.html_data import RunView
from tpwatch.report.markup import Html, el
from tpwatch.report.summary import equal_copies
from tpwatch.report.table import number

TIMES = "\N{MULTIPLICATION SIGN}"

SHORTENED = 3
"""Ranks in a row from which on only the ends are named."""

BARS_SHOWN = 16
"""Ranks whose norms are drawn; the rest is counted."""

CERTAINTY = ((0.95, "as sure as a check can be"), (0.8, "sure"), (0.6, "likely"), (0.0, "tentative"))
"""Least confidence and what it is called."""

POINTS = {"param": "values", "grad_post": "reduced gradients"}
"""Observation points at which camps are recorded, and what is compared there."""


def evidence(finding: Finding, view: RunView) -> Html:
    """All exhibits of a finding and its facts in words."""
    shown = [*_norms(finding, view), *_presence(finding), *_copies(finding), *_course(finding, view)]
    exhibits = el("div", shown, class_="exhibits") if shown else ""
    return el("div", exhibits, el("dl", list(_facts(finding)), class_="facts"), class_="evidence")


def certainty(confidence: float) -> str:
    """A confidence in words and as a number."""
    words = next((words for least, words in CERTAINTY if confidence >= least), CERTAINTY[-1][1])
    return f"{words} ({confidence:.2f})"


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as in `0-3, 8`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) >= SHORTENED else ", ".join(map(str, r)) for r in runs)


def count(number_of: int, noun: str) -> str:
    """A number with its noun."""
    return f"{number_of:,} {noun}" if number_of == 1 else f"{number_of:,} {noun}s"


# -------------------------------------------------------------------------------------- exhibits


def _exhibit(title: str, picture: Html, caption: str, *, small: bool = False) -> Html:
    """A picture under its title; two small ones stand side by side."""
    return el(
        "figure", el("figcaption", el("b", title), el("span", caption)), picture, class_="small" if small else None
    )


def _norms(finding: Finding, view: RunView) -> Iterator[Html]:
    """Bars per rank before and after the reduction, or their ratio where norms are not known."""
    for group, facts in _by_group(finding, view):
        before, after = facts.get("norms_pre", ()), facts.get("norms_post", ())
        ranks = view.ranks.get(group, finding.ranks)
        if before and len(before) == len(after) == len(ranks):
            yield _norm_bars(ranks, before, after, group if "by_group" in finding.evidence else "")
            return
    if finding.ratio is not None:
        picture = bars(
            (Bar("before", 1.0), Bar("after", finding.ratio, strong=True)),
            f"Gradient norm after the reduction, relative to before: {number(finding.ratio)}",
        )
        yield _exhibit(f"Gradient norm {TIMES} {number(finding.ratio)}", picture, "after / before the reduction")


def _by_group(finding: Finding, view: RunView) -> list[tuple[str, Mapping[str, Any]]]:
    """(group, its evidence): several if the finding was merged of several groups."""
    several = finding.evidence.get("by_group")
    if isinstance(several, Mapping):
        return [(str(group), facts) for group, facts in several.items() if isinstance(facts, Mapping)]
    own = next((group for group, ranks in view.ranks.items() if ranks == finding.ranks), finding.group)
    return [(own, finding.evidence)]


def _norm_bars(ranks: Sequence[int], before: Sequence[float], after: Sequence[float], group: str) -> Html:
    items = [
        bar
        for rank, pre, post in list(zip(ranks, before, after, strict=True))[:BARS_SHOWN]
        for bar in (Bar(f"rank {rank}, before", _finite(pre)), Bar("after", _finite(post), strong=True))
    ]
    where = f" in group {group}" if group else ""
    more = f"; {len(ranks) - BARS_SHOWN} more ranks" if len(ranks) > BARS_SHOWN else ""
    caption = f"before and after the reduction{where}{more}"
    return _exhibit(_factor(before, after), bars(items, f"Gradient norms {caption}"), caption)


def _factor(before: Sequence[float | None], after: Sequence[float | None]) -> str:
    """What was done to the norms in a title: a factor, if it is the same on every rank."""
    factors = {number(post / pre) if pre and post else "" for pre, post in zip(before, after, strict=True)}
    factor = factors.pop() if len(factors) == 1 else ""
    return f"Gradient norm {TIMES} {factor} on each rank" if factor else "Gradient norm per rank"


def _finite(value: float | None) -> float:
    return float("inf") if value is None else value


def _presence(finding: Finding) -> Iterator[Html]:
    """Which ranks have a gradient, where some have none, or only zeros."""
    for key, word in (("absent_ranks", "no gradient"), ("zero_ranks", "exactly zero")):
        odd = finding.evidence.get(key, ())
        if odd:
            rest = [rank for rank in finding.ranks if rank not in odd]
            camps = [("has a gradient", rest, False), (word, list(odd), True)]
            yield _exhibit("Gradient before the reduction", _camps(camps), "by rank", small=True)


def _copies(finding: Finding) -> Iterator[Html]:
    """Ranks grouped by what they hold bit by bit."""
    if equal_copies(finding):
        picture = _camps([("all equal", finding.ranks, False)])
        yield _exhibit("Copies agree: max abs difference 0", picture, "that is the point of this finding", small=True)
    for point, what in POINTS.items():
        camps = finding.evidence.get(f"camps_{point}", ())
        if len(camps) > 1:
            named = [(f"camp {chr(65 + i % 26)}", camp, i > 0) for i, camp in enumerate(camps[:BARS_SHOWN])]
            alone = all(len(camp) == 1 for camp in camps)
            caption = "every rank has its own" if alone else "ranks of one camp are bit-identical"
            yield _exhibit(f"Camps of {what}", _camps(named), caption, small=True)


def _camps(camps: Sequence[tuple[str, Sequence[int], bool]]) -> Html:
    """Boxes of ranks, each with its name; the last flag marks a box as odd."""
    boxes = [
        el("span", el("i", name), el("span", _named(ranks)), class_="camp odd" if odd else "camp")
        for name, ranks, odd in camps
    ]
    return el("div", boxes, class_="camps")


def _named(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranks_text(ranks)}" if ranks else "no rank"


def _course(finding: Finding, view: RunView) -> Iterator[Html]:
    """How the finding went on, where it was recorded more than once."""
    seen = view.sightings.get(finding.key, ())
    if len(seen) < 2:  # noqa: PLR2004 - one point is no course
        return
    spread = (
        Series("values", [(s.step, s.values) for s in seen]),
        Series("reduced gradients", [(s.step, s.gradients) for s in seen], "dashed"),
    )
    picture = lines([s for s in spread if any(y for _, y in s.points)], _say(spread), log=True)
    if picture:
        yield _exhibit("Spread over steps", picture, "largest elementwise difference as last measured, log scale")
    elif any(s.ratio is not None for s in seen):
        ratio = Series("norm after / before", [(s.step, s.ratio) for s in seen])
        yield _exhibit("Ratio over steps", lines([ratio], _say([ratio])), "gradient norm after / before")


def _say(series: Sequence[Series]) -> str:
    """Lines in words: first and last value of each."""
    parts = []
    for one in series:
        drawn = [(x, y) for x, y in one.points if y is not None]
        if drawn:
            (x0, y0), (x1, y1) = drawn[0], drawn[-1]
            parts.append(f"{one.name}: {number(y0)} at step {x0:g}, {number(y1)} at step {x1:g}")
    return "; ".join(parts)


# ----------------------------------------------------------------------------------------- facts


def _facts(finding: Finding) -> Iterator[Html]:
    """What was seen, in words."""
    yield from _fact("Seen", f"{finding.observed} (expected: {finding.expected})")
    seen = f"{count(finding.count, 'check')} up to step {finding.last_step}"
    yield from _fact("Since", f"step {finding.first_step}, at {finding.point}; {seen}")
    yield from _fact("Groups and ranks", f"{finding.group}: ranks {ranks_text(finding.ranks)}")
    if finding.odd_ranks:
        yield from _fact("Odd ranks", f"{ranks_text(finding.odd_ranks)}, outvoted by the others")
    if finding.max_abs > 0.0:
        spread = f"max abs {number(finding.max_abs)}, max rel {number(finding.max_rel)}"
        yield from _fact("Copies differ by", spread + _elements(finding))
    gradient = finding.evidence.get("gradient")
    if isinstance(gradient, Mapping):
        text = f"{gradient.get('before')} before the reduction; reduction seen: {gradient.get('reduction')}"
        yield from _fact("Gradient", text)
    if "exact" in finding.evidence:
        exact = finding.evidence["exact"]
        yield from _fact("Measured", "on the elements themselves" if exact else "estimated from sketches")
    if "threshold" in finding.evidence:
        yield from _fact("Past your threshold", str(finding.evidence["threshold"]))
    if finding.role == "consequence":
        yield from _fact("Follows from", str(finding.caused_by))
    doubted = "; values elsewhere had already moved apart" if "values_elsewhere" in finding.evidence else ""
    yield from _fact("Confidence", certainty(finding.confidence) + doubted)


def _elements(finding: Finding) -> str:
    """How many elements differ, as last measured."""
    for point, what in POINTS.items():
        spread = finding.evidence.get(f"spread_{point}")
        if isinstance(spread, Mapping) and spread.get("differing"):
            return f"; {spread['differing']:,} of {spread['elements']:,} elements of the {what}"
    return ""


def _fact(name: str, value: str) -> tuple[Html, Html]:
    return el("dt", name), el("dd", value)
