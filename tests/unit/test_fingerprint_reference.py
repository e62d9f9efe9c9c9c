"""The specification against arithmetic that shares nothing with it."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tpwatch.fingerprint.layout import CHUNK, COLUMNS, L2_MAX, ROW, SEED, SKETCH, SKETCH_NORM
from tpwatch.fingerprint.reference import VALUE_DTYPES, ReferenceFingerprinter, hash64, statistics
from tpwatch.fingerprint.tables import make_tables

TABLES = make_tables()
M64 = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """The published generator, on Python integers."""
    z = (state + 0x9E3779B97F4A7C15) & M64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    return z ^ (z >> 31)


def oracle(data: bytes, chunk_bytes: int) -> int:
    """The hash by its formula, on Python integers, word by word."""
    keys = splitmix64(SEED ^ 0xABCDEF)
    chunk_keys = splitmix64(SEED ^ 0x55AA)
    v0 = [splitmix64(keys + j) & 0xFFFFFFFF | 1 for j in range(512)]
    v1 = [splitmix64(keys + 10_000 + j) & 0x7FFFFFFF | 1 for j in range(512)]
    total = splitmix64(len(data) ^ SEED)
    for c, start in enumerate(range(0, len(data), chunk_bytes)):
        chunk = data[start : start + chunk_bytes]
        chunk += bytes(-len(chunk) % 4096)
        for r in range(len(chunk) // 4096):
            halves = struct.unpack_from("<1024I", chunk, 4096 * r)
            row = sum(
                k0 * low + k1 * (high ^ 0x80000000)
                for k0, k1, low, high in zip(v0, v1, halves[::2], halves[1::2], strict=True)
            )
            total += (splitmix64(chunk_keys + c) | 1) * (splitmix64(keys + 20_000 + r) | 1) * row
    return total & M64


def random_bytes(count: int, seed: int = 0) -> bytes:
    """Bytes of every value."""
    return np.random.default_rng(seed).bytes(count)


def as_tensor(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    """The elements that lie in these bytes."""
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def digest(tensor: torch.Tensor) -> int:
    """The 64-bit hash."""
    return hash64(tensor, TABLES)


def column(tensor: torch.Tensor, name: str) -> float:
    """One column behind the hash."""
    return float(statistics(tensor, TABLES)[COLUMNS.index(name) - 2])


def sketch(tensor: torch.Tensor) -> torch.Tensor:
    """The sketch: float64 (SKETCH,)."""
    return statistics(tensor, TABLES)[-SKETCH:]


# --- hash ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 9, 100, 4095, 4096, 4097, 20_001])
def test_hash_of_bytes(count: int) -> None:
    """The hash is the published sum, also where the last word and row are incomplete."""
    data = random_bytes(count)
    assert digest(as_tensor(data, torch.uint8)) == oracle(data, CHUNK)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
def test_hash_of_several_chunks(dtype: torch.dtype) -> None:
    """A chunk is 65,536 elements whatever their size, and each has its own key."""
    data = random_bytes((2 * CHUNK + 12_345) * dtype.itemsize)
    assert digest(as_tensor(data, dtype)) == oracle(data, CHUNK * dtype.itemsize)


def test_hash_halves_fill_the_first_columns() -> None:
    """Low and high 32 bits travel apart, exact in float64."""
    data = random_bytes(1000)
    row = torch.empty(1, ROW, dtype=torch.float64)
    ReferenceFingerprinter("cpu", "test").rows([as_tensor(data, torch.uint8)], row)
    low, high = (int(x) for x in row[0, :2])
    assert low | high << 32 == oracle(data, CHUNK)
    assert max(low, high) < 1 << 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_every_single_bit_flip_is_seen(dtype: torch.dtype) -> None:
    """One changed bit anywhere in an element always changes the hash."""
    x = torch.randn(1003).to(dtype)
    before = digest(x)
    size = x.element_size()
    for element in (0, 1, 2, 3, 501, 1002):
        for bit in range(8 * size):
            flipped = x.clone()
            flipped.view(torch.uint8)[element * size + bit // 8] ^= 1 << bit % 8
            assert digest(flipped) != before


def swapped(x: torch.Tensor) -> torch.Tensor:
    """Two elements change places."""
    y = x.clone()
    y[3], y[977] = x[977], x[3]
    return y


def opposite_ulps(x: torch.Tensor) -> torch.Tensor:
    """Two elements move one unit in the last place, in opposite directions."""
    y = x.clone()
    bits = y.view({2: torch.int16, 4: torch.int32}[y.element_size()])
    bits[5] += 1
    bits[700] -= 1
    return y


def ulp_triple(x: torch.Tensor) -> torch.Tensor:
    """Neighbours move by +1, -2, +1 units in the last place: blind spot of affine weights."""
    y = x.clone()
    bits = y.view({2: torch.int16, 4: torch.int32}[y.element_size()])
    for at, step in ((8, 1), (9, -2), (10, 1)):
        bits[at] += step
    return y


def two_signs(x: torch.Tensor) -> torch.Tensor:
    """Two elements change sign: blind spot of XOR."""
    y = x.clone()
    y[[1, 64]] *= -1
    return y


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "two elements swapped": swapped,
    "permuted": lambda x: x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))],
    "transposed": lambda x: x.view(32, 32).t(),
    "rolled by a row": lambda x: torch.roll(x, 512),
    "negated": lambda x: -x,
    "two signs": two_signs,
    "opposite ULPs": opposite_ulps,
    "ULP triple": ulp_triple,
    "trailing zero": lambda x: torch.cat((x, torch.zeros(1, dtype=x.dtype))),
    "shorter": lambda x: x[:-1],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_changes_that_sums_and_xor_miss(change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
    """Changes that keep the multiset, the sum or the XOR of the elements are seen."""
    for seed in range(20):
        x = torch.randn(1024, generator=torch.Generator().manual_seed(seed)).to(dtype)
        assert digest(change(x)) != digest(x)


def test_zero_and_negative_zero_differ() -> None:
    """One, two or all zeros that change their sign are seen."""
    zeros = torch.zeros(4096)
    hashes = {digest(zeros), digest(-zeros)}
    for places in ([0], [1], [77], [4095], [0, 1], [77, 78]):
        x = zeros.clone()
        x[places] = -0.0
        hashes.add(digest(x))
    assert len(hashes) == 8


def test_nan_payloads_differ() -> None:
    """Quiet, signalling and odd NaNs are different bytes."""
    payloads = torch.tensor([0x7FC00000, 0x7FC00001, 0x7F800001, 0x7FFFFFFF], dtype=torch.int32)
    assert len({digest(p.reshape(1).view(torch.float32)) for p in payloads}) == 4


def test_lengths_of_zeros_differ() -> None:
    """Nothing but zeros, one more or one less, is seen."""
    assert len({digest(torch.zeros(n)) for n in range(300)}) == 300


def test_near_identical_inputs_do_not_collide() -> None:
    """20,000 tensors with a few random steps of one ULP each have different hashes."""
    x = torch.randn(64, generator=torch.Generator().manual_seed(3)).bfloat16()
    steps = torch.randint(-1, 2, (20_000, 64), generator=torch.Generator().manual_seed(4))
    bits = (x.view(torch.int16) + steps).to(torch.int16)
    distinct = {row.numpy().tobytes() for row in bits}
    assert len({digest(row) for row in bits}) == len(distinct)


def test_hash_ignores_strides() -> None:
    """The order that counts is the logical one."""
    x = torch.randn(64, 128)
    assert digest(x.t()) == digest(x.t().contiguous())
    assert digest(x.view(-1)[1:1001]) == digest(x.view(-1)[1:1001].clone())


# --- statistics ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
def test_statistics_against_numpy(dtype: torch.dtype) -> None:
    """l2, absmax, zeros and nonfinite are those of the elements in float64."""
    x = torch.randn(70_000, generator=torch.Generator().manual_seed(5)).to(dtype)
    x[::5], x[3], x[60_000], x[69_999] = 0, torch.inf, -torch.inf, torch.nan
    x[10:20] = -0.0
    exact = x.double().numpy()
    finite = exact[np.isfinite(exact)]
    assert column(x, "l2") == pytest.approx(float(np.sum(finite**2)), rel=1e-12)
    assert column(x, "absmax") == np.abs(finite).max()
    assert column(x, "zeros") == int((finite == 0).sum())
    assert column(x, "nonfinite") == 3


def test_l2_is_clamped() -> None:
    """Squares beyond float64 give the largest allowed value, not infinity."""
    assert column(torch.full((10,), 1e200, dtype=torch.float64), "l2") == L2_MAX


def test_everything_is_finite_at_the_end_of_float64() -> None:
    """Sums that overflow in both directions leave no infinity and no NaN."""
    largest = torch.finfo(torch.float64).max
    x = torch.full((100_000,), largest, dtype=torch.float64)
    x[::2] *= -1
    assert torch.isfinite(statistics(x, TABLES)).all()
    assert column(x, "absmax") == largest


# --- sketch --------------------------------------------------------------------------------------


def test_sketch_is_linear() -> None:
    """Sketches add like tensors; with small integers exactly so."""
    draw = torch.Generator().manual_seed(6)
    a, b = (torch.randint(-99, 99, (150_000,), generator=draw).float() for _ in range(2))
    assert torch.equal(sketch(a) + sketch(b), sketch(a + b))
    assert torch.equal(3 * sketch(a), sketch(3 * a))


def test_sketch_of_a_low_precision_copy_is_comparable() -> None:
    """Signs go by element number, so that bf16 and fp32 copies of a tensor have one sketch."""
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(7)).bfloat16()
    for dtype in VALUE_DTYPES[:2]:
        assert torch.equal(sketch(x.to(dtype)), sketch(x))


def test_sketch_keeps_the_norm_of_one_element() -> None:
    """A single element enters every coordinate with weight one, whatever its place."""
    for place in (0, 1, 63, 64, 1023, 1024, 65_535, 65_536, 150_000):
        x = torch.zeros(150_001)
        x[place] = 3.0
        assert sketch(x).abs().tolist() == [3.0] * SKETCH


@pytest.mark.parametrize("size", [100, 5000, 200_000])
def test_sketch_keeps_the_norm_on_average(size: int) -> None:
    """Over many random tensors the estimate of l2 has the right mean and spread."""
    draw = torch.Generator().manual_seed(8)
    trials = 60
    ratios = []
    for _ in range(trials):
        x = torch.randn(size, generator=draw, dtype=torch.float64)
        ratios.append(float(sketch(x).square().sum() * SKETCH_NORM / x.square().sum()))
    spread = (2 / SKETCH) ** 0.5
    assert np.mean(ratios) == pytest.approx(1, abs=4 * spread / trials**0.5)
    assert np.std(ratios) == pytest.approx(spread, rel=0.5)


def test_single_elements_in_different_places_do_not_look_alike() -> None:
    """Two tensors each dominated by one element rarely have the same sketch: 2**-11 or so."""
    draw = torch.Generator().manual_seed(9)
    seen = [tuple(sketch_of_unit(int(p))) for p in torch.randperm(65_536, generator=draw)[:200]]
    alike = sum(a == b for i, a in enumerate(seen) for b in seen[:i])
    pairs = len(seen) * (len(seen) - 1) // 2
    assert alike / pairs < 4 / 2048


def sketch_of_unit(place: int) -> list[float]:
    """Sketch of a tensor that is 1 in one place."""
    x = torch.zeros(65_536)
    x[place] = 1.0
    return sketch(x).tolist()
