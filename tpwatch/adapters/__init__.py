"""Frameworks tpwatch can watch, the versions it was tested with, and the choice between them.

Importing this package imports no framework: an adapter module is imported when it is chosen.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from tpwatch._guard import say
from tpwatch.errors import AdapterUnavailable

if TYPE_CHECKING:
    from tpwatch.adapters.base import Adapter


@dataclass(frozen=True, slots=True)
class Support:
    """One row of the support table."""

    adapter: str
    module: str
    """Module with the `ADAPTER` class."""
    distribution: str
    oldest: tuple[int, int]
    newest: tuple[int, int]
    """Oldest and newest tested minor version, both included."""
    needs: tuple[str, ...]
    """Dotted symbols the seams stand on."""

    @property
    def range(self) -> str:
        """The tested range as text."""
        return f"{self.distribution} {'.'.join(map(str, self.oldest))} to {'.'.join(map(str, self.newest))}"


SUPPORT: tuple[Support, ...] = (
    Support(
        adapter="megatron",
        module="tpwatch.adapters.megatron",
        distribution="megatron-core",
        oldest=(0, 16),
        newest=(0, 19),
        needs=(
            "megatron.core.distributed.finalize_model_grads._allreduce_non_tensor_model_parallel_grads",
            "megatron.core.optimizer.get_megatron_optimizer",
        ),
    ),
)


def installed(support: Support) -> str:
    """Installed version of the framework, or an empty string."""
    try:
        return importlib.metadata.version(support.distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def missing_symbol(support: Support) -> str:
    """The first needed symbol that cannot be imported, or an empty string.

    Imports the framework.
    """
    for dotted in support.needs:
        module, _, name = dotted.rpartition(".")
        try:
            found = hasattr(importlib.import_module(module), name)
        except ImportError:
            found = False
        if not found:
            return dotted
    return ""


def supported(version: str, support: Support) -> bool:
    """True if the minor version lies in the tested range."""
    parts = version.split(".")
    minor = tuple(int(p) for p in parts[:2] if p.isdigit())
    return support.oldest <= minor <= support.newest


def choose(name: str) -> Adapter | None:
    """The adapter asked for by name, or the first that fits under `auto` (None: run unwatched).

    Raises:
        AdapterUnavailable: asked for by name, and missing or unsupported. Under `auto` that is
        quiet.
    """
    for support in SUPPORT:
        if name not in ("auto", support.adapter):
            continue
        version = installed(support)
        missing = missing_symbol(support) if version else ""
        if version and supported(version, support) and not missing:
            return cast("Adapter", importlib.import_module(support.module).ADAPTER())
        if name != "auto":
            raise AdapterUnavailable(name, version or "not installed", support.range, missing)
        say(
            logging.DEBUG,
            "tpwatch: adapter %s not used: found %s %s",
            support.adapter,
            version or "nothing",
            missing,
        )
    return None
