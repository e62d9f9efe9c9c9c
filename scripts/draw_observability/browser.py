"""Pages as small PNG files, by a headless Chromium."""

from __future__ import annotations

import base64
import io
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from draw_report import open_browser
from PIL import Image

COLORS = 96
"""Of a picture: pages of text and thin lines need no more, and files stay small."""

SECONDS = 60.0
"""That a page may take until it is ready, and then until it stands still."""

QUIET = 2.0
"""Seconds without a change, after which a page stands still."""


class Browser:
    """A browser while the block lasts."""

    def __init__(self, scratch: Path) -> None:
        """`scratch` is a directory for pages that are given as text."""
        self._scratch = scratch

    def __enter__(self) -> Browser:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        self._driver: Any = open_browser()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._driver.quit()

    def html(self, html: str, size: tuple[int, int]) -> bytes:
        """Draw a page given as text."""
        path = self._scratch / "page.html"
        path.write_text(html, encoding="utf-8")
        return self.url(path.as_uri(), size)

    def url(self, address: str, size: tuple[int, int], *, ready: str = "true", prepare: str = "") -> bytes:
        """Draw a page once an expression in JavaScript is true, and some statements have been run."""
        from selenium.webdriver.support.wait import WebDriverWait

        width, height = size
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        self._driver.get(address)
        waiting = WebDriverWait(self._driver, SECONDS)
        waiting.until(lambda driver: driver.execute_script(f"return {ready}"))
        self._driver.execute_script(prepare)
        return _small(self._settled())

    def _settled(self) -> bytes:
        """The page once it has looked the same for a while."""
        deadline, before = time.monotonic() + SECONDS, b""
        while (now := self._shot()) != before and time.monotonic() < deadline:
            before = now
            time.sleep(QUIET)
        return now

    def _shot(self) -> bytes:
        return base64.b64decode(self._driver.execute_cdp_cmd("Page.captureScreenshot", {})["data"])


def _small(png: bytes) -> bytes:
    picture = Image.open(io.BytesIO(png)).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    written = io.BytesIO()
    picture.save(written, "PNG", optimize=True)
    return written.getvalue()
