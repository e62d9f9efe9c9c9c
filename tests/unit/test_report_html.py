"""The HTML report: what must be said, that nothing can break out of it, and that it loads nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.commands import run_python
from tests.unit._report_runs import HOSTILE, hostile_run, steps, write_run
from tests.unit._samples import finding, plan, step_report
from tpwatch.cli import main
from tpwatch.config import Config
from tpwatch.diagnose.rules import BY_KIND
from tpwatch.errors import printable
from tpwatch.export.jsonl import RunLog
from tpwatch.records import Finding
from tpwatch.report.events import read_events
from tpwatch.report.html import render_html
from tpwatch.report.html_data import layer_of, natural, view
from tpwatch.report.html_evidence import TIMES, certainty, ranks_text
from tpwatch.report.html_parts import POINTS_DRAWN, thinned
from tpwatch.report.markup import VOID, data_block, el
from tpwatch.report.summary import StepRow


@dataclass
class Element:
    """One element of a parsed page."""

    tag: str
    attributes: dict[str, str | None]
    children: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All text within, spaces collapsed."""
        pieces = (child if isinstance(child, str) else child.text for child in self.children)
        return re.sub(r"\s+", " ", "".join(pieces)).strip()

    def walk(self) -> Iterator[Element]:
        """This element and all below it."""
        yield self
        for child in self.children:
            if isinstance(child, Element):
                yield from child.walk()

    def all(self, tag: str, **attributes: str) -> list[Element]:
        """Elements below by tag and exact attributes."""
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        return [e for e in self.walk() if e.tag == tag and wanted.items() <= e.attributes.items()]

    def one(self, tag: str, **attributes: str) -> Element:
        """The only such element."""
        (element,) = self.all(tag, **attributes)
        return element


class Page(HTMLParser):
    """A tree of elements; a tag that closes something else than what is open is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.root = Element("", {})
        self._open = [self.root]
        self.feed(text)
        self.close()
        assert self._open == [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open an element, unless it is one that has no content."""
        element = Element(tag, dict(attrs))
        self._open[-1].children.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        """Close the innermost element."""
        assert self._open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        """Add text to the innermost element."""
        self._open[-1].children.append(data)


def page(directory: Path) -> Element:
    """The report of a run directory, parsed."""
    return Page(render_html(read_events(directory), "runs/a", "0.1.0")).root


def run_page(path: Path, *findings: Finding, **run: Any) -> Element:
    """The report of a run with these findings."""
    given_plan = plan(*run.pop("names", [f.parameter for f in findings] or ["a"]))
    run.setdefault("checks", steps(6))
    return page(write_run(path, given_plan, findings=[(6, f) for f in findings], **run))


def rows(root: Element) -> list[list[Any]]:
    """What the list of parameters is filled with."""
    parsed: list[list[Any]] = json.loads(root.one("script", id="parameter-data").text)
    return parsed


SPREAD = {"max_abs": 0.5, "max_rel": 0.1, "l2": 0.5, "differing": 3, "elements": 4}
MISSING = finding(
    kind="missing-reduce",
    code="TPW103",
    parameter="decoder.layers.3.q_norm.weight",
    ratio=None,
    max_abs=0.5,
    max_rel=0.1,
    evidence={
        "exact": True,
        "norms_pre": [0.0, 4.0],
        "norms_post": [1.0, 3.0],
        "zero_ranks": [0],
        "camps_param": [[0], [1]],
        "spread_param": SPREAD,
    },
)


# --------------------------------------------------------------------------------------- verdict


def test_the_verdict_is_the_first_thing_on_the_page(tmp_path: Path) -> None:
    """One main heading, in the first section, and it answers the question."""
    root = run_page(tmp_path, finding(), MISSING)
    heading = root.one("h1")
    assert heading.text == "2 faults found"
    assert heading in root.all("section")[0].walk()


@pytest.mark.parametrize(("checks", "headline"), [(steps(6), "Clean"), ([], "Nothing was checked")])
def test_a_run_without_faults_is_clean_only_if_it_was_checked(tmp_path: Path, checks: Any, headline: str) -> None:
    """Silence is no proof."""
    assert run_page(tmp_path, checks=checks).one("h1").text == headline


