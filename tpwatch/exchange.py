"""One packed buffer over one replica group, and what comes back.

Layout, collectives, read-back.

A buffer is float64 `[2, half]`: columns `f` and `-f`, so that one all-reduce(MAX) brings MAX and
MIN together. This file moves numbers and never interprets them; it knows tensors and process
groups, not faults.

Layout of one half, n replicas: header (`HEADER`), then for the entry side `param` heads `[n,
HEAD]`, `pre` heads
`[n, HEAD]` and three flag columns `[3, n]`; for the exit side `post` heads `[n, HEAD]` and three
flag columns. Both sides have the same, padded size, so that a mispaired collective shows in the
header instead of hanging:
`2 * 8 * (2 * HEAD + 3) = 208` bytes per replica and side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tpwatch.fingerprint.layout import HEAD, SKETCH

HEADER = ("phase", "call", "step", "plan_lo", "plan_hi", "targets", "failed", "disabled", "slow")
"""`phase`: 0 entry, 1 exit, 2 values only. `targets`: digest of what tier 2 is to gather. One
column per flag: MAX is not OR."""

ENTRY, EXIT, VALUES = 0, 1, 2
FLAGS = 3
OUTSIDE = -1.0
"""`present` of a row that this finalizer call does not handle, or whose gradient is not owned here."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets into one half of a buffer for `n` replicas."""

    n: int

    @property
    def half(self) -> int:
        """Float64 columns of one half."""
        return len(HEADER) + self.n * (2 * HEAD + FLAGS)

    def allocate(self, device: torch.device) -> torch.Tensor:
        """A zeroed buffer `[2, half]`."""
        return torch.zeros(2, self.half, dtype=torch.float64, device=device)

    def heads(self, half: torch.Tensor, tensors: int) -> torch.Tensor:
        """View `[tensors, HEAD]` of the heads block of a half.

        `tensors` is 2n on entry, n on exit.
        """
        begin = len(HEADER)
        return half[begin : begin + tensors * HEAD].view(tensors, HEAD)

    def flags(self, half: torch.Tensor, tensors: int) -> torch.Tensor:
        """View `[FLAGS, n]` behind the heads."""
        begin = len(HEADER) + tensors * HEAD
        return half[begin : begin + FLAGS * self.n].view(FLAGS, self.n)


