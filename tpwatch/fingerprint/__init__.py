"""One fingerprint row per tensor; the implementation is chosen once, and the choice says why.

Knows: which implementations exist and in what order to try them. Must not know: what is done with
the rows, or which tensors are watched. Importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final, Protocol, cast

from tpwatch._guard import shield
from tpwatch.errors import FingerprintUnavailable
from tpwatch.fingerprint.layout import COLUMNS, HEAD, ROW

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["Fingerprinter", "availability", "choose"]

_IMPLEMENTATIONS: Final = {
    "triton": ("triton_launch", "TritonFingerprinter", "cuda"),
    "native": ("native", "NativeFingerprinter", "cpu"),
    "packed": ("packed", "PackedFingerprinter", ""),
    "reference": ("reference", "ReferenceFingerprinter", ""),
}
"""Name -> (module, class, the only kind of device it is for), fastest first.

Every module has ``check() -> (usable, why)``; it is not imported where its device is not asked for.
"""

_TOLD: Final = 300
"""Characters of a failure that stand in a reason: a compiler tells whole files."""

_KNOWN: Final = slice(COLUMNS.index("l2"), COLUMNS.index("zeros") + 1)


class _Unfit(Exception):
    """An implementation says itself that it cannot serve."""


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

        Raises:
            UnreadableTensor: a storage was freed, is too small, or lies on another device. What `out` holds then means
                nothing.
        """
        ...


def availability(device: torch.device | str) -> tuple[tuple[str, bool, str], ...]:
    """Return (name, usable on `device`, why or why not) of every implementation, fastest first.

    Each one is tried, so that usable means: it has computed a row.
    """
    tried = ((name, *_try(name, device)) for name in _IMPLEMENTATIONS)
    return tuple((name, made is not None, why) for name, made, why in tried)


def choose(device: torch.device | str, prefer: str = "auto") -> Fingerprinter:
    """Return the fastest implementation that works on `device`, or exactly the one preferred.

    It has computed a first row: what is compiled at the first call is compiled here.

    Args:
        device: where the tensors live.
        prefer: ``"auto"`` or an implementation name.

    Raises:
        FingerprintUnavailable: the preferred implementation is unknown or cannot run here.
    """
    if prefer != "auto":
        made, why = _try(prefer, device, "requested by name")
        if made is None:
            raise FingerprintUnavailable(name=prefer, reason=why)
        return made
    skipped: list[str] = []
    for name in _IMPLEMENTATIONS:
        made, why = _try(name, device, *skipped)
        if made is not None:
            return made
        skipped.append(f"not {name}: {why}")
    raise FingerprintUnavailable(name="auto", reason="; ".join(skipped))


def _try(name: str, device: torch.device | str, *also: str) -> tuple[Fingerprinter | None, str]:
    """The implementation `name`, if it works on `device`, and why, or why not; `also` belongs to the reason.

    Whatever an optional package or a compiler makes of its own failure, it is a reason to use the next implementation.
    """
    if name not in _IMPLEMENTATIONS:
        return None, f"unknown implementation; there are {', '.join(_IMPLEMENTATIONS)}"
    works, result = shield(_make, name, device, also)
    if works:
        return result, result.reason
    told = " ".join(str(result).split())[:_TOLD]
    return None, told if isinstance(result, _Unfit | ImportError) else f"{type(result).__name__}: {told}"


def _make(name: str, device: torch.device | str, also: tuple[str, ...]) -> Fingerprinter:
    """Construct the implementation `name` and let it compute a row.

    Raises:
        _Unfit: it is not made for this device, or computes something else.
    """
    module_name, cls, kind = _IMPLEMENTATIONS[name]
    if kind not in ("", str(device).partition(":")[0]):
        elsewhere = f"runs on {kind} only"
        raise _Unfit(elsewhere)
    module = importlib.import_module(f"tpwatch.fingerprint.{module_name}")
    usable, why = module.check()
    if not usable:
        raise _Unfit(why)
    made = cast("Fingerprinter", getattr(module, cls)(device, "; ".join([why, *also])))
    _run(made, device)
    return made


def _run(fingerprinter: Fingerprinter, device: torch.device | str) -> None:
    """Compute rows of the usual dtypes, as a check does, and wait for them."""
    import torch

    small = torch.tensor([3.0, -4.0], device=device)
    rows = torch.zeros(2, ROW, dtype=torch.float64, device=device)
    fingerprinter.rows([small, small.bfloat16()], rows, torch.zeros_like(rows)[:, :HEAD])
    if rows[:, _KNOWN].tolist() != [[25.0, 4.0, 0.0, 0.0]] * 2:
        wrong = "its row of a known tensor is wrong"
        raise _Unfit(wrong)