def test_a_clean_verdict_says_what_it_does_not_cover(tmp_path: Path) -> None:
    """With a link to the lists."""
    root = run_page(tmp_path, names=["a", "b", "c"], not_exercised=["a"], unverified=["b"])
    link = root.one("section", id="verdict").one("a", href="#not-claimed")
    assert link.text.startswith("2 parameters not covered")


def test_a_stopped_run_says_at_which_step(tmp_path: Path) -> None:
    """The abort is part of the verdict."""
    log = RunLog(tmp_path, "tp-0", "first")
    log.start(plan("a"), 0, Config())
    log.check(step_report(4))
    log.finding(4, finding(parameter="a"))
    log.abort(4)
    log.close()
    assert "stopped the run at step 4" in page(tmp_path).one("section", id="verdict").text


# -------------------------------------------------------------------------------------- findings


def test_a_finding_is_explained_by_its_rule(tmp_path: Path) -> None:
    """What it means, what to do, likely causes, what it cannot tell, and how sure it is."""
    card = run_page(tmp_path, finding(advice="Reduce it once.")).one("article", id="kind-double-reduce")
    rule = BY_KIND["double-reduce"]
    for text in (rule.title, rule.why, rule.causes, rule.cannot_tell, "Reduce it once."):
        assert text.replace("`", "") in card.text
    assert "as sure as a check can be (0.99)" in card.text


def test_a_double_reduction_shows_that_the_copies_agree(tmp_path: Path) -> None:
    """And says that this is the point: no comparison of copies can see it."""
    root = run_page(tmp_path, finding(ratio=2.0, max_abs=0.0))
    card = root.one("article", id="kind-double-reduce")
    assert "max abs difference 0. That is the point" in card.text
    assert "Copies agree: max abs difference 0" in card.text
    assert "All copies agree at every checked step" in root.one("section", id="timeline").text


def test_a_double_reduction_of_copies_that_differ_does_not_claim_they_agree(tmp_path: Path) -> None:
    """Near copies may be summed, too."""
    checks = steps(6, differing={"param": 1})
    assert "agree" not in run_page(tmp_path, finding(max_abs=1e-6), checks=checks).one("main").text.replace(
        BY_KIND["double-reduce"].why, ""
    )


def test_the_ratio_is_drawn_to_scale(tmp_path: Path) -> None:
    """Before is half as long as after, where after is twice as large."""
    root = run_page(tmp_path, finding(ratio=2.0))
    widths = [e.attributes["width"] for e in root.one("article").all("rect") if e.attributes.get("class") != "track"]
    assert widths == ["50.0%", "100.0%"]


def test_norms_are_drawn_per_rank_before_and_after(tmp_path: Path) -> None:
    """On one scale, each with its number."""
    root = run_page(tmp_path, MISSING)
    bars = next(e for e in root.all("div") if e.attributes.get("class") == "bars")
    assert bars.text == "rank 0, before0after1rank 1, before4after3"
    widths = [e.attributes["width"] for e in bars.all("rect") if e.attributes.get("class") != "track"]
    assert widths == ["0.0%", "25.0%", "100.0%", "75.0%"]


def test_norms_that_grew_alike_on_all_ranks_say_by_how_much(tmp_path: Path) -> None:
    """In the title, unless it differs: then each rank has to be read."""
    double = finding(evidence={"norms_pre": [1.5, 1.5], "norms_post": [3.0, 3.0]})
    uneven = replace(MISSING, evidence={"norms_pre": [2.0, 4.0], "norms_post": [1.0, 3.0]})
    root = run_page(tmp_path, double, uneven)
    card, other = (root.one("article", id=f"kind-{kind}") for kind in ("double-reduce", "missing-reduce"))
    figure = card.all("figure")[0]
    assert figure.one("b").text == f"Gradient norm {TIMES} 2 on each rank"
    assert figure.text.endswith("rank 0, before1.5after3rank 1, before1.5after3")
    assert other.all("figure")[0].one("b").text == "Gradient norm per rank"


def test_zero_ranks_and_camps_are_shown(tmp_path: Path) -> None:
    """Who has nothing, and who agrees with whom."""
    text = run_page(tmp_path, MISSING).one("article").text
    assert "exactly zerorank 0" in text
    assert "camp Arank 0camp Brank 1" in text
    assert "3 of 4 elements of the values" in text


