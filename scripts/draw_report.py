#!/usr/bin/env python3
"""Draw the pictures of docs/report.md: a real faulty run of the laboratory, reported on, in a real browser.

scripts/draw_report.py   (needs the extras lab and dev, and the system packages chromium and chromium-driver)
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "images"

FAULTS = {"ple-double-sum": "light", "custom-module-unsynced-nosp": "dark"}
"""Entry of the catalogue and the look its report is drawn in."""

WIDTH, HEIGHT = 1280, 1800


def main() -> None:
    """Train, report and draw, once per picture."""
    PICTURES.mkdir(exist_ok=True)
    browser = open_browser()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            for fault, look in FAULTS.items():
                tpwatch(scratch, "demo", "--fault", fault, "--tp", "2", "--steps", "30", "--out", fault)
                tpwatch(scratch, "report", fault, "--html")
                picture = PICTURES / f"report-{look}.png"
                picture.write_bytes(draw(browser, Path(scratch, fault, "report.html"), look))
                print(picture)
    finally:
        browser.quit()


def tpwatch(directory: str, *arguments: str) -> None:
    """Run the command in a directory and stop if it fails."""
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": search}
    subprocess.run([sys.executable, "-m", "tpwatch", *arguments], check=True, cwd=directory, env=environment)


def open_browser() -> Any:  # noqa: ANN401 - selenium is not typed
    """A headless browser that asks nobody for anything."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--hide-scrollbars",
    ):
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def draw(browser: Any, page: Path, look: str) -> bytes:  # noqa: ANN401 - selenium is not typed
    """The upper part of a page as PNG."""
    scheme = {"name": "prefers-color-scheme", "value": look}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())
    return base64.b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", {})["data"])


if __name__ == "__main__":
    main()
