"""A whole check beside what people write by hand, over real gloo, at 2 and at 4 ranks.

    OMP_NUM_THREADS=1 python benchmarks/bench_exchange.py [--smoke]

All look at the same tensors at the same three points: values, gradients before and gradients after the framework's
reduction.

- "tpwatch check": both sides of a check and its verdict, through the Megatron-core adapter.
- "MAX and MIN per tensor": two all-reduces for every tensor, the two results compared.
- "MAX and MIN, flattened": all tensors of a point in one buffer `[f, -f]`, one all-reduce.
- "broadcast and compare": the way of nanotron's sanity check: rank 0's copy of every tensor to all, `assert_close`.
- "torch.sum": reads every byte once and sends nothing: the practical limit of one core.

Every call ends with a barrier, which is timed: the work is done when the slowest rank has done it. "Must move" is what
a perfect implementation of that method moves on each rank: every tensor read once at each point, and what it sends.
The quick ones are timed several times in each round, the slow ones once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from _harness import Subject
from _ranks import POINTS, Record, Replicas, checks, finish_together, import_megatron, launch, now, smoke

SIZES = {"3,000 x 4 KiB": (3000, 1024), "64 MiB": (1, 16 << 20)}
NAMES = {2: "exchange", 4: "exchange_4"}
TINY = {"20 x 4 KiB": (20, 1024)}

Points = Sequence[Sequence[torch.Tensor]]


def per_tensor(points: Points) -> bool:
    """True if no tensor differs on any rank: two all-reduces a tensor."""
    same = True
    for tensor in (tensor for point in points for tensor in point):
        high, low = tensor.clone(), tensor.clone()
        dist.all_reduce(high, op=dist.ReduceOp.MAX)
        dist.all_reduce(low, op=dist.ReduceOp.MIN)
        same &= torch.equal(high, low)
    return same


def flattened(points: Points) -> bool:
    """The same with one all-reduce for all tensors of a point."""
    same = True
    for point in points:
        flat = torch.cat(list(point))
        both = torch.cat([flat, -flat])
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        same &= torch.equal(both[: flat.numel()], -both[flat.numel() :])
    return same


def broadcast(points: Points) -> None:
    """Compare every tensor with rank 0's copy of it."""
    for tensor in (tensor for point in points for tensor in point):
        reference = tensor if dist.get_rank() == 0 else torch.empty_like(tensor)
        dist.broadcast(reference, src=0)
        torch.testing.assert_close(tensor, reference)


def subjects(replicas: Replicas, rank: int, world: int) -> list[Subject]:
    """Everything that is compared on one set of replicas."""
    points, read = replicas.points, replicas.nbytes
    flats = [torch.cat(point) for point in points[:2]]
    calls = {
        "MAX and MIN per tensor": (lambda: per_tensor(points), 3 * read, 1),
        "MAX and MIN, flattened": (lambda: flattened(points), 3 * read, 1),
        "broadcast and compare": (lambda: broadcast(points), 2 * read, 1),
        "tpwatch check": (checks(replicas, rank, world), read + replicas.payload, 7),
        "torch.sum": (lambda: [flats[min(point, 1)].sum() for point in range(POINTS)], read, 7),
    }
    baseline = next(iter(calls))
    return [
        Subject(name, finish_together(call), moved, name == baseline, repeat)
        for name, (call, moved, repeat) in calls.items()
    ]


def compare(rank: int, world: int, rounds: int, date: str, tiny: bool) -> None:  # noqa: FBT001
    """Measure every size on the ranks of one group."""
    note = f"{world} ranks, one thread each; {POINTS} observation points; a check sends 2 x 208 bytes a replica."
    report = Record(NAMES[world], note, rank=rank, date=date, tiny=tiny)
    for name, (count, numel) in (TINY if tiny else SIZES).items():
        replicas = Replicas(count, numel)
        results = report.case(f"{name}, {world} ranks", subjects(replicas, rank, world), rounds)
        if results:
            ours = results["tpwatch check"]
            print(f"{ours.ratio:.0f}x MAX and MIN per tensor; must read {replicas.nbytes:,} and send", end=" ")
            print(f"{replicas.payload:,} bytes a rank: {ours.median / results['torch.sum'].median:.1f}x torch.sum")


def main() -> None:
    """Run at 2 and at 4 ranks; the slowest subject, minutes a call at 4 ranks, allows few rounds."""
    tiny, date = smoke(__doc__), now()
    import_megatron()
    for world, rounds in ((2, 1),) if tiny else ((2, 3), (4, 2)):
        launch(world, compare, world, rounds, date, tiny)


if __name__ == "__main__":
    main()