def test_the_course_of_a_finding_is_drawn(tmp_path: Path) -> None:
    """One point per time it was recorded, described in words for those who do not see it."""
    grown = replace(MISSING, last_step=9, evidence={**MISSING.evidence, "spread_param": {**SPREAD, "max_abs": 2.0}})
    root = page(write_run(tmp_path, plan("a"), findings=[(6, MISSING), (9, grown)], checks=steps(9)))
    labels = [e.attributes["aria-label"] for e in root.one("article").all("svg", role="img")]
    assert "values: 0.5 at step 6, 2 at step 9" in labels


def test_the_course_of_a_finding_is_broken_where_it_is_beyond_all_bounds(tmp_path: Path) -> None:
    """No line leads past it, as if it had been something in between."""
    course = [
        (step, replace(MISSING, last_step=step, evidence={"spread_param": {**SPREAD, "max_abs": size}}))
        for step, size in ((3, 0.5), (4, 0.6), (6, math.inf), (8, 0.7), (9, 0.8))
    ]
    card = page(write_run(tmp_path, plan("a"), findings=course, checks=steps(9))).one("article")
    (line,) = (e.attributes["d"] or "" for e in card.one("svg", class_="lines").all("path", class_="line solid"))
    assert re.findall("[ML]", line) == ["M", "L", "M", "L"]


def test_consequences_are_folded_under_their_cause(tmp_path: Path) -> None:
    """No card of their own; inside a closed part of the cause's card."""
    follower = finding(kind="drift", parameter="b", role="consequence", caused_by=MISSING.parameter)
    root = run_page(tmp_path, MISSING, follower)
    (card,) = root.all("article")
    folded = next(e for e in card.all("details") if e.attributes.get("class") == "consequences")
    assert "open" not in folded.attributes
    assert folded.all("li")[0].text.startswith("b")
    assert root.one("h1").text == "1 fault found"


def test_a_consequence_without_its_cause_is_still_shown(tmp_path: Path) -> None:
    """Its cause may be in a group that left no file."""
    root = run_page(tmp_path, finding(parameter="b", role="consequence", caused_by="elsewhere"))
    assert "Consequences of causes elsewhere" in root.one("main").text


def test_what_is_only_information_is_no_fault(tmp_path: Path) -> None:
    """It has a section of its own."""
    root = run_page(tmp_path, replace(MISSING, severity="info"))
    assert root.one("h1").text == "Clean"
    assert root.one("section", id="for-information").all("article")
    assert root.all("section", id="faults") == []


def test_a_kind_of_a_newer_version_is_shown_as_it_is(tmp_path: Path) -> None:
    """Without an explanation, with its advice."""
    card = run_page(tmp_path, finding(kind="clip-mismatch", code="TPW999", advice="Do this.")).one("article")
    assert "clip-mismatch TPW999" in card.text
    assert "Do this." in card.text


def test_groups_are_merged_into_one_finding_with_the_norms_of_one(tmp_path: Path) -> None:
    """Ranks of both groups; bars are named after the ranks of the group they come from."""
    for first in (0, 2):
        found = replace(MISSING, ranks=(first, first + 1))
        write_run(tmp_path, plan("a", first_rank=first), findings=[(6, found)], checks=steps(6))
    card = page(tmp_path).one("article")
    assert "ranks 0-3" in card.text
    assert "rank 0, before" in card.text
    assert "in group tp-0" in card.text


def test_a_spread_beyond_all_bounds_is_drawn_without_failing(tmp_path: Path) -> None:
    """NaN and Inf travel as null."""
    infinite = replace(MISSING, max_abs=float("inf"), evidence={**MISSING.evidence, "norms_post": [float("nan"), 1.0]})
    root = run_page(tmp_path, infinite, checks=steps(6, max_abs=float("inf")))
    assert "max abs inf" in root.one("article").text
    assert rows(root)[0][6] == "inf"


@pytest.mark.parametrize(
    ("confidence", "words"),
    [
        (0.99, "as sure as a check can be (0.99)"),
        (0.8, "sure (0.80)"),
        (0.79, "likely (0.79)"),
        (0.3, "tentative (0.30)"),
    ],
)
def test_confidence_is_said_in_words(confidence: float, words: str) -> None:
    """With its number."""
    assert certainty(confidence) == words


