"""Stand-ins that let CUDA-only Megatron-core code run on CPU tensors over gloo.

Knows: which `torch.cuda` names Megatron-core touches on its training path, and why. Must not know:
the model, the faults, tpwatch. These are doubles for the CUDA runtime and for nothing else: every
line of Megatron-core, its collectives and its optimizers runs as shipped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class InertStream:
    """A stream and an event in one: work on the CPU is already in order, waiting is a no-op.

    Why: DDP reduces on a communication stream of its own, and the current stream waits for it.
    """

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        """Accept whatever `torch.cuda.Stream` and `torch.cuda.stream` accept."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_exc: object) -> None:
        pass

    def wait_stream(self, _other: object) -> None:
        """Return at once: everything issued before has finished."""

    def wait_event(self, _event: object) -> None:
        """Return at once: everything recorded before has finished."""

    def record_event(self, _event: object = None) -> InertStream:
        """Hand out an event that is already complete."""
        return self

    def synchronize(self) -> None:
        """Return at once: everything issued before has finished."""


class CudaMeansCpu(TorchFunctionMode):
    """Sends `device="cuda"` to the CPU and lets CPU tensors answer `type()` as CUDA tensors would.

    Why: the schedules, the optimizers and the loss scaler create scalars with `device="cuda"`, and
    the mixed-precision and distributed optimizers sort parameters by the *string* `param.type()`
    (`"torch.cuda.FloatTensor"`), raising a `TypeError` on any other.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `func` with the device rewritten."""
        kwargs = kwargs or {}
        if "device" in kwargs and "cuda" in str(kwargs["device"]):
            kwargs = {**kwargs, "device": CPU}
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1:
            return result.replace("torch.", "torch.cuda.")
        return result


def install() -> None:
    """Put the stand-ins in place, once per process, before Megatron-core binds their names.

    The device rewriting holds for the calling thread, outside backward passes: autograd leaves
    function modes behind.
    """
    if installed():
        return
    # Without CUDA libraries an installed Transformer Engine fails to load with an error that
    # Megatron-core does not expect. `tpwatch.lab.te.install` makes it loadable and comes first;
    # otherwise it has to look absent.
    sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]
    for name, stand_in in _runtime().items():
        setattr(torch.cuda, name, stand_in)
    vars(torch.cuda.random)["get_rng_state"] = torch.cuda.get_rng_state
    torch.Tensor.cuda = lambda tensor, *_args, **_kwargs: tensor  # type: ignore[method-assign]
    mode: Any = CudaMeansCpu()
    mode.__enter__()


def installed() -> bool:
    """True if this process runs on the stand-ins."""
    return vars(torch.cuda)["Stream"] is InertStream


def _runtime() -> dict[str, object]:
    """What stands in for which name of `torch.cuda`."""
    generator = torch.default_generator
    return {
        # Communication streams of DDP and its buffers.
        "Stream": InertStream,
        "stream": InertStream,
        "current_stream": InertStream,
        "default_stream": InertStream,
        # Used as `device=` of new tensors all over the tensor-parallel layers and buffers.
        "current_device": lambda: CPU,
        # Process-group set-up.
        "synchronize": lambda *_args, **_kwargs: None,
        # Megatron's RNG tracker swaps the state of the CUDA generator: let it swap the CPU's.
        "default_generators": {CPU: generator},
        "get_rng_state": lambda *_args, **_kwargs: generator.get_state(),
        "manual_seed": generator.manual_seed,
        "_lazy_call": lambda call, **_kwargs: call(),
    }
