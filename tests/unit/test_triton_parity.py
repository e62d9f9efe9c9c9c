"""The Triton kernels, run by Triton's interpreter, agree with the reference.

The interpreter is chosen when a kernel is defined, so the comparison runs in a process of its own.
"""

from __future__ import annotations

import pytest

from tests.commands import run_python

pytestmark = pytest.mark.triton

COMPARE = """
import sys
import torch
from tests.unit.test_fingerprint_parity import disagreements, rows_of
from tests.unit import test_fingerprint_parity as cases
from tpwatch.fingerprint.layout import HEAD, ROW
from tpwatch.fingerprint.triton_launch import TritonFingerprinter

fingerprinter = TritonFingerprinter("cpu", "interpreter")
"""

VALUES = (
    COMPARE
    + """
tensors = list(getattr(cases, sys.argv[1])(getattr(torch, sys.argv[2])))
print(len(tensors), disagreements(tensors, rows_of(fingerprinter, tensors)))
"""
)

RAW = (
    COMPARE
    + """
tensors = [t for dtype in cases.RAW_DTYPES for t in cases.raw(dtype)]
rows = rows_of(fingerprinter, tensors)
assert torch.equal(rows, cases.reference_rows(tensors))
print(len(tensors), [])
"""
)

MIXED = (
    COMPARE
    + """
x = torch.randn(999, generator=cases.generator())
tensors = [
    x.bfloat16(), None, torch.arange(77), x, torch.complex(x, -x), x.double(),
    torch.empty(0), x.half().view(3, 333).t(), x[1:],
]
buffer = torch.full((len(tensors), 9), -1.0, dtype=torch.float64)
out = torch.full((len(tensors), ROW), torch.nan, dtype=torch.float64)
for step in range(3):
    x += step
    tensors[5] = x.double()
    fingerprinter.rows(tensors, out, buffer[:, 2 : 2 + HEAD])
    assert torch.equal(buffer[:, 2 : 2 + HEAD], out[:, :HEAD])
    assert bool((buffer[:, :2] == -1).all()) and bool((buffer[:, 7:] == -1).all())
    assert disagreements(tensors, out) == []
again = rows_of(fingerprinter, tensors)
assert torch.equal(again, out)
fingerprinter.rows([], out[:0])
print(len(tensors), [])
"""
)

FREED = (
    COMPARE
    + """
from tpwatch.errors import UnreadableTensor

x = torch.randn(3000, generator=cases.generator())
tensors = [torch.ones(3), x[1000:], x[4:2000].view(4, -1).t()]
out = torch.full((len(tensors), ROW), torch.nan, dtype=torch.float64)
refused = []
for _ in range(2):
    assert disagreements(tensors, rows_of(fingerprinter, tensors, out)) == []
    x.untyped_storage().resize_(0)
    for gone in (tensors, tensors, [torch.ones(3, device="meta")]):
        try:
            rows_of(fingerprinter, gone, out[: len(gone)])
        except UnreadableTensor as error:
            refused.append(error)
    x.untyped_storage().resize_(12000)
    x.normal_()
assert disagreements(tensors, rows_of(fingerprinter, tensors, out)) == []
print(len(refused), [] if len(refused) == 6 else refused)
"""
)

MANY_CHUNKS = (
    COMPARE
    + """
x = torch.randn(34 * 65_536 + 5, generator=cases.generator()).bfloat16()
tensors = [torch.ones(3).bfloat16(), x, torch.ones(70_000).bfloat16()]
print(len(tensors), disagreements(tensors, rows_of(fingerprinter, tensors)))
"""
)


def interpreted(code: str, *arguments: str) -> list[str]:
    """Run a comparison under the interpreter; return the words it prints."""
    done = run_python("-W", "ignore", "-c", code, *arguments, env={"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout.split(maxsplit=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("tensors", ["of_every_size", "with_values", "of_awkward_layout"])
def test_values_agree_with_the_reference(tensors: str, dtype: str) -> None:
    """Integer columns are equal bit for bit, the others within their bound, and all are finite."""
    count, found = interpreted(VALUES, tensors, dtype)
    assert int(count) > 5
    assert found.strip() == "[]"


@pytest.mark.parametrize("code", [RAW, MIXED, FREED, MANY_CHUNKS], ids=["raw", "mixed", "freed", "many chunks"])
def test_lists_agree_with_the_reference(code: str) -> None:
    """Raw types, mixed lists with a strided head and changing storages, freed ones, more chunks than one fold takes."""
    count, found = interpreted(code)
    assert int(count) >= 3
    assert found.strip() == "[]"
