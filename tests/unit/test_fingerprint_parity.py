"""Every implementation agrees with the reference on everything that is awkward."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tpwatch.fingerprint import Fingerprinter, _native
from tpwatch.fingerprint.layout import CHUNK, COLUMNS, HEAD, ROW
from tpwatch.fingerprint.native import NativeFingerprinter
from tpwatch.fingerprint.packed import PackedFingerprinter
from tpwatch.fingerprint.reference import VALUE_DTYPES, ReferenceFingerprinter

INTEGER_COLUMNS = [COLUMNS.index(name) for name in ("hash_lo", "hash_hi", "absmax", "nonfinite", "zeros")]
L2 = COLUMNS.index("l2")
SKETCH_AT = COLUMNS.index("sketch_0")
L2_BOUND = 2.0**-15
SKETCH_BOUND = 2.0**-17

# Around every boundary: word, vector, row, block of 1,024 elements, chunk.
SIZES = (0, 1, 2, 3, 5, 7, 8, 9, 31, 63, 64, 65, 511, 512, 1000, 1023, 1024, 1025, 2047, 2048, 2049)
LARGE_SIZES = (4095, 4097, 8191, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 777)
VIEW_OF_2048 = torch.Size([32, 64])

IMPLEMENTATIONS: dict[str, Callable[[], Fingerprinter]] = {
    "packed": lambda: PackedFingerprinter("cpu", "test"),
    **{f"native-{unit}": lambda unit=unit: NativeFingerprinter("cpu", "test", unit) for _, unit in _native.units()},
}


@pytest.fixture(params=IMPLEMENTATIONS)
def fingerprinter(request: pytest.FixtureRequest) -> Fingerprinter:
    """Each implementation in turn, and each vector unit of the compiled one."""
    return IMPLEMENTATIONS[request.param]()


def rows_of(
    fingerprinter: Fingerprinter,
    tensors: list[torch.Tensor | None],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the rows of a list of tensors."""
    if out is None:
        out = torch.full((len(tensors), ROW), torch.nan, dtype=torch.float64)
    fingerprinter.rows(tensors, out)
    return out


def reference_rows(tensors: list[torch.Tensor | None]) -> torch.Tensor:
    """Return the rows that the specification gives."""
    return rows_of(ReferenceFingerprinter("cpu", "test"), tensors)


def magnitude_sum(tensor: torch.Tensor | None) -> float:
    """Sum of |x| over the finite elements: what errors of the sketch are measured against."""
    if tensor is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    tensor = tensor.detach()
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return float(real.double().abs().nan_to_num(0.0, 0.0, 0.0).sum())


def disagreements(tensors: list[torch.Tensor | None], rows: torch.Tensor) -> list[str]:
    """Name every tensor and column where `rows` is not what the reference says."""
    wanted = reference_rows(tensors)
    found = []
    for index, (tensor, row, want) in enumerate(zip(tensors, rows, wanted, strict=True)):
        name = "None" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
        bad = [COLUMNS[c] for c in INTEGER_COLUMNS if row[c] != want[c]]
        if not abs(row[L2] - want[L2]) <= L2_BOUND * want[L2]:
            bad.append("l2")
        error = (row[SKETCH_AT:] - want[SKETCH_AT:]).abs().max()
        if not error <= SKETCH_BOUND * magnitude_sum(tensor):
            bad.append("sketch")
        if not torch.isfinite(row).all():
            bad.append("not finite")
        found += [f"{index} {name}: {column}" for column in bad]
    return found


def generator() -> torch.Generator:
    """The same numbers in every test."""
    return torch.Generator().manual_seed(20)


