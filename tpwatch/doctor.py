"""What is installed here, what tpwatch will use of it, and why.

Imports torch and the frameworks late: without them there is still something to say.
"""

from __future__ import annotations

import importlib.metadata
import platform
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import tpwatch
from tpwatch._guard import shield
from tpwatch.config import RESERVED_ENV, disabled, env_names
from tpwatch.errors import printable
from tpwatch.report.table import table

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "prometheus": ("prometheus-client",),
    "wandb": ("wandb",),
    "wandb-workspace": ("wandb", "wandb-workspaces"),
    "otel": ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
    "tensorboard": ("tensorboard",),
    "triton": ("triton",),
    "lab": ("megatron-core", "numpy", "rich"),
    "lab-te": ("transformer-engine",),
    "report": ("rich",),
}
"""Distributions behind each optional extra of the package."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of the diagnosis."""

    section: str
    name: str
    value: str
    why: str = ""


def examine(env: Mapping[str, str]) -> list[Fact]:
    """Look at this installation and at the environment variables given."""
    return [*_versions(), *_adapters(), *_fingerprints(), *_extras(), *_environment(env)]


def as_text(facts: list[Fact]) -> str:
    """The diagnosis as aligned text, one block per section."""
    lines: list[str] = []
    for section in dict.fromkeys(fact.section for fact in facts):
        rows = [(f.name, f.value, f.why) for f in facts if f.section == section]
        lines += ["", section, *table(("", "", ""), rows, "  ")[2:]]
    return "\n".join(lines[1:])


def _versions() -> Iterator[Fact]:
    yield Fact("versions", "tpwatch", tpwatch.__version__)
    yield Fact("versions", "python", platform.python_version(), platform.platform())
    for name in ("torch", "PyYAML"):
        yield Fact("versions", name, _installed(name) or "not installed")


def _adapters() -> Iterator[Fact]:
    """Each row of the support table: version found, whether supported, whether its seams exist."""
    from tpwatch.adapters import SUPPORT, installed, missing_symbol, supported

    for row in SUPPORT:
        version = installed(row)
        if not version:
            yield Fact("adapters", row.adapter, "not installed", f"supported: {row.range}")
            continue
        verdict = "supported" if supported(version, row) else "not supported"
        yield Fact("adapters", row.adapter, f"{version} {verdict}", f"tested: {row.range}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the framework says of itself while imported
            found, missing = shield(missing_symbol, row)
        seams = f"missing: {missing}" if found and missing else "all present"
        yield Fact("adapters", f"{row.adapter} seams", seams if found else f"broken: {missing}")


def _fingerprints() -> Iterator[Fact]:
    """What can compute fingerprints on each kind of device there is, and what `auto` takes."""
    known, result = shield(_devices)
    if not known:
        yield Fact("fingerprints", "torch", "cannot be imported", str(result))
        return
    from tpwatch.fingerprint import availability, choose

    for device in result:
        works, chosen = shield(choose, device)
        yield Fact(
            "fingerprints", f"{device}: auto", *((chosen.name, chosen.reason) if works else ("none", str(chosen)))
        )
        for name, usable, why in availability(device):
            yield Fact("fingerprints", f"{device}: {name}", "usable" if usable else "no", why)


def _devices() -> list[str]:
    import torch

    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def _extras() -> Iterator[Fact]:
    for extra, names in EXTRAS.items():
        missing = [name for name in names if not _installed(name)]
        state = "installed" if not missing else "not installed"
        yield Fact("extras", extra, state, f"missing: {', '.join(missing)}" if missing else "")


def _environment(env: Mapping[str, str]) -> Iterator[Fact]:
    """Variables of tpwatch that are set, and what each one does."""
    knobs = env_names()
    for name in sorted(n for n in env if n.startswith("TPWATCH_")):
        meaning = f"knob {knobs[name]}" if name in knobs else RESERVED_ENV.get(name, "unknown")
        yield Fact("environment", name, printable(env[name]), meaning)
    if disabled(env):
        yield Fact("environment", "in force", "tpwatch is switched off", "TPWATCH_DISABLED")


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
