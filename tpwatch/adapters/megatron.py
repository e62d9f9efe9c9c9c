"""Megatron-core.

Where its gradients are finalized, when its optimizer steps, and where the tensors lie.

Seams (measured on 0.16 and 0.19):

- `megatron.core.distributed.finalize_model_grads._allreduce_non_tensor_model_parallel_grads`, a
  module attribute that
  `finalize_model_grads` resolves at call time. Entry is reduced over data-parallel ranks and not
  yet over tensor-parallel ones, exit is both. The config field `finalize_model_grads_func` is not
  usable: trainers re-assign it, and its exit is already divided by the number of tokens.
- `prepare_grads` and `step` of the outermost optimizer, as instance attributes that shadow the
  methods.

Only translates. Discovery of parameters is in `megatron_params`.
"""

from __future__ import annotations

import importlib
import operator
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from tpwatch.adapters.base import Groups, Host
from tpwatch.adapters.megatron_changes import Changes
from tpwatch.adapters.megatron_checkpoints import CheckpointSeams, states
from tpwatch.adapters.megatron_params import Parameter, each_optimizer, parameters
from tpwatch.adapters.patch import Patch
from tpwatch.config import Config, load
from tpwatch.exchange import OUTSIDE
from tpwatch.parts import Look, Scope
from tpwatch.watch import Watch

FINALIZER = "_allreduce_non_tensor_model_parallel_grads"

_ABSENT = object()
"""Stands for an attribute that is not there: a `main_grad` may be None."""


class Megatron:
    """The adapter; see `tpwatch.adapters.base.Adapter`."""

    name = "megatron"

    def group(self, groups: Groups | None) -> tuple[str, dist.ProcessGroup | None]:
        """The tensor-parallel group of this rank: the caller's, else Megatron's global one."""
        if groups and "tp" in groups:
            return "tp", groups["tp"]
        return "tp", parallel_state.get_tensor_model_parallel_group()

    def examine(
        self,
        model: list[Any],
        optimizer: Any,
        config: Config,
        groups: Groups | None,
    ) -> Host:
        """Describe every parameter of the chunks; nothing is changed and no rank is asked."""
        axis, group = self.group(groups)
        found = parameters(model, optimizer)
        device = found[0].tensor.device if found else torch.device("cpu")
        return Host(
            axis=axis,
            group=group,
            candidates=[p.candidate for p in found],
            device=device,
            loss_scaler=any(getattr(o, "grad_scaler", None) is not None for o in each_optimizer(optimizer)),
            source=lambda rows: MegatronSource([found[i] for i in rows], optimizer),
            install=lambda watch: MegatronSeams(watch, model, optimizer, gate=config.checkpoint != "ignore"),
            versions={"megatron_core": importlib.import_module("megatron.core").__version__},
            stage=_stage(),
        )


ADAPTER = Megatron


def _stage() -> str:
    """Pipeline stage of this rank; where the caller has groups of its own, Megatron may know of none."""
    known = parallel_state.model_parallel_is_initialized()
    return str(parallel_state.get_pipeline_model_parallel_rank()) if known else ""


_KEPT = 8
"""Looks that are kept. A step has one for each finalizer call: a virtual pipeline may call it for each chunk."""


class MegatronSource:
    """Hands out values and the gradients that the finalizer reads, in plan order."""

    def __init__(self, found: Sequence[Parameter], optimizer: Any) -> None:
        """`found` are the parameters of the plan."""
        self._found = found
        self._optimizer = optimizer
        self._tensors = [p.tensor for p in found]
        self._values = [t.detach() for t in self._tensors]
        self._places = _addresses(self._tensors)
        self._slices: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._gradients: list[Any] = []
        self._looks: dict[tuple[Scope, tuple[bool, ...]], Look] = {}

    def values(self) -> Sequence[torch.Tensor]:
        """Parameter values.

        Re-read where a parameter's storage was swapped (`param.data = ...`).
        """
        places = _addresses(self._tensors)
        if places != self._places:
            for i, tensor in enumerate(self._tensors):
                if places[i] != self._places[i]:
                    self._values[i] = tensor.detach()
            self._places = places
        return self._values

    def look(self, scope: Scope) -> Look:
        """Gradients as the finalizer sees them.

        Trainable, and the attribute it reads is not None. A look is kept, by chunks and by what is frozen, as long as
        DDP's buffers are; a plain `.grad` comes and goes with every step, and must be free to.
        """
        gradients = [getattr(t, "main_grad", _ABSENT) for t in self._tensors]
        if not all(map(operator.is_, gradients, self._gradients)):
            self._gradients = []
            self._looks.clear()
        key = scope, tuple([t.requires_grad for t in self._tensors])  # a list on the way: half the time
        kept = self._looks.get(key)
        if kept is not None:
            return kept
        marked = [self._gradient(i, parameter, scope) for i, parameter in enumerate(self._found)]
        look = Look([gradient for gradient, _ in marked], [mark for _, mark in marked])
        if not any(gradient is _ABSENT for gradient in gradients):
            self._keep(key, gradients, look)
        return look

    def _keep(self, key: tuple[Scope, tuple[bool, ...]], gradients: list[Any], look: Look) -> None:
        """Remember a look made from these gradients; the oldest of too many is forgotten."""
        self._gradients = gradients
        self._looks[key] = look
        if len(self._looks) > _KEPT:
            del self._looks[next(iter(self._looks))]

    def states(self) -> Sequence[Sequence[torch.Tensor | None]]:
        """Master and moments of each parameter."""
        return states(self._optimizer, self._tensors)

    def _gradient(self, i: int, parameter: Parameter, scope: Scope) -> tuple[torch.Tensor | None, float]:
        candidate = parameter.candidate
        if parameter.chunk not in scope or candidate.grad_start == candidate.grad_stop:
            return None, OUTSIDE
        tensor = parameter.tensor
        gradient = tensor.main_grad if hasattr(tensor, "main_grad") else tensor.grad
        if gradient is None or not tensor.requires_grad:
            return None, 0.0
        return self._owned(i, candidate.grad_start, candidate.grad_stop, gradient), 1.0

    def _owned(self, i: int, start: int, stop: int, gradient: torch.Tensor) -> torch.Tensor:
        """The slice this data-parallel rank owns.

        The view is kept as long as the buffer is the same tensor.
        """
        if stop - start == gradient.numel():
            return gradient
        kept = self._slices.get(i)
        if kept is None or kept[0] is not gradient:
            kept = (gradient, gradient.view(-1)[start:stop])
            self._slices[i] = kept
        return kept[1]


