"""Sinks that tests name by their path."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from tpwatch.export import Place


class Stuck:
    """Waits for ever at the first event."""

    def __init__(self, place: Place) -> None:
        del place

    def write(self, event: Mapping[str, Any]) -> None:
        """Wait."""
        del event
        threading.Event().wait()

    def close(self) -> None:
        """Never reached."""


class Lists:
    """Writes the kind of each event into a file beside the event file."""

    def __init__(self, place: Place) -> None:
        self.path = place.directory / f"kinds.{place.group}"

    def write(self, event: Mapping[str, Any]) -> None:
        """Append one kind."""
        with self.path.open("a") as file:
            file.write(f"{event['event']}\n")

    def close(self) -> None:
        """Say that it was closed."""
        self.write({"event": "closed"})


class Slow:
    """Takes its time over an abort, and leaves word when it has heard of it."""

    def __init__(self, place: Place) -> None:
        self.path = place.directory / f"told.{place.group}"

    def write(self, event: Mapping[str, Any]) -> None:
        """Be slow."""
        if event["event"] == "abort":
            time.sleep(2.0)
            self.path.write_text("abort")

    def close(self) -> None:
        """Nothing is left to do."""