@pytest.mark.parametrize(
    ("ranks", "text"), [((0, 1), "0, 1"), ((0, 1, 2, 3), "0-3"), ((7, 0, 1, 2), "0-2, 7"), ((), ""), ((5,), "5")]
)
def test_ranks_in_a_row_are_shortened(ranks: tuple[int, ...], text: str) -> None:
    """From three on."""
    assert ranks_text(ranks) == text


# ---------------------------------------------------------------------------------- other parts


def test_every_parameter_is_listed_with_its_status(tmp_path: Path) -> None:
    """Also those without a finding: silence about a name would be read as a verdict."""
    watched = plan("fine", "idle", "open", MISSING.parameter, not_watched=(("shard", "a shard"),))
    write_run(tmp_path, watched, findings=[(6, MISSING)], checks=steps(6), not_exercised=["idle"], unverified=["open"])
    status = {row[1]: row[0] for row in rows(page(tmp_path))}
    assert status == {
        MISSING.parameter: "fault",
        "open": "unverified",
        "idle": "not exercised",
        "shard": "not watched",
        "fine": "nothing found",
    }


def test_without_a_check_no_parameter_is_called_fine(tmp_path: Path) -> None:
    """Nothing found means that it was looked at."""
    assert [row[0] for row in rows(run_page(tmp_path, names=["a"], checks=[]))] == ["unverified"]


def test_what_is_not_claimed_is_listed_in_full(tmp_path: Path) -> None:
    """Every name, and why it is not watched."""
    idle = [f"idle.{i}" for i in range(70)]
    watched = plan(*idle, not_watched=(("shard", "marked as a shard"),))
    section = page(write_run(tmp_path, watched, checks=steps(1), not_exercised=idle)).one("section", id="not-claimed")
    assert {li.text for li in section.all("li")} == {*idle, "shardmarked as a shard"}


def test_notes_are_shown(tmp_path: Path) -> None:
    """A file that was cut off is one."""
    write_run(tmp_path, plan("a"), checks=steps(1))
    with (tmp_path / "events.tp-0.jsonl").open("a") as file:
        file.write('{"half')
    assert "the last line is cut off" in page(tmp_path).one("section", id="not-claimed").text


def test_the_heat_map_marks_layer_and_steps(tmp_path: Path) -> None:
    """One rectangle over the steps of the finding, in the row of its layer, as dark as its share of the layer."""
    found = replace(MISSING, first_step=2, last_step=3)
    names = [f"decoder.layers.{i}.{part}.weight" for i in range(4) for part in ("q_norm", "k_norm")]
    other = replace(found, parameter=names[0], kind="double-reduce", first_step=1, last_step=4)
    root = run_page(tmp_path, found, other, names=names)
    panel = next(f for f in root.one("section", id="map").all("figure") if f.text.startswith("missing-reduce"))
    cell = panel.one("rect", class_="cell")
    assert (cell.attributes["x"], cell.attributes["width"]) == ("250", "500")
    assert cell.attributes["fill-opacity"] == "0.62"
    assert cell.text == "decoder.layers.3, steps 2 to 3: 1 of 2 parameters"
    height = float(panel.one("rect", class_="ground").attributes["height"] or 0)
    assert 3 * height / 4 <= float(cell.attributes["y"] or 0) < height


def test_the_timeline_is_also_a_table(tmp_path: Path) -> None:
    """For those who cannot or would rather not read a chart."""
    checks = [step_report(1), step_report(2, differing={"param": 3, "grad_post": 2}, max_abs=0.25, max_rel=1e-3)]
    table = run_page(tmp_path, checks=checks).one("section", id="timeline").one("table")
    cells = [[td.text for td in tr.all("td")] for tr in table.one("tbody").all("tr")]
    assert cells == [["1", "0", "0", "0", "0", "0"], ["2", "3", "0", "2", "0.25", "0.001"]]


def test_a_long_timeline_keeps_its_worst_steps() -> None:
    """Fewer points, and none of the peaks is lost."""
    long = [StepRow(step, {"param": 1}, 1.0, 1.0) for step in range(10_000)]
    long[1234] = StepRow(1234, {"param": 9}, 77.0, 5.0)
    thin = thinned(long)
    assert len(thin) <= POINTS_DRAWN + 1
    assert max(row.max_abs for row in thin) == 77.0
    assert max(row.differing["param"] for row in thin) == 9
    assert (thin[0].step, thin[-1].step, thinned(long[:3])) == (0, 9999, long[:3])