def capturing() -> bool:
    """True inside the capture of a CUDA graph: what is launched there runs again at each replay, without any Python."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))


class MegatronSeams:
    """Wraps the finalizer's TP reduction and the outermost optimizer.

    `remove` puts the very same objects back.
    """

    def __init__(self, watch: Watch, chunks: Sequence[Any], optimizer: Any, *, gate: bool = False) -> None:
        """Install all seams; those of checkpoints only for a `gate`."""
        self._watch = watch
        self._chunks = {id(chunk): i for i, chunk in enumerate(chunks)}
        self._module: ModuleType = sys.modules["megatron.core.distributed.finalize_model_grads"]
        self._active = True
        self._wrap_finalizer()
        self._optimizer = self._wrap_optimizer(optimizer)
        self._checkpoints = CheckpointSeams(watch, optimizer) if gate else None
        self._changes = Changes(chunks)

    # ------------------------------------------------------------------------------- Seams protocol

    def lost(self) -> bool:
        """True if the host has put another reduction in place of our wrapper."""
        return self._finalizer.lost

    def reinstall(self) -> None:
        """Wrap the reduction the host has put there."""
        self._wrap_finalizer()

    def remove(self) -> Sequence[str]:
        """Restore.

        Where the current object is not ours, ours becomes a pass-through and a note says so.
        """
        self._active = False
        self._changes.remove()
        notes = [*self._checkpoints.remove()] if self._checkpoints else []
        return [*notes, *(note for patch in (self._finalizer, *self._optimizer) for note in patch.remove())]

    def iteration(self) -> int | None:
        """Megatron's own count (`args.curr_iteration`, completed iterations) plus one, where its trainer runs."""
        module = sys.modules.get("megatron.training.global_vars")
        args = getattr(module, "_GLOBAL_ARGS", None)
        done = getattr(args, "curr_iteration", None)
        return None if done is None else int(done) + 1

    def whole(self) -> Scope:
        """All chunks of this rank."""
        return frozenset(self._chunks.values())

    # --------------------------------------------------------------------------------------- wrappers

    def _wrap_finalizer(self) -> None:
        original = getattr(self._module, FINALIZER)

        def reduce_watched(model: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            scope = frozenset(i for i in map(self._chunks.get, map(id, model)) if i is not None)
            if not self._active or not scope:
                return original(model, *args, **kwargs)
            if capturing():
                self._watch.captured()
            proceed = self._watch.finalizer_entered(scope)
            self._watch.notice(self._changes.look)
            result = original(model, *args, **kwargs) if proceed else None
            self._watch.finalizer_left()
            return result

        reduce_watched.__wrapped__ = original  # type: ignore[attr-defined]
        self._finalizer = Patch(self._module, FINALIZER, reduce_watched, FINALIZER)

    def _wrap_optimizer(self, optimizer: Any) -> list[Patch]:
        prepare, step = optimizer.prepare_grads, optimizer.step

        def prepare_grads(*args: Any, **kwargs: Any) -> Any:
            if self._active and not capturing():
                self._watch.gradients_ready()
            return prepare(*args, **kwargs)

        def step_watched(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            if self._active:
                self._watch.stepped()
            return result

        wrappers = {"prepare_grads": prepare_grads, "step": step_watched}
        return [Patch(optimizer, name, wrapper, f"optimizer.{name}") for name, wrapper in wrappers.items()]


def add_args(parser: Any) -> Any:
    """Add tpwatch's options to Megatron's parser and return it.

    Call it from your own `extra_args_provider`.

    `--tpwatch` switches it on, `--tpwatch-interval` and `--tpwatch-config` override environment and file. Hand the
    parsed arguments to `config_from_args`.
    """
    group = parser.add_argument_group(title="tpwatch", description="replica consistency of gradients")
    group.add_argument("--tpwatch", action="store_true", help="watch replicated parameters over the TP group")
    group.add_argument("--tpwatch-interval", type=int, default=None, help="check every so many steps after warm-up")
    group.add_argument("--tpwatch-config", default=None, help="YAML file of tpwatch knobs")
    return parser


def config_from_args(args: Any) -> Config:
    """The configuration that parsed arguments ask for.

    Command line over environment over file over default.
    """
    options = {"enabled": None if args.tpwatch else False, "interval": args.tpwatch_interval}
    return load(cli=options, env=os.environ, file=args.tpwatch_config)
