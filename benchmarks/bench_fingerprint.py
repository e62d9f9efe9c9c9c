"""How fast are all columns of a fingerprint, beside simpler things done to the same bytes?

    OMP_NUM_THREADS=1 python benchmarks/bench_fingerprint.py [--smoke]

One thread. `torch.sum` reads every byte once and is the practical limit of one pass; `clone` also
writes them; SHA-1 and `torch.hash_tensor` only hash. "Megatron check" is megatron-core's own
`check_param_hashes_across_dp_replicas` on a model with these parameters and a group of one rank; it
copies to the GPU at its end, so `Tensor.cuda` is the identity while it runs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from _harness import Result, Subject
from _ranks import Record, smoke

from tpwatch.fingerprint import Fingerprinter, availability, choose
from tpwatch.fingerprint.layout import HEAD, ROW

MIB = 1 << 20
SIZES = {"1 MiB": (1, MIB, 20), "64 MiB": (1, 64 * MIB, 1), "3,000 x 4 KiB": (3000, 4096, 1)}
"""Tensors, bytes of each, and calls that are timed as one."""
TINY = {"3 x 4 KiB": (3, 4096, 1)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def fingerprint(fingerprinter: Fingerprinter, tensors: list[torch.Tensor]) -> Callable[[], None]:
    """A call that writes all rows and the strided head of an exchange buffer."""
    rows = torch.empty(len(tensors), ROW, dtype=torch.float64)
    head = torch.empty(len(tensors), HEAD + 3, dtype=torch.float64)[:, :HEAD]
    return lambda: fingerprinter.rows(tensors, rows, head)


def sha1(tensors: list[torch.Tensor]) -> None:
    """Hash the raw bytes of each tensor."""
    for tensor in tensors:
        hashlib.sha1(tensor.view(torch.uint8).numpy(), usedforsecurity=False).digest()


def megatron_check(tensors: list[torch.Tensor]) -> Callable[[], object]:
    """Megatron's own replica check on a model that has these tensors as parameters."""
    from megatron.core.utils import check_param_hashes_across_dp_replicas

    model = torch.nn.ParameterList(torch.nn.Parameter(t, requires_grad=False) for t in tensors)

    def call() -> bool:
        with mock.patch.object(torch.Tensor, "cuda", lambda self: self):
            return check_param_hashes_across_dp_replicas([model])

    return call


@contextmanager
def one_rank() -> Iterator[bool]:
    """Megatron's process groups with a single gloo rank; False where megatron-core is missing."""
    try:
        from megatron.core import parallel_state
    except ImportError:
        yield False
        return
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield True
    torch.distributed.destroy_process_group()


def subjects(tensors: list[torch.Tensor], *, megatron: bool) -> list[Subject]:
    """Everything that is compared on one list of tensors."""
    moved = sum(t.nbytes for t in tensors)
    calls: dict[str, Callable[[], object]] = {
        "torch.sum": lambda: [t.sum() for t in tensors],
        "clone": lambda: [t.clone() for t in tensors],
        "torch.hash_tensor": lambda: [torch.hash_tensor(t) for t in tensors],
        "SHA-1 of the bytes": lambda: sha1(tensors),
    }
    if megatron:
        calls["Megatron check"] = megatron_check(tensors)
    for name, usable, _ in availability("cpu"):
        if usable and name != "reference":
            calls[f"tpwatch {name}"] = fingerprint(choose("cpu", name), tensors)
    return [Subject(name, call, moved, name == "torch.sum") for name, call in calls.items()]


def vector_units(tensors: list[torch.Tensor]) -> list[Subject]:
    """The compiled kernel on every vector unit of this processor."""
    from tpwatch.fingerprint import _native
    from tpwatch.fingerprint.native import NativeFingerprinter

    moved = sum(t.nbytes for t in tensors)
    units = [
        Subject(name, fingerprint(NativeFingerprinter("cpu", "benchmark", name), tensors), moved)
        for _, name in _native.units()
    ]
    return [Subject("torch.sum", lambda: [t.sum() for t in tensors], moved, baseline=True), *units]


def distance(results: dict[str, Result]) -> str:
    """Say how far the chosen implementation is from its limits, in one line."""
    ours = next(r for name, r in results.items() if name.startswith("tpwatch"))
    facts = [
        f"{results[name].median / ours.median:.1f}x {name}"
        for name in ("SHA-1 of the bytes", "Megatron check", "torch.hash_tensor", "torch.sum")
        if name in results
    ]
    return f"{ours.subject}: {', '.join(facts)}; {ours.moved / 1e6:.1f} MB must be read once"


def make(count: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """`count` tensors of `size` bytes each."""
    return [torch.randn(size // dtype.itemsize).to(dtype) for _ in range(count)]


def main() -> None:
    """Run all cases."""
    tiny = smoke(__doc__)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    report = Record("fingerprint", "One thread.", tiny=tiny)
    for name, usable, why in availability("cpu"):
        print(f"  {name}: {'usable' if usable else 'not usable'}: {why}")
    with one_rank() as megatron:
        for case, (count, size, calls) in (TINY if tiny else SIZES).items():
            for name, dtype in DTYPES.items():
                chosen = subjects(make(count, size, dtype), megatron=megatron)
                print(distance(report.case(f"{case} {name}", chosen, 1 if tiny else 11, calls)))
    if any(name == "native" and usable for name, usable, _ in availability("cpu")):
        case, (count, size, _) = next(iter(TINY.items())) if tiny else ("64 MiB", SIZES["64 MiB"])
        for name, dtype in DTYPES.items():
            units = vector_units(make(count, size, dtype))
            report.case(f"vector units, {case} {name}", units, rounds=1 if tiny else 9)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
