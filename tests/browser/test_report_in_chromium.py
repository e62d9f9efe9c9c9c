"""The HTML report in a real browser: what a person sees, types and presses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit._report_runs import HOSTILE, hostile_run, large_run, steps, write_run
from tests.unit._samples import finding, plan, step_report
from tpwatch.cli import main
from tpwatch.errors import printable

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)

LEAST_CONTRAST = 4.5
"""WCAG 2.2, level AA, for text of any size."""

CONTRASTS = """
// Contrast of every text with what is behind it, the lowest per colour pair.
const channels = (text) => text.match(/[\\d.]+/g).map(Number);
const shade = (c) => { c /= 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
const light = (c) => 0.2126 * shade(c[0]) + 0.7152 * shade(c[1]) + 0.0722 * shade(c[2]);
function behind(element) {
  for (let at = element; at; at = at.parentElement) {
    const colour = channels(getComputedStyle(at).backgroundColor);
    if (colour.length < 4 || colour[3] === 1) return colour;
  }
  return [255, 255, 255];
}
const found = [];
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  if (!own || element.closest("svg, script, noscript") || !element.checkVisibility()) continue;
  const [a, b] = [light(channels(getComputedStyle(element).color)), light(behind(element))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  found.push([ratio, element.tagName + "." + element.className]);
}
return found.sort((x, y) => x[0] - y[0]).slice(0, 5);
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One headless browser for the file, with a profile of its own."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def large_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run with 5,000 parameters, made once."""
    return report_on(large_run(tmp_path_factory.mktemp("large")))


@pytest.fixture
def visit(driver: Any, tmp_path: Path) -> Callable[..., Any]:
    """Make a run, report on it as a user does, and open the file."""

    def show(make: Callable[[Path], Path], **screen: Any) -> Any:
        return open_page(driver, report_on(make(tmp_path / "run")), **screen)

    return show


def report_on(directory: Path) -> Path:
    """Write the report of a run directory."""
    assert main(["report", str(directory), "--html"]) == 0
    return directory / "report.html"


def open_page(driver: Any, page: Path, *, dark: bool = False, width: int = 1280) -> Any:
    """Open a page on a screen of some width, under a system that is set to dark or light."""
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    for log in ("browser", "performance"):
        driver.get_log(log)  # whatever an earlier page left
    driver.get(page.as_uri())
    return driver


def small_run(directory: Path) -> Path:
    """Two kinds of fault, a consequence, and parameters about which nothing is claimed."""
    cause = "decoder.layers.0.q_norm.weight"
    spread = {"max_abs": 0.5, "max_rel": 0.1, "l2": 0.5, "differing": 3, "elements": 4}
    evidence = {"exact": True, "norms_pre": [0.0, 4.0], "norms_post": [0.0, 4.0], "spread_param": spread}
    missing = finding(kind="missing-reduce", code="TPW103", parameter=cause, ratio=None, max_abs=0.5, evidence=evidence)
    follower = finding(kind="drift", parameter="b", role="consequence", caused_by=cause, ratio=None, max_abs=1e-3)
    double = [finding(parameter=f"decoder.layers.{i}.conv.weight") for i in range(10)]
    watched = plan(cause, "b", "idle", *(f.parameter for f in double), not_watched=(("shard", "a shard"),))
    differing = {"param": 2, "grad_pre": 3, "grad_post": 2}
    return write_run(
        directory,
        watched,
        findings=[(6, f) for f in (missing, follower, *double)],
        checks=steps(6, differing=differing, max_abs=0.5, max_rel=0.1),
        not_exercised=["idle"],
    )


def sparse_run(directory: Path) -> Path:
    """Values that differ at each of 40 steps, and how far at few of them."""
    checks = [step_report(step, differing={"param": 2}, max_abs=0.5 * (step in {1, 20, 40})) for step in range(1, 41)]
    return write_run(directory, plan("a"), checks=checks)


def names(driver: Any) -> list[str]:
    """Parameters in the list, top to bottom."""
    found: list[str] = driver.execute_script(
        "return [...document.querySelectorAll('#list tbody tr:not(.detail) td:nth-child(2) code')]"
        ".map((one) => one.textContent)"
    )
    return found


def press(driver: Any, *keys: str) -> None:
    """Type into whatever has the focus."""
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(driver).send_keys(*keys).perform()


def requests(driver: Any) -> list[str]:
    """Addresses of everything the page asked for."""
    messages = (json.loads(entry["message"])["message"] for entry in driver.get_log("performance"))
    sent = (m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent")
    return [url for url in sent if not url.startswith("data:")]


# --------------------------------------------------------------------------------------- tests


def test_the_page_shows_verdict_charts_and_list(visit: Callable[..., Any]) -> None:
    """Everything has a size on the screen, and the script has run."""
    driver = visit(small_run)
    for selector in ("#verdict h1", "#timeline svg.lines", "#map svg.heat", "article.card", "#list tbody tr"):
        box = driver.find_element("css selector", selector).rect
        assert box["width"] > 0, selector
        assert box["height"] > 0, selector
    assert driver.find_element("css selector", "h1").text == "11 faults found"
    assert len(names(driver)) == 14


def test_nothing_is_requested_and_nothing_is_complained_about(visit: Callable[..., Any]) -> None:
    """The file itself is all the browser reads; the console stays empty."""
    driver = visit(small_run)
    assert requests(driver) == [driver.current_url]
    assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert driver.get_log("browser") == []


def test_hostile_names_do_nothing(visit: Callable[..., Any]) -> None:
    """They are read as text, also in evidence that is opened; the policy had nothing to stop."""
    driver = visit(hostile_run)
    driver.execute_script("document.querySelectorAll('#list td button').forEach((one) => one.click())")
    driver.execute_script("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    assert "owned" not in driver.title
    assert driver.execute_script("return document.querySelectorAll('img').length") == 0
    assert len(driver.find_elements("css selector", "tr.detail .evidence")) == 2 * len(HOSTILE)
    assert {printable(name) for name in HOSTILE} <= set(names(driver))
    assert driver.get_log("browser") == []


def test_the_filter_narrows_the_list(visit: Callable[..., Any]) -> None:
    """By words of name, kind and code, all of which must occur."""
    driver = visit(small_run)
    press(driver, "/", "tpw104 layers.3")
    assert names(driver) == ["decoder.layers.3.conv.weight"]
    assert "1 of 1 shown" in driver.find_element("id", "shown").text
    press(driver, "nonsense")
    assert names(driver) == []
    assert "Nothing matches" in driver.find_element("id", "shown").text


def test_escape_clears_the_filter_and_then_leaves_it(visit: Callable[..., Any]) -> None:
    """As people expect of a search field."""
    driver = visit(small_run)
    press(driver, "/", "idle")
    assert names(driver) == ["idle"]
    press(driver, "\ue00c")
    assert len(names(driver)) == 14
    assert driver.switch_to.active_element.get_attribute("id") == "filter"
    press(driver, "\ue00c")
    assert driver.switch_to.active_element.get_attribute("id") != "filter"


def test_a_status_can_be_chosen_by_keyboard(visit: Callable[..., Any]) -> None:
    """Chips are radio buttons: tab reaches them, arrows move between them."""
    driver = visit(small_run)
    press(driver, "/", "\ue004", "\ue014")
    assert driver.switch_to.active_element.get_attribute("value") == "fault"
    assert len(names(driver)) == 11
    press(driver, "\ue014")
    assert names(driver) == ["b"]


def test_a_column_sorts_both_ways_and_back(visit: Callable[..., Any]) -> None:
    """Largest first, smallest first, and the order of the report; what has no value stays last."""
    driver = visit(small_run)
    before = names(driver)
    head = driver.find_elements("css selector", "#list th")[6]
    button = head.find_element("css selector", "button")
    button.click()
    assert head.get_attribute("aria-sort") == "descending"
    assert names(driver)[:2] == ["decoder.layers.0.q_norm.weight", "b"]
    button.click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert names(driver)[:2] == ["b", "decoder.layers.0.q_norm.weight"]
    button.click()
    assert head.get_attribute("aria-sort") == "none"
    assert names(driver) == before


def test_names_sort_by_number(driver: Any, large_page: Path) -> None:
    """layers.2 comes before layers.10."""
    open_page(driver, large_page)
    driver.find_elements("css selector", "#list th button")[1].click()
    layers = [int(name.split(".")[2]) for name in names(driver)]
    assert layers == sorted(layers)
    assert layers[0] == 0


def test_evidence_opens_under_its_row(visit: Callable[..., Any]) -> None:
    """By a button that says whether it is open."""
    driver = visit(small_run)
    button = driver.find_element("css selector", "#list tbody button")
    button.click()
    assert button.get_attribute("aria-expanded") == "true"
    assert driver.find_element("css selector", "tr.detail .exhibits").is_displayed()
    button.click()
    assert driver.find_elements("css selector", "tr.detail") == []


def test_a_card_leads_to_all_findings_of_its_kind(visit: Callable[..., Any]) -> None:
    """The list below shows them, filtered."""
    driver = visit(small_run)
    driver.execute_script("document.querySelector('[data-query]').click()")
    assert names(driver) == [f"decoder.layers.{i}.conv.weight" for i in range(10)]


def second_step(driver: Any) -> str:
    """What the timeline reads out at its second step, come to by arrow keys."""
    driver.execute_script("document.querySelector('.timeline').focus()")
    press(driver, "\ue011", "\ue014")
    readout: str = driver.find_element("css selector", ".readout").text
    return readout


def test_the_timeline_reads_out_a_step(visit: Callable[..., Any]) -> None:
    """By arrow keys, for those without a mouse."""
    driver = visit(small_run)
    assert second_step(driver) == "Step 2: 2 values and 2 reduced gradients differ; max abs 0.5, max rel 0.1"


def test_a_step_that_was_not_measured_is_read_out_as_such(visit: Callable[..., Any]) -> None:
    """A 0 would claim that values are equal, right after saying that they differ."""
    driver = visit(sparse_run)
    assert (
        second_step(driver)
        == "Step 2: 2 values and 0 reduced gradients differ; max abs not measured, max rel not measured"
    )


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_what_was_measured_is_seen_on_its_curve(visit: Callable[..., Any], *, dark: bool) -> None:
    """One line from first to last, with dots that are wider than it, in its colour, on all three steps."""
    driver = visit(sparse_run, dark=dark)
    line, dots = driver.execute_script(
        "return ['line', 'dots'].map((kind) => {"
        " const path = document.querySelector(`#timeline figure:last-of-type .lines .${kind}.solid`);"
        " const style = getComputedStyle(path);"
        " return [path.getAttribute('d'), parseFloat(style.strokeWidth), style.stroke, style.strokeLinecap]; })"
    )
    assert (line[0].count("M"), line[0].count("L"), dots[0].count("M")) == (1, 2, 3)
    assert dots[1] >= 2 * line[1]
    assert dots[2:] == [line[2], "round"]


def test_five_thousand_parameters_load_at_once(driver: Any, large_page: Path) -> None:
    """Below 2 s by the page's own clock, and with a small part of the rows only until one scrolls."""
    open_page(driver, large_page)
    timing = driver.execute_script("return performance.getEntriesByType('navigation')[0].toJSON()")
    assert 0 < float(driver.execute_script("return document.documentElement.dataset.readyMs")) < 2000
    assert 0 < timing["loadEventEnd"] < 2000
    assert len(names(driver)) == 100
    driver.execute_script("document.getElementById('more').click()")
    assert len(names(driver)) == 200


def test_filtering_five_thousand_parameters_keeps_up_with_typing(driver: Any, large_page: Path) -> None:
    """A key press costs less than is felt."""
    open_page(driver, large_page)
    took = driver.execute_script(
        "const field = document.getElementById('filter'); field.value = 'layers.19'; const from = performance.now();"
        "field.dispatchEvent(new Event('input')); return performance.now() - from;"
    )
    assert took < 200
    assert all("layers.19" in name for name in names(driver))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(visit: Callable[..., Any], *, dark: bool) -> None:
    """Enough for weak eyes, everything opened."""
    driver = visit(small_run, dark=dark)
    driver.execute_script("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    driver.execute_script("document.querySelectorAll('#list td button').forEach((one) => one.click())")
    lowest = driver.execute_script(CONTRASTS)
    assert len(lowest) == 5
    assert lowest[0][0] >= LEAST_CONTRAST, lowest


def test_dark_is_dark(driver: Any, tmp_path: Path) -> None:
    """The page follows the system's preference."""
    background = "return getComputedStyle(document.body).backgroundColor"
    page = report_on(small_run(tmp_path))
    colours = [open_page(driver, page, dark=dark).execute_script(background) for dark in (False, True)]
    light, dark = ([int(part) for part in colour[4:-1].split(",")] for colour in colours)
    assert min(light) > 200
    assert max(dark) < 60


@pytest.mark.parametrize("width", [360, 1920])
def test_nothing_sticks_out_sideways(visit: Callable[..., Any], width: int) -> None:
    """On a phone and on a wide screen, with names of any length."""
    driver = visit(hostile_run, width=width)
    driver.execute_script("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width


def test_print_opens_lists_and_hides_controls(visit: Callable[..., Any]) -> None:
    """Paper has no buttons; afterwards the page is as it was."""
    driver = visit(small_run)
    opened = "return [...document.querySelectorAll('details[open]')].length"
    driver.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert driver.execute_script(opened) > 0
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert not driver.find_element("id", "filter").is_displayed()
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    driver.execute_script("dispatchEvent(new Event('afterprint'))")
    assert driver.execute_script(opened) == 0


def test_without_script_the_findings_are_still_there(visit: Callable[..., Any], driver: Any) -> None:
    """As in viewers of build artifacts that forbid scripts; only the list is missing, and says so."""
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        visit(small_run)
        assert driver.find_element("css selector", "article.card h3").is_displayed()
        assert driver.find_element("css selector", "#timeline svg.lines").is_displayed()
        assert "needs JavaScript" in driver.find_element("css selector", "#parameters").text
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
