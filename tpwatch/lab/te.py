"""Stand-ins for Transformer Engine's compiled kernels, so that its real Python runs on the CPU.

Knows: which kernels a norm fused with a linear calls, and how the extension is loaded. Must not
know: the model, the faults, tpwatch. Everything that decides about sequence parallelism, reduced
input gradients and marks on parameters is Transformer Engine's Python and runs as shipped. Call
`install` before `tpwatch.lab.cpu.install`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from enum import IntEnum
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from tpwatch.errors import AdapterUnavailable

PACKAGE = "transformer_engine"
EXTENSION = "transformer_engine_torch"
TESTED = "2.20.2"

# Transformer Engine checks these two against its own Python mirrors at import.
DType = IntEnum(
    "DType",
    {
        "kByte": 0,
        "kInt32": 2,
        "kFloat32": 4,
        "kFloat16": 5,
        "kBFloat16": 6,
        "kFloat8E4M3": 7,
        "kFloat8E5M2": 8,
        "kFloat4E2M1": 10,
    },
)
FusedAttnBackend = IntEnum("FusedAttnBackend", {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2})


def generic_gemm(*operands: Any, **_options: object) -> tuple[torch.Tensor, None, None, None]:
    """Multiply `op(b) @ op(a)` of `(a, transpose_a, b, transpose_b, out, ...)`.

    The kernel is column-major: seen from row-major tensors the operands swap. Answers (output, bias
    gradient, gelu input, extra output); knows neither bias nor accumulation.
    """
    a, transpose_a, b, transpose_b, out = operands[:5]
    left, right = b.reshape(-1, b.shape[-1]), a.reshape(-1, a.shape[-1])
    result = (left.mT if transpose_b else left) @ (right.mT if transpose_a else right)
    if not transpose_b:
        result = result.unflatten(0, b.shape[:-1])
    return result if out is None else out.copy_(result.view_as(out)), None, None, None


def rmsnorm_fwd(
    x: torch.Tensor, gain: torch.Tensor, eps: float, out: torch.Tensor | None, *_unused: object
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Divide rows by their root mean square; (output, mean, reciprocal root mean square)."""
    scale = torch.rsqrt(x.square().mean(-1) + eps)
    normed = x * scale.unsqueeze(-1) * gain
    return normed if out is None else out.copy_(normed), None, scale


def rmsnorm_bwd(
    grad: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, gain: torch.Tensor, *_unused: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `rmsnorm_fwd` with respect to its input and its gain."""
    grad = grad.view_as(x)
    unit, inner = x * scale.unsqueeze(-1), grad * gain
    projected = unit * (inner * unit).mean(-1, keepdim=True)
    return scale.unsqueeze(-1) * (inner - projected), (grad * unit).flatten(0, -2).sum(0)


def _missing(name: str) -> Callable[..., None]:
    """A kernel that says that it has no stand-in."""

    def kernel(*_args: object, **_kwargs: object) -> None:
        raise AdapterUnavailable(PACKAGE, TESTED, TESTED, f"{EXTENSION}.{name}")

    return kernel


KERNELS: Mapping[str, object] = {
    "DType": DType,
    "NVTE_Fused_Attn_Backend": FusedAttnBackend,
    "generic_gemm": generic_gemm,
    "rmsnorm_fwd": rmsnorm_fwd,
    "rmsnorm_bwd": rmsnorm_bwd,
    "layernorm_fwd": _missing("layernorm_fwd"),  # looked up beside their twins
    "layernorm_bwd": _missing("layernorm_bwd"),
    "get_cublasLt_version": lambda: 130_000,
    "get_cudnn_version": lambda: 91_200,
}


class Enumeration(type):
    """A class whose unknown attributes are distinct integers: an enumeration, by name only."""

    def __getattr__(cls, name: str) -> int:
        """Number a member when it is first asked for."""
        if name.startswith("__"):
            raise AttributeError(name)
        value = len([member for member in vars(cls) if not member.startswith("__")])
        setattr(cls, name, value)
        return value


class Extension(ModuleType):
    """The compiled extension: the kernels above, enumerations by name, and nothing else."""

    def __getattr__(self, name: str) -> object:
        """Make up an enumeration, or a function that says that it is missing."""
        if name.startswith("__"):
            raise AttributeError(name)
        value = Enumeration(name, (), {}) if name[0].isupper() else _missing(name)
        setattr(self, name, value)
        return value


class ClaimCuda(TorchFunctionMode):
    """Lets CPU tensors answer `is_cuda` with True, for the one check at a module's entry."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `func`, unless it is that question."""
        if getattr(func, "__self__", None) is torch.Tensor.is_cuda:
            return True
        return func(*args, **(kwargs or {}))


def install() -> None:
    """Import Transformer Engine with stand-ins for its kernels, once per process.

    Raises:
        AdapterUnavailable: the package is not installed.
    """
    if EXTENSION in sys.modules:
        return
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.loader is None:
        found, supported = "not installed", f"{TESTED} (extra lab-te)"
        raise AdapterUnavailable(PACKAGE, found, supported)
    extension = sys.modules[EXTENSION] = Extension(EXTENSION)
    vars(extension).update(KERNELS)
    package = sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    # Transformer Engine's own switch for "only the Python is here": load no CUDA library.
    with mock.patch.dict(os.environ, NVTE_PROJECT_BUILDING="1", NVTE_TORCH_COMPILE="0"):
        common: Any = importlib.import_module(f"{PACKAGE}.common")
        common.load_framework_extension = lambda _framework: None
        spec.loader.exec_module(package)
        importlib.import_module(f"{PACKAGE}.pytorch")
    # Megatron-core then takes torch's Adam and its own multi-tensor functions.
    sys.modules[f"{PACKAGE}.pytorch.optimizers"] = None  # type: ignore[assignment]
    _open_guards()


def _open_guards() -> None:
    """Let modules be built and entered although there is no CUDA device."""
    vars(torch.cuda)["is_current_stream_capturing"] = lambda: False
    base = importlib.import_module(f"{PACKAGE}.pytorch.module.base").TransformerEngineBaseModule
    base.__init__ = _within(_pretend_available, base.__init__)
    base.prepare_forward = _within(ClaimCuda, base.prepare_forward)
    gemm: Any = importlib.import_module(f"{PACKAGE}.pytorch.cpp_extensions.gemm")
    gemm.get_cublas_workspace = lambda *_args: torch.empty(1, dtype=torch.uint8)


def _within(context: Callable[[], AbstractContextManager[Any]], method: Callable[..., Any]) -> Callable[..., Any]:
    """Run a method within a context."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with context():
            return method(*args, **kwargs)

    return wrapped


@contextmanager
def _pretend_available() -> Iterator[None]:
    """Let `torch.cuda.is_available` answer True."""
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        yield