def test_settings_that_were_changed_come_first(tmp_path: Path) -> None:
    """And are told from defaults."""
    table = run_page(tmp_path, config=Config(interval=7)).one("section", id="settings").one("table")
    assert table.all("tr")[0].text == "interval7set"
    assert "patience3default" in [tr.text for tr in table.all("tr")]


def test_a_password_in_an_address_is_masked(tmp_path: Path) -> None:
    """Reports are passed around."""
    text = run_page(tmp_path, config=Config(out="s3://user:secret@host/x")).one("section", id="settings").text
    assert "s3://***@host/x" in text
    assert "secret" not in text


def test_overhead_is_shown(tmp_path: Path) -> None:
    """Time, share of the steps and collectives."""
    text = run_page(tmp_path, checks=steps(3, seconds=0.002, step_seconds=0.1)).one("section", id="overhead").text
    assert "Mean check2.00 ms" in text
    assert "Share of the checked steps2.00 %" in text


@pytest.mark.parametrize("prepare", ["empty", "torn"])
def test_a_directory_in_any_state_makes_a_report(tmp_path: Path, prepare: str) -> None:
    """No events at all, or only half a line."""
    if prepare == "torn":
        (tmp_path / "events.tp-0.jsonl").write_text('{"schema": 1, "event"')
    assert page(tmp_path).one("h1").text == "Nothing was checked"


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("decoder.layers.12.mlp.router.weight", "decoder.layers.12"),
        ("model.layers.0.experts.3.weight", "model.layers.0"),
        ("decoder.final_layernorm.weight", "decoder.final_layernorm"),
        ("0.weight", "0"),
        ("(every replicated parameter)", "(every replicated parameter)"),
    ],
)
def test_layers_are_read_from_names(name: str, layer: str) -> None:
    """Up to the first number."""
    assert layer_of(name) == layer


def test_findings_are_in_natural_order(tmp_path: Path) -> None:
    """Layer 2 before layer 10; a more severe one before both."""
    found = [finding(parameter=f"layers.{i}.x") for i in (10, 2)]
    mild = [finding(parameter=f"layers.{i}.x", severity="warning") for i in (1, 3)]
    root = run_page(tmp_path, *mild, *found)
    assert [row[1] for row in rows(root)] == [f"layers.{i}.x" for i in (2, 10, 1, 3)]


def test_layers_are_in_natural_order() -> None:
    """Two comes before ten."""
    assert sorted(["a.10", "a.2", "b", "a"], key=natural) == ["a", "a.2", "a.10", "b"]


# ---------------------------------------------------------------------------------------- safety


def test_names_cannot_break_out(tmp_path: Path) -> None:
    """The only scripts are data and the page's own; no element, handler or style comes from a name."""
    root = page(hostile_run(tmp_path))
    scripts = root.all("script")
    assert [s.attributes.get("type") for s in scripts] == ["application/json", "application/json", None]
    assert len(root.all("style")) == 1
    assert root.all("img") == []
    attributes = {name for element in root.walk() for name in element.attributes}
    assert {name for name in attributes if name.startswith("on") or name == "style"} == set()
    links = [str(a.attributes["href"]) for a in root.all("a")]
    assert [link for link in links if not link.startswith("#")] == []


def test_hostile_names_are_shown_as_they_are(tmp_path: Path) -> None:
    """As text, in the page and in its data; only what is invisible is spelt out."""
    root = page(hostile_run(tmp_path))
    shown = {li.text for li in root.one("section", id="not-claimed").all("li")}
    listed = {row[1] for row in rows(root)}
    for name in HOSTILE:
        assert any(printable(f"{name}.d") in text for text in shown)
        assert printable(name) in listed
    assert "\u202e" not in "".join(listed)


def test_evidence_in_the_data_is_escaped_too(tmp_path: Path) -> None:
    """The script puts it into the page as HTML."""
    for row in rows(page(hostile_run(tmp_path))):
        fragment = Page(row[9] or "").root
        assert {e.tag for e in fragment.walk()} & {"script", "style", "img", "a"} == set()


