"""Where results go. Exporters write what they are given; they never decide."""

from __future__ import annotations

from tpwatch.export.sinks import Health, Place, Sink

__all__ = ["Health", "Place", "Sink"]
