"""Which implementation is used, and what is said when one is missing."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import tpwatch.fingerprint
from tests.commands import run_python
from tpwatch.errors import FingerprintUnavailable
from tpwatch.fingerprint import Fingerprinter, availability, choose
from tpwatch.fingerprint.layout import COLUMNS, HEAD, ROW
from tpwatch.fingerprint.plans import Tensors
from tpwatch.fingerprint.reference import ReferenceFingerprinter

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
        monkeypatch.delattr(tpwatch.fingerprint, module, raising=False)


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
    assert chosen.reason.endswith("; requested by name")


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
    """For a CUDA device the compiled kernel is refused, whether there is a card or not."""
    found = {name: (usable, why) for name, usable, why in availability("cuda:0")}
    assert found["native"] == (False, "runs on cpu only")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_device_that_is_not_there_is_an_error_that_names_every_link() -> None:
    """Nothing can be computed on it, and what each implementation says of that is told."""
    with pytest.raises(FingerprintUnavailable) as caught:
        choose("cuda")
    assert [part.split(":")[0] for part in caught.value.reason.split("; ")] == [f"not {name}" for name in ORDER]


def broken_triton(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Put a triton in place that refuses an argument of its decorator, as versions before 3.2 do."""
    disable(monkeypatch, "triton")

    refuse = Mock(side_effect=TypeError("jit() got an unexpected keyword argument"))
    language = SimpleNamespace(constexpr=lambda value: SimpleNamespace(value=value))
    triton = SimpleNamespace(
        __version__=version, jit=lambda fn=None, **options: fn or refuse(**options), language=language
    )
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", language)


def test_any_failure_of_an_import_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """An implementation that is there and cannot be imported is passed over, whatever it raises."""
    broken_triton(monkeypatch, "3.4.0")
    assert availability("cuda")[0] == ("triton", False, "TypeError: jit() got an unexpected keyword argument")
    assert choose("cpu").name == "native"


@pytest.mark.parametrize("version", ["3.0.0", "3.2.0+git0d1e1a2"])
def test_an_old_triton_is_named_with_what_is_needed(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Its own failures would not say that it is old."""
    broken_triton(monkeypatch, version)
    assert availability("cuda")[0] == ("triton", False, f"triton {version} is too old: the kernels need 3.3")


def test_triton_is_not_imported_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes its time, and there is nothing to be had from it."""
    disable(monkeypatch, "triton")
    assert "not triton: runs on cuda only" in choose("cpu").reason


class Stub(ReferenceFingerprinter):
    """Stands for the GPU kernel; `failure` is what its first launch raises."""

    failure: Exception | None = None

    def rows(self, tensors: Tensors, out: torch.Tensor, head: torch.Tensor | None = None) -> None:
        """Fail as told, or write rows of zeros."""
        if self.failure is not None:
            raise self.failure
        del tensors, head
        out.zero_()


@pytest.fixture
def triton_stub(monkeypatch: pytest.MonkeyPatch) -> type[Stub]:
    """A triton implementation that takes every device."""
    stub = type("Stub", (Stub,), {})
    module = SimpleNamespace(check=lambda: (True, "stub"), TritonFingerprinter=stub)
    monkeypatch.setitem(sys.modules, "tpwatch.fingerprint.triton_launch", module)
    monkeypatch.setitem(tpwatch.fingerprint._IMPLEMENTATIONS, "triton", ("triton_launch", "TritonFingerprinter", ""))
    return stub


def test_what_fails_at_its_first_launch_is_passed_over(triton_stub: type[Stub]) -> None:
    """Installed is not working: without a C compiler a kernel cannot be launched. The reason is told in one line."""
    triton_stub.failure = RuntimeError("Failed to find C compiler.\n" + "source\n" * 1000)
    chosen = choose("cpu")
    assert chosen.name == "native"
    assert "; not triton: RuntimeError: Failed to find C compiler. source" in chosen.reason
    assert "\n" not in chosen.reason
    assert len(chosen.reason) < 500
    assert availability("cpu")[0][1] is False


def test_what_computes_something_else_is_passed_over(triton_stub: type[Stub]) -> None:
    """A row of zeros is not the row of three and minus four."""
    assert triton_stub.failure is None
    chosen = choose("cpu")
    assert chosen.name == "native"
    assert "not triton: its row of a known tensor is wrong" in chosen.reason


def test_what_fails_at_its_first_launch_is_an_error_if_asked_for_by_name(triton_stub: type[Stub]) -> None:
    """At attach, not at every step."""
    triton_stub.failure = AttributeError("module 'triton.language' has no attribute 'tuple'")
    with pytest.raises(FingerprintUnavailable, match=r"AttributeError: .* has no attribute 'tuple'"):
        choose("cpu", "triton")


def test_behind_triton_a_gpu_is_served_by_torch(monkeypatch: pytest.MonkeyPatch, triton_stub: type[Stub]) -> None:
    """The chain of a CUDA device, with constructors that need no card: triton, then the packed torch path."""
    del triton_stub
    tried: list[str] = []

    failure = RuntimeError("no kernel image is available for this device")

    def launch(fingerprinter: Fingerprinter, device: str) -> None:
        tried.append(f"{fingerprinter.name} on {device}")
        if fingerprinter.name == "triton":
            raise failure

    def stub(name: str) -> SimpleNamespace:
        def made(_device: str, reason: str) -> SimpleNamespace:
            return SimpleNamespace(name=name, reason=reason)

        return SimpleNamespace(check=lambda: (True, "stub"), TritonFingerprinter=made, PackedFingerprinter=made)

    monkeypatch.setattr(tpwatch.fingerprint, "_run", launch)
    monkeypatch.setitem(sys.modules, "tpwatch.fingerprint.triton_launch", stub("triton"))
    monkeypatch.setitem(sys.modules, "tpwatch.fingerprint.packed", stub("packed"))
    chosen = choose("cuda:1")
    assert tried == ["triton on cuda:1", "packed on cuda:1"]
    assert chosen.name == "packed"
    assert "not triton: RuntimeError: no kernel image is available for this device" in chosen.reason
    assert "not native: runs on cpu only" in chosen.reason


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
