"""How fast are all columns of a fingerprint, beside simpler things done to the same bytes?

    OMP_NUM_THREADS=1 python benchmarks/bench_fingerprint.py

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
from _harness import Report, Result, Subject

from tpwatch.fingerprint import Fingerprinter, availability, choose
from tpwatch.fingerprint.layout import HEAD, ROW

MIB = 1 << 20
SMALL_TENSORS = 3000
SMALL_BYTES = 4096


def fingerprint(fingerprinter: Fingerprinter, tensors: list[torch.Tensor]) -> Callable[[], None]:
    """A call that writes all rows and the strided head of an exchange buffer."""
    rows = torch.empty(len(tensors), ROW, dtype=torch.float64)
    buffer = torch.empty(len(tensors), HEAD + 3, dtype=torch.float64)
    return lambda: fingerprinter.rows(tensors, rows, buffer[:, :HEAD])


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


def make(case: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """The tensors of one case."""
    if case == "3,000 x 4 KiB":
        return [torch.randn(SMALL_BYTES // dtype.itemsize).to(dtype) for _ in range(SMALL_TENSORS)]
    size = {"1 MiB": MIB, "64 MiB": 64 * MIB}[case]
    return [torch.randn(size // dtype.itemsize).to(dtype)]


def main() -> None:
    """Run all cases."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    report = Report("fingerprint", "One thread.")
    for name, usable, why in availability("cpu"):
        print(f"  {name}: {'usable' if usable else 'not usable'}: {why}")
    with one_rank() as megatron:
        for case, calls, rounds in (("1 MiB", 20, 11), ("64 MiB", 1, 11), ("3,000 x 4 KiB", 1, 11)):
            for dtype in (torch.float32, torch.bfloat16):
                name = f"{case} {str(dtype).removeprefix('torch.')}"
                tensors = make(case, dtype)
                chosen = subjects(tensors, megatron=megatron)
                print(distance(report.case(name, chosen, rounds, calls)))
        if any(name == "native" and usable for name, usable, _ in availability("cpu")):
            for dtype in (torch.float32, torch.bfloat16):
                name = f"vector units, 64 MiB {str(dtype).removeprefix('torch.')}"
                report.case(name, vector_units(make("64 MiB", dtype)), rounds=9)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
