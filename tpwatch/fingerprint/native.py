"""The compiled CPU kernel as a `Fingerprinter`: a pointer table in, all rows out, one call.

Knows: how `_native.c` wants its keys and its pointer table. Must not know: the formulas.

The steady path allocates nothing but short Python lists: the pointer table and the buffers for
strided tensors are kept, and every call compares addresses, sizes, dtypes and contiguity with
those the table was built from. Only addresses that changed are asked again for the memory behind them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from tpwatch.errors import FingerprintUnavailable
from tpwatch.fingerprint import _native
from tpwatch.fingerprint.layout import HEAD
from tpwatch.fingerprint.plans import (
    Plans,
    Staging,
    Tensors,
    addresses,
    describe,
    extents,
    lies_in_order,
)
from tpwatch.fingerprint.tables import (
    CHUNK_STREAM,
    Tables,
    as_int64,
    make_tables,
    splitmix64,
)

_KINDS: Final = {torch.float32: 2, torch.bfloat16: 3, torch.float16: 4, torch.float64: 5}
_KIND_NONE: Final = 0
_KIND_BYTES: Final = 1


def check() -> tuple[bool, str]:
    """Return (usable, why): it was compiled, or else this module could not be imported."""
    return True, f"compiled CPU kernel, vector unit {_native.units()[0][1]}"


def pack_tables(tables: Tables) -> torch.Tensor:
    """Return the keys as the int64 words of ``tables_t`` in `_native.c`."""
    bias = torch.cumsum(tables.u * (tables.v1.sum() << 31), 0)
    ends = torch.tensor([as_int64(splitmix64(tables.seed ^ CHUNK_STREAM)), as_int64(tables.seed)], dtype=torch.int64)
    return torch.cat(
        (
            tables.v0,
            tables.v1,
            tables.u,
            torch.zeros(1, dtype=torch.int64),
            bias,
            tables.sign_bits,
            tables.sign_columns(1).view(-1).view(torch.int64),
            tables.sign_columns(2).view(-1).view(torch.int64),
            ends,
        )
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    """A pointer table.

    Attributes:
        table: int64 (tensors, 4): address, numel, kind, bytes per element.
        staging: buffers of the tensors that the kernel cannot read in place.
    """

    table: torch.Tensor
    staging: Staging


def _make_plan(tensors: Tensors) -> _Plan:
    """Build the table for `tensors`, but for the addresses."""
    entries: list[tuple[int, int, int, int]] = []
    for tensor in tensors:
        numel, dtype = describe(tensor)
        kind = _KIND_NONE if tensor is None else _KINDS.get(dtype, _KIND_BYTES)
        entries.append((0, numel, kind, dtype.itemsize))
    table = torch.tensor(entries, dtype=torch.int64).view(-1, 4)
    return _Plan(table, Staging(tensors, lies_in_order))


def _point(plan: _Plan, found: list[int]) -> None:
    """Enter the addresses."""
    plan.table[:, 0] = torch.tensor(plan.staging.places(found), dtype=torch.int64)


class NativeFingerprinter:
    """Fingerprints by `_native.c`."""

    name = "native"

    def __init__(self, device: torch.device | str, reason: str, unit: str = "") -> None:
        """Pack the keys.

        Args:
            device: the CPU.
            reason: why this implementation was chosen.
            unit: name of the vector unit; the widest one if empty.

        Raises:
            FingerprintUnavailable: this processor has no such vector unit.
        """
        units = {name: index for index, name in reversed(_native.units())}
        if unit and unit not in units:
            reason = f"vector unit {unit} is not usable here; there are {', '.join(units)}"
            raise FingerprintUnavailable(name="native", reason=reason)
        self.reason = reason
        self._unit = units[unit] if unit else _native.units()[0][0]
        tables = make_tables(device)
        self._keys = pack_tables(tables)
        self._plans: Plans[_Plan] = Plans(tables.device, _make_plan, _point)

    def rows(self, tensors: Tensors, out: torch.Tensor, head: torch.Tensor | None = None) -> None:
        """Write one row per tensor; see `Fingerprinter.rows`."""
        plan = self._plans.get(out, tensors, extents(tensors), addresses(tensors))
        plan.staging.fill(tensors)
        _native.rows(
            self._unit,
            self._keys.data_ptr(),
            plan.table.data_ptr(),
            len(tensors),
            out.data_ptr(),
            0 if head is None else head.data_ptr(),
            HEAD if head is None else head.stride(0),
        )