class Buffers:
    """The two send buffers of one replica group, allocated once, and the staging for their headers."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        """Allocate for `layout` on `device`.

        Staging is pinned for CUDA, so that no copy waits for the host.
        """
        self.layout = layout
        self.entry = layout.allocate(device)
        self.exit = layout.allocate(device)
        self.disabled = layout.allocate(device)
        """Sent where `seal` itself has failed: it takes nothing, and says that tpwatch is off."""
        self.disabled[:, HEADER.index("disabled")] = torch.tensor([1.0, -1.0], dtype=torch.float64)
        pinned = device.type == "cuda"
        self._staging = [torch.zeros(len(HEADER), dtype=torch.float64, pin_memory=pinned) for _ in range(4)]
        self._turn = 0

    def seal(self, buffer: torch.Tensor, header: Sequence[float]) -> None:
        """Write the header into the first half and the negated first half into the second, ready for MAX."""
        self._turn = (self._turn + 1) % len(self._staging)
        staging = self._staging[self._turn]
        staging.copy_(torch.tensor(header, dtype=torch.float64))
        buffer[0, : len(HEADER)].copy_(staging, non_blocking=True)
        torch.neg(buffer[0], out=buffer[1])


class Exchange:
    """Collectives over one replica group, counted. While training only `job` calls others, over all ranks."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """`group` is the framework's own process group (None: the default group)."""
        self.group = group
        self.size = dist.get_world_size(group)
        self.collectives = 0
        self.bytes = 0

    def reduce_max(self, buffer: torch.Tensor) -> None:
        """All-reduce(MAX) in place, on the calling thread, in program order with the framework's own collectives."""
        self._count(buffer)
        dist.all_reduce(buffer, op=dist.ReduceOp.MAX, group=self.group)

    def gather(self, tensor: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        """All-gather equal-sized 1-D tensors into `room`, which is returned.

        `[m]` on each rank to `[size, m]` in group-rank order. Memory is the caller's: it must be there before any rank
        relies on this one.
        """
        self._count(tensor)
        # In one piece: with a list of tensors, NCCL's would take as much memory once more. (The name is newer than
        # torch 2.12; the older one warns since.)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(room.view(-1), tensor, group=self.group)
        return room

    def _count(self, tensor: torch.Tensor) -> None:
        self.collectives += 1
        self.bytes += tensor.numel() * tensor.element_size()


class Pending:
    """A reduced buffer on its way to the host.

    Every column is finite by construction (`fingerprint.layout`), so that NaN can stand for what has not arrived.
    """

    def __init__(self, host: torch.Tensor, event: torch.cuda.Event | None = None) -> None:
        """`host` is what it comes to; `event` tells when it is there, and is None if it is already."""
        self.host = host
        self._event = event

    def ready(self) -> bool:
        """True if the copy has arrived; never waits.

        Asked from another thread, and so without a call into CUDA: in the middle of the training thread's capture of a
        CUDA graph, a query of an event from anywhere would make the capture fail.
        """
        return self._event is None or not bool(self.host.isnan().any())

    def wait(self) -> torch.Tensor:
        """The host tensor, after waiting for the copy (not for the device)."""
        if self._event is not None:
            self._event.synchronize()
        return self.host


class ReadBack:
    """Two host buffers per side, used in turn: the copy of one check is read while the next one is on its way.

    On CUDA they are pinned, and copied to on a stream of its own, so that nothing in the training stream stands behind
    a copy; an event tells when it is done.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        """Allocate the host buffers once."""
        pinned = device.type == "cuda"
        shape = (2, layout.half)
        self._hosts = [torch.zeros(shape, dtype=torch.float64, pin_memory=pinned) for _ in range(4)]
        self._turn = 0
        self._void, self._over = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
        self._void[0, HEADER.index("failed")] = 1.0
        self._over[0, HEADER.index("disabled")] = 1.0
        self._side = torch.cuda.Stream(device) if pinned else None
        self._leaving: dict[int, torch.cuda.Event] = {}

    def unread(self, *, disabled: bool) -> Pending:
        """In place of a read-back that has failed; `disabled` is what this rank sent. Takes no memory.

        What is left to go by is what it sent itself: void, and `disabled` if it said that, which all who can read read.
        """
        return Pending(self._over if disabled else self._void)

    def start(self, buffer: torch.Tensor) -> Pending:
        """Begin reading `buffer` back."""
        self._turn = (self._turn + 1) % len(self._hosts)
        host = self._hosts[self._turn]
        if self._side is None:
            host.copy_(buffer)
            return Pending(host)
        return Pending(host, self._aside(self._side, buffer, host))

    def _aside(self, side: torch.cuda.Stream, buffer: torch.Tensor, host: torch.Tensor) -> torch.cuda.Event:
        """Copy on the side stream, once the training stream has come as far as here."""
        host.fill_(math.nan)
        side.wait_stream(torch.cuda.current_stream(side.device))
        with torch.cuda.stream(side):
            host.copy_(buffer, non_blocking=True)
        event: torch.cuda.Event = side.record_event()
        self._leaving[id(buffer)] = event
        return event

    def let_go(self, buffer: torch.Tensor) -> None:
        """Before `buffer` is packed again: the training stream waits, and not the host, for the copy under way."""
        if self._side is not None and (event := self._leaving.get(id(buffer))) is not None:
            torch.cuda.current_stream(self._side.device).wait_event(event)


@dataclass(frozen=True, slots=True)
class Header:
    """The reduced header: smallest and largest value of each column over the group."""

    lo: tuple[float, ...]
    hi: tuple[float, ...]

    @property
    def mismatch(self) -> str:
        """The first column that must agree and does not, as text; empty if all agree."""
        for name in ("phase", "call", "step", "plan_lo", "plan_hi"):
            at = HEADER.index(name)
            if self.lo[at] != self.hi[at]:
                return f"{name}: {self.lo[at]:.0f} on one rank, {self.hi[at]:.0f} on another"
        return ""

    def flag(self, name: str) -> bool:
        """True if any rank set the flag."""
        return self.hi[HEADER.index(name)] > 0.0

    def agrees(self, name: str) -> bool:
        """True if every rank sent the same value in this column."""
        at = HEADER.index(name)
        return self.lo[at] == self.hi[at]


def header_of(reduced: torch.Tensor) -> Header:
    """Read the header of a reduced buffer (a small host copy if it still lies on a device)."""
    n = len(HEADER)
    both = reduced[:, :n].tolist()
    return Header(tuple(-x for x in both[1]), tuple(both[0]))


def presence_flags(flags: torch.Tensor, present: Sequence[float], group_rank: int) -> None:
    """Fill the entry flags `[3, n]`.

    Presence, and two masked columns whose MAX and MIN are the ends of the absent ranks.

    `present` is 1.0 with a gradient, 0.0 without, `OUTSIDE` if not handled. Where this rank is
    absent it sends its group rank in both columns; where it is not, -1 towards MAX and a value
    above every rank towards MIN.
    """
    flags[0] = torch.tensor(present, dtype=torch.float64)
    absent = flags[0] == 0.0
    flags[1] = torch.where(absent, float(group_rank), -1.0)
    flags[2] = torch.where(absent, float(group_rank), float(1 << 30))


def reduction_flags(flags: torch.Tensor, pre: torch.Tensor, post: torch.Tensor) -> None:
    """Fill the exit flags `[3, n]` from own fingerprint rows `[n, ROW]`.

    Kept, factor c, residual of post = c * pre.

    c = <post, pre> / <pre, pre> on the sketches, which are linear; where pre is zero, c is 0 and
    the residual is 1 if post is not zero. Both are divided by their largest coordinate first,
    so that no square overflows: NaN must not enter MAX.
    """
    flags[0] = (pre[:, :2] == post[:, :2]).all(1)
    before, after = pre[:, -SKETCH:], post[:, -SKETCH:]
    largest = torch.maximum(before.abs().amax(1), after.abs().amax(1)).clamp_min(_TINY).unsqueeze(1)
    before, after = before / largest, after / largest
    square = (before * before).sum(1)
    factor = torch.where(square > 0, (before * after).sum(1) / square.clamp_min(_TINY), 0.0)
    left = (after - factor.unsqueeze(1) * before).norm(dim=1)
    flags[1] = factor
    flags[2] = torch.where(left > 0, left / after.norm(dim=1).clamp_min(_TINY), 0.0)


_TINY = 1e-300
