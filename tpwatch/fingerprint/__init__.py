"""One fingerprint row per tensor; the implementation is chosen once, and the choice says why.

Knows: which implementations exist and in what order to try them. Must not know: what is done with
the rows, or which tensors are watched. Importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final, Protocol, cast

from tpwatch.errors import FingerprintUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    import torch

__all__ = ["Fingerprinter", "availability", "choose"]

_IMPLEMENTATIONS: Final = {
    "triton": ("triton_launch", "TritonFingerprinter"),
    "native": ("native", "NativeFingerprinter"),
    "packed": ("packed", "PackedFingerprinter"),
    "reference": ("reference", "ReferenceFingerprinter"),
}
"""Name -> (module, class), fastest first. Every module has ``check(device) -> (usable, why)``."""


class Fingerprinter(Protocol):
    """Computes fingerprint rows on one device.

    Attributes:
        name: ``"triton"``, ``"native"``, ``"packed"`` or ``"reference"``.
        reason: why this implementation was chosen.
    """

    @property
    def name(self) -> str:
        """Which implementation this is."""
        ...

    @property
    def reason(self) -> str:
        """Why it was chosen."""
        ...

    def rows(
        self,
        tensors: Sequence[torch.Tensor | None],
        out: torch.Tensor,
        head: torch.Tensor | None = None,
    ) -> None:
        """Write one row of `layout.COLUMNS` per tensor.

        Args:
            tensors: any dtypes and shapes, on the device of this fingerprinter. ``None`` gives a
                row of zeros; an empty tensor gives the hash of length zero and zeros elsewhere.
            out: float64 (len(tensors), ROW), contiguous, same device.
            head: float64 (len(tensors), HEAD) with inner stride 1 and any outer stride; gets a copy
                of the first HEAD columns.
        """
        ...


def availability(device: torch.device | str) -> tuple[tuple[str, bool, str], ...]:
    """Return (name, usable on `device`, why or why not) of every implementation, fastest first."""
    return tuple((name, *_check(name, device)) for name in _IMPLEMENTATIONS)


def choose(device: torch.device | str, prefer: str = "auto") -> Fingerprinter:
    """Return the fastest implementation usable on `device`, or exactly the one preferred.

    Args:
        device: where the tensors live.
        prefer: ``"auto"`` or an implementation name.

    Raises:
        FingerprintUnavailable: the preferred implementation is unknown or cannot run here.
    """
    if prefer != "auto":
        return _build(prefer, device, "requested by name")
    skipped: list[str] = []
    for name in _IMPLEMENTATIONS:
        usable, why = _check(name, device)
        if usable:
            return _build(name, device, "; ".join([why, *skipped]))
        skipped.append(f"not {name}: {why}")
    raise FingerprintUnavailable(name="auto", reason="; ".join(skipped))


def _build(name: str, device: torch.device | str, reason: str) -> Fingerprinter:
    """Construct the implementation `name`, which must be usable."""
    usable, why = _check(name, device)
    if not usable:
        raise FingerprintUnavailable(name=name, reason=why)
    module, cls = _IMPLEMENTATIONS[name]
    return cast("Fingerprinter", getattr(_load(module), cls)(device, reason))


def _check(name: str, device: torch.device | str) -> tuple[bool, str]:
    """Return whether `name` can run on `device`, and why or why not."""
    if name not in _IMPLEMENTATIONS:
        return False, f"unknown implementation; there are {', '.join(_IMPLEMENTATIONS)}"
    try:
        module = _load(_IMPLEMENTATIONS[name][0])
    except ImportError as error:
        return False, str(error)
    return cast("tuple[bool, str]", module.check(device))


def _load(module: str) -> ModuleType:
    """Import one implementation; late, because torch and triton are optional to the package."""
    return importlib.import_module(f"tpwatch.fingerprint.{module}")