@given(st.text() | st.sampled_from(HOSTILE))
def test_text_stays_text(text: str) -> None:
    """Whatever it is, a parser reads it back from content, from an attribute and from a data block."""
    element = Page(el("p", text, title=text)).root.one("p")
    assert "".join(str(child) for child in element.children) == printable(text)
    assert element.attributes["title"] == printable(text)
    (content,) = Page(data_block("x", [text])).root.one("script").children
    assert "<" not in content  # neither an end tag nor a comment can begin, whatever a parser makes of it
    assert json.loads(str(content)) == [text]


def test_the_page_loads_nothing_and_runs_only_its_own_script(tmp_path: Path) -> None:
    """A policy with the hash of the one script and the one style sheet, and no address anywhere."""
    root = run_page(tmp_path, finding(), MISSING)
    policy = str(root.one("meta", **{"http-equiv": "Content-Security-Policy"}).attributes["content"])
    for element in (root.all("script")[-1], root.one("style")):
        digest = hashlib.sha256("".join(map(str, element.children)).encode()).digest()
        assert f"'sha256-{base64.b64encode(digest).decode()}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    loads = [
        e
        for e in root.walk()
        if e.tag in {"iframe", "object", "img", "audio", "video", "base"} or "src" in e.attributes
    ]
    assert loads == []
    assert [e.attributes["href"] for e in root.all("link")] == ["data:,"]


def test_the_page_is_accessible_by_structure(tmp_path: Path) -> None:
    """Headings skip no level, ids are unique, and every drawing is described or hidden."""
    follower = finding(kind="drift", parameter="b", role="consequence", caused_by=MISSING.parameter)
    root = run_page(tmp_path, finding(), MISSING, follower)
    levels = [int(e.tag[1]) for e in root.walk() if re.fullmatch(r"h[1-6]", e.tag)]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    ids = [e.attributes["id"] for e in root.walk() if "id" in e.attributes]
    assert len(ids) == len(set(ids))
    for drawing in root.all("svg"):
        described = drawing.attributes.get("role") == "img" and drawing.attributes.get("aria-label")
        assert described or drawing.attributes.get("aria-hidden") == "true"
    targets = {str(a.attributes["href"])[1:] for a in root.all("a")}
    assert targets <= set(ids)
    assert root.one("html").attributes["lang"] == "en"


# -------------------------------------------------------------------------------- command line


def test_the_report_is_written_into_the_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By default; a report of faults is no failure."""
    write_run(tmp_path, plan("a"), findings=[(6, finding(parameter="a"))], checks=steps(6))
    assert main(["report", str(tmp_path), "--html"]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'report.html'}\n"
    assert Page((tmp_path / "report.html").read_text()).root.one("h1").text == "1 fault found"


def test_the_report_can_be_written_elsewhere(tmp_path: Path) -> None:
    """And nothing is left beside it."""
    write_run(tmp_path / "run", plan("a"), checks=steps(1))
    (tmp_path / "out").mkdir()
    assert main(["report", str(tmp_path / "run"), "--html", "--output", str(tmp_path / "out" / "a.html")]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a.html"]
    assert not (tmp_path / "run" / "report.html").exists()


def test_a_place_that_cannot_be_written_is_an_error_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the reason."""
    write_run(tmp_path, plan("a"), checks=steps(1))
    target = tmp_path / "missing" / "a.html"
    assert main(["report", str(tmp_path), "--html", "--output", str(target)]) == 2
    assert capsys.readouterr().err == f"tpwatch: {target}: cannot be written: No such file or directory\n"


def test_a_place_without_the_report_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--output` alone would be ignored silently."""
    assert main(["report", str(tmp_path), "--output", "x.html"]) == 2
    assert "Add --html" in capsys.readouterr().err


def test_an_installed_package_has_style_and_script(tmp_path: Path) -> None:
    """They are data, which packaging leaves out unless it is told."""
    built = ("egg_info", "--egg-base", tmp_path, "build_py", "--build-lib", tmp_path)
    done = run_python("setup.py", "-q", *built)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.glob("tpwatch/report/assets/*")} == {"report.css", "report.js"}


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    """No clock and no chance in it, so that reports can be compared."""
    write_run(tmp_path, plan("a"), findings=[(6, MISSING)], checks=steps(6))
    run = read_events(tmp_path)
    assert render_html(run, "a", "0.1.0") == render_html(run, "a", "0.1.0")
    assert view(run, "a") == view(run, "a")
