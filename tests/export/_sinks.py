"""Sinks that tests name by their path."""

from __future__ import annotations

import threading
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