def of_every_size(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Random tensors around every boundary, some zeros among them."""
    for size in (*SIZES, *LARGE_SIZES):
        x = torch.randn(size, generator=generator()).to(dtype)
        x[::7] = 0
        yield x


def with_values(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Non-finite elements, signed zeros and the ends of the range."""
    info = torch.finfo(dtype)
    inf = float("inf")
    for size in (10, 5000, CHUNK + 5000):
        x = torch.randn(size, generator=generator()).to(dtype)
        for at, value in ((0, inf), (3, -inf), (5, float("nan")), (7, -0.0), (size - 1, inf)):
            x[at] = value
        yield x
        for value in (0.0, -0.0, info.max, -info.max, info.tiny, info.tiny / 8, inf, -inf):
            yield torch.full((size,), value, dtype=dtype)
        yield torch.full((size,), float("nan"), dtype=dtype)
        for rest in (0.0, 1.0):
            alone = torch.full((size,), rest, dtype=dtype)
            alone[size // 2] = float("nan")
            yield alone
            yield signalling(alone)
        mixed = torch.randn(size, generator=generator()).to(dtype)
        mixed[size // 2 :] *= info.tiny
        yield mixed
        mixed = torch.randn(size, generator=generator()).to(dtype)
        mixed[: size // 3] *= info.max / 8
        yield mixed


def signalling(tensor: torch.Tensor) -> torch.Tensor:
    """The same with the quiet bit of every NaN cleared and its lowest bit set."""
    bits = tensor.clone().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
    quiet = {torch.float16: 1 << 9, torch.bfloat16: 1 << 6, torch.float32: 1 << 22, torch.float64: 1 << 51}
    bits[tensor.isnan()] ^= quiet[tensor.dtype] | 1
    return bits.view(tensor.dtype)


def of_awkward_layout(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Views that start anywhere, have strides, or no dimension at all."""
    x = torch.randn(6000, generator=generator()).to(dtype)
    yield from (x[1:], x[3:4500], x[5:7])
    yield x.view(60, 100).t()
    yield x.view(60, 100)[:, 3:71]
    yield x[::3]
    yield x[:4096].view(4, 8, 16, 8).permute(3, 1, 0, 2)
    yield x[:1].expand(2048)
    yield x[11].reshape(())
    yield x[7:9][::2]  # one element, whose stride is not 1
    yield torch._neg_view(x)
    yield torch._neg_view(x.view(60, 100).t())
    yield torch.randn(300, 400, generator=generator()).to(dtype).t()
    yield x.requires_grad_()


def raw(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Types that are hashed only."""
    for size in (0, 1, 7, 100, 4097, CHUNK + 3):
        x = torch.randn(size, generator=generator()) * 5
        yield x.to(torch.uint8).view(dtype) if dtype in PACKED_DTYPES else x.to(dtype)
    yield (torch.arange(100) > 50).to(torch.uint8).repeat_interleave(dtype.itemsize).view(dtype).view(4, 25).t()


_NAMES = (*(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), "bits8", "float4_e2m1fn_x2")
PACKED_DTYPES = tuple(getattr(torch, name) for name in _NAMES if hasattr(torch, name))
"""Formats that torch keeps bytes in and can do little else with, as far as this version has them."""

RAW_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    *PACKED_DTYPES,
)


@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
@pytest.mark.parametrize("tensors", [of_every_size, with_values, of_awkward_layout])
def test_values_agree_with_the_reference(
    fingerprinter: Fingerprinter,
    dtype: torch.dtype,
    tensors: Callable[[torch.dtype], Iterator[torch.Tensor]],
) -> None:
    """Integer columns are equal bit for bit, the others within their bound, and all are finite."""
    chosen: list[torch.Tensor | None] = list(tensors(dtype))
    assert disagreements(chosen, rows_of(fingerprinter, chosen)) == []


@pytest.mark.parametrize("dtype", RAW_DTYPES, ids=str)
def test_raw_bytes_agree_with_the_reference(fingerprinter: Fingerprinter, dtype: torch.dtype) -> None:
    """Integers, bool and float8 have the reference's hash and zeros elsewhere."""
    tensors: list[torch.Tensor | None] = list(raw(dtype))
    rows = rows_of(fingerprinter, tensors)
    assert torch.equal(rows, reference_rows(tensors))
    assert not rows[:, 2:].any()


def test_mixed_lists_agree_with_the_reference(fingerprinter: Fingerprinter) -> None:
    """One call serves all dtypes, complex ones, absent and empty tensors, in any order."""
    x = torch.randn(999, generator=generator())
    tensors = [
        x.bfloat16(),
        None,
        torch.arange(77),
        x,
        torch.complex(x, -x),
        x.double(),
        torch.complex(x, x).conj(),
        torch.complex(x, x).conj().imag,
        torch.empty(0, 5),
        None,
        x.half().view(3, 333).t(),
    ]
    assert disagreements(tensors, rows_of(fingerprinter, tensors)) == []


def test_absent_and_empty_tensors(fingerprinter: Fingerprinter) -> None:
    """None is a row of zeros; an empty tensor has a hash, that of no bytes, and zeros elsewhere."""
    absent, empty, other = rows_of(fingerprinter, [None, torch.empty(0), torch.empty(0, 3).half()])
    assert not absent.any()
    assert empty[:2].any()
    assert torch.equal(empty, other)
    assert not empty[2:].any()


def test_empty_list(fingerprinter: Fingerprinter) -> None:
    """No tensors, no rows, no failure."""
    assert rows_of(fingerprinter, []).shape == (0, ROW)


def test_head_is_a_strided_copy(fingerprinter: Fingerprinter) -> None:
    """The head gets the leading columns, and what lies between its rows is left alone."""
    tensors: list[torch.Tensor | None] = [torch.randn(n, generator=generator()) for n in (9, 5000)]
    tensors.append(None)
    buffer = torch.full((4 + len(tensors) * 7,), -1.0, dtype=torch.float64)
    head = buffer[4:].view(len(tensors), 7)[:, 1 : 1 + HEAD]
    out = torch.empty(len(tensors), ROW, dtype=torch.float64)
    fingerprinter.rows(tensors, out, head)
    assert torch.equal(head, out[:, :HEAD])
    assert int((buffer == -1).sum()) == 4 + 2 * len(tensors)


def test_rows_do_not_depend_on_company_or_alignment(fingerprinter: Fingerprinter) -> None:
    """The row of a tensor is the same to the last bit, alone or not, aligned or not."""
    x = torch.randn(CHUNK + 100, generator=generator())
    room = torch.empty(CHUNK + 101)
    shifted = room[1:].copy_(x)
    alone = rows_of(fingerprinter, [x])[0]
    together = rows_of(fingerprinter, [torch.ones(5), shifted, None, x, x.half()])
    assert torch.equal(together[1], alone)
    assert torch.equal(together[3], alone)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30, 1e-30])
@pytest.mark.parametrize("size", [100, 5000])
def test_rows_do_not_depend_on_values_that_need_another_pass(
    fingerprinter: Fingerprinter, value: float, size: int
) -> None:
    """What must be summed with more care does not change the rows beside it, to the last bit."""
    x = torch.randn(size, generator=generator())
    awkward = torch.full((100,), value)
    alone = rows_of(fingerprinter, [x])[0]
    assert torch.equal(rows_of(fingerprinter, [awkward, x, awkward, torch.ones(3000)])[1], alone)


def test_subnormals_count_under_flush_to_zero() -> None:
    """A trainer that flushes subnormals gets the same rows from the kernel, and keeps its mode."""
    tensors: list[torch.Tensor | None] = [
        torch.full((500,), 1e-40),
        torch.full((500,), 2.0**-24, dtype=torch.float16),
        torch.full((500,), 1e-310, dtype=torch.float64),
    ]
    wanted = reference_rows(tensors)
    tiny = torch.tensor([1e-310], dtype=torch.float64)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        rows = rows_of(NativeFingerprinter("cpu", "test"), tensors)
        still_flushed = float((tiny * 1.5).sum()) == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(rows[:, INTEGER_COLUMNS], wanted[:, INTEGER_COLUMNS])
    assert still_flushed


def test_a_hundred_million_elements() -> None:
    """A tensor of 1,526 chunks: two implementations that share no code agree."""
    x = torch.arange(100_000_000, dtype=torch.int32).view(torch.float32)[:50_000_000]
    x = x.view(torch.bfloat16)
    compiled = rows_of(NativeFingerprinter("cpu", "test"), [x])[0]
    torch_only = rows_of(PackedFingerprinter("cpu", "test"), [x])[0]
    assert x.numel() == 100_000_000
    assert torch.equal(compiled[INTEGER_COLUMNS], torch_only[INTEGER_COLUMNS])
    assert compiled[L2] == pytest.approx(float(torch_only[L2]), rel=L2_BOUND)
    assert (compiled - torch_only)[SKETCH_AT:].abs().max() <= 1e-5 * torch_only[L2].sqrt()
