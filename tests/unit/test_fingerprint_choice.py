"""Which implementation is used, and what is said when one is missing."""

from __future__ import annotations

import sys

import pytest
import torch

import tpwatch.fingerprint
from tests.commands import run_python
from tpwatch.errors import FingerprintUnavailable
from tpwatch.fingerprint import availability, choose
from tpwatch.fingerprint.layout import COLUMNS, HEAD, ROW

ORDER = ("triton", "native", "packed", "reference")
MODULES = {
    "triton": "triton",
    "native": "tpwatch.fingerprint._native",
    "packed": "tpwatch.fingerprint.packed",
}


def disable(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make the import of an implementation fail, as where it is not installed."""
    monkeypatch.setitem(sys.modules, MODULES[name], None)
    monkeypatch.delattr(tpwatch.fingerprint, name if name == "packed" else f"_{name}", raising=False)
    for module in ("native", "triton_launch", "triton_kernels"):
        monkeypatch.delitem(sys.modules, f"tpwatch.fingerprint.{module}", raising=False)


def test_the_fastest_is_chosen() -> None:
    """On a CPU the compiled kernel serves, and the reason names it and what was passed over."""
    chosen = choose("cpu")
    assert chosen.name == "native"
    assert chosen.reason.startswith("compiled CPU kernel, vector unit ")
    assert "not triton: " in chosen.reason


@pytest.mark.parametrize(("missing", "expected"), [(("native",), "packed"), (("native", "packed"), "reference")])
def test_the_next_link_takes_over(monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...], expected: str) -> None:
    """Without its faster neighbours each implementation is chosen, works, and says why."""
    for name in missing:
        disable(monkeypatch, name)
    chosen = choose("cpu")
    out = torch.empty(1, ROW, dtype=torch.float64)
    chosen.rows([torch.tensor([3.0, -4.0])], out)
    assert chosen.name == expected
    assert out[0, COLUMNS.index("l2")] == 25
    for name in missing:
        assert f"not {name}: " in chosen.reason


@pytest.mark.parametrize("name", ["native", "packed", "reference"])
def test_a_choice_by_name_is_kept(name: str) -> None:
    """What is asked for by name is what serves."""
    chosen = choose(torch.device("cpu"), name)
    assert chosen.name == name
    assert chosen.reason == "requested by name"


def test_a_missing_choice_by_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An explicit request is never replaced by something else."""
    disable(monkeypatch, "native")
    with pytest.raises(FingerprintUnavailable) as caught:
        choose("cpu", "native")
    assert caught.value.name == "native"
    assert "_native" in caught.value.reason


def test_triton_by_name_needs_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU kernel is refused on a CPU, whether triton is installed or not."""
    with pytest.raises(FingerprintUnavailable):
        choose("cpu", "triton")
    disable(monkeypatch, "triton")
    with pytest.raises(FingerprintUnavailable, match="triton"):
        choose("cpu", "triton")


def test_an_unknown_name_is_an_error() -> None:
    """A misspelt name is answered with those that exist."""
    with pytest.raises(FingerprintUnavailable, match=", ".join(ORDER)):
        choose("cpu", "fastest")


def test_an_unknown_vector_unit_is_an_error() -> None:
    """The compiled kernel says which vector units this processor has."""
    from tpwatch.fingerprint.native import NativeFingerprinter

    with pytest.raises(FingerprintUnavailable, match="portable"):
        NativeFingerprinter("cpu", "test", unit="avx9000")


def test_availability_lists_every_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each implementation is listed in order of preference, usable or not, with a reason."""
    disable(monkeypatch, "native")
    found = availability("cpu")
    assert [name for name, _, _ in found] == list(ORDER)
    assert {name: usable for name, usable, _ in found} == {
        "triton": False,
        "native": False,
        "packed": True,
        "reference": True,
    }
    assert all(why for _, _, why in found)


def test_gpu_tensors_never_go_to_the_cpu_kernel() -> None:
    """For a CUDA device the compiled kernel is refused and the torch fallback offered."""
    usable = {name: usable for name, usable, _ in availability("cuda")}
    assert not usable["native"]
    assert usable["packed"]


def test_the_layout_needs_no_torch() -> None:
    """Constants and the choice itself import where torch is not installed."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from tpwatch.fingerprint import layout, choose\n"
        "print(layout.ROW, layout.HEAD, len(layout.COLUMNS))\n"
    )
    done = run_python("-c", code)
    assert done.stdout.split() == ["22", str(HEAD), "22"], done.stderr


def test_the_columns() -> None:
    """Names and order of the columns are a contract with the exchange and with recorded runs."""
    sketches = tuple(f"sketch_{i}" for i in range(16))
    leading = ("hash_lo", "hash_hi", "l2", "absmax", "nonfinite")
    assert (*leading, "zeros", *sketches) == COLUMNS
    assert COLUMNS[:HEAD] == leading
