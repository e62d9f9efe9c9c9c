"""Sinks that fail, named in a configuration by their path. Doubles for what no test can break on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tpwatch.export import Place


def _fail() -> None:
    message = "the planted fault of a sink"
    raise ConnectionError(message)


def _wait() -> None:
    threading.Event().wait()


class Planted:
    """Does something bad when it is built, at every event, or when it is closed."""

    def __init__(self, what: Callable[[], None], where: str, place: Place) -> None:
        del place
        self._what, self._where = what, where
        self._at("build")

    def write(self, event: Mapping[str, Any]) -> None:
        """Take one event, or fail."""
        del event
        self._at("write")

    def close(self) -> None:
        """End, or fail."""
        self._at("close")

    def _at(self, where: str) -> None:
        if where == self._where:
            self._what()


raises_at_build = partial(Planted, _fail, "build")
raises_at_write = partial(Planted, _fail, "write")
raises_at_close = partial(Planted, _fail, "close")
waits_at_build = partial(Planted, _wait, "build")
waits_at_write = partial(Planted, _wait, "write")
waits_at_close = partial(Planted, _wait, "close")


class WandbDouble:
    """Stands for a run of Weights & Biases whose service cannot be reached: `wandb.errors.CommError` in `wandb`."""

    def __init__(self, where: str, place: Place) -> None:
        del place
        self._where = where
        if where == "init":
            self._lost()

    def write(self, event: Mapping[str, Any]) -> None:
        """As `Run.log` does behind a network that is gone."""
        del event
        if self._where == "log":
            self._lost()

    def close(self) -> None:
        """As `Run.finish`."""
        self._lost()

    def _lost(self) -> None:
        message = "double of wandb.errors.CommError: the run cannot be reached"
        raise RuntimeError(message)


wandb_fails_at_init = partial(WandbDouble, "init")
wandb_fails_at_log = partial(WandbDouble, "log")
