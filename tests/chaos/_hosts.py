"""What is trained in a chaos run: a small sequence-parallel model in plain torch, or the lab's Megatron-core.

Both have collectives of their own in forward, finalizer and data-parallel reduction, so that a collective of tpwatch
that one rank leaves out or adds would pair with one of theirs and show in the losses.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol
from unittest import mock

import torch
import torch.distributed as dist

import tpwatch
from tests.chaos._events import Disturbed, Events
from tests.chaos._schedule import Scenario
from tests.dist._parts import Gradients, Toy, ToyAdapter, normal
from tpwatch import session
from tpwatch.watch import Watch

GROUP_TIMEOUT = timedelta(seconds=12)
"""After so long a collective of the trainer's that a peer never enters is an error of the trainer's."""

HIDDEN, ROWS = 16, 6
SUMMED, COPY = 1, 2
"""Indices of a parameter whose gradient is summed over the group, and of one whose gradient is a copy."""

SHAPES: Mapping[str, tuple[int, ...]] = {
    "gain": (HIDDEN,), "shift": (HIDDEN,), "mix.weight": (HIDDEN, HIDDEN), "head.weight": (HIDDEN, 1),
}  # fmt: skip


class Training(Protocol):
    """A model in training on this rank."""

    def attach(self, knobs: Mapping[str, Any]) -> Watch:
        """Attach tpwatch as a user would."""
        ...

    def step(self, number: int) -> float:
        """Train one step; the loss of this rank."""
        ...

    def weights(self) -> str:
        """SHA-256 of this rank's parameters."""
        ...

    def state(self) -> str:
        """SHA-256 of this rank's parameters and gradients, as the last step has left them."""
        ...


def build(scenario: Scenario, events: Events) -> Training:
    """The model of a scenario."""
    return (PlainTraining if scenario.host == "plain" else MegatronTraining)(scenario, events)


def _attach(model: Any, optimizer: Any, knobs: Mapping[str, Any], events: Events, **options: Any) -> Watch:
    """The public entry, with the event between it and the real adapter."""
    real = session.choose
    plain = isinstance(model, Toy)

    def chosen(name: str) -> Any:
        inner: Any = ToyAdapter() if plain else real(name)
        return Disturbed(inner, events)

    with mock.patch.object(session, "choose", chosen):
        return tpwatch.attach(model, optimizer, knobs, **options)


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# --------------------------------------------------------------------------------- plain torch


class Coalescing(Toy):
    """A finalizer that, as Megatron's does, sums all marked gradients in one collective."""

    events: Events

    def finalize(self) -> None:
        """Sum over the tensor-parallel group."""
        self.events.at("finalizer")
        pairs = zip(self.gradients, self.rules, strict=True)
        _together([g for g, rule in pairs if rule == "sum" and g is not None], self.group)


def _together(gradients: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum over the ranks, in one collective."""
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


class PlainTraining:
    """`loss = mean((tanh(gather(x_slice * gain + shift) @ mix) @ head - 1)^2)`: two partial sums and two copies."""

    def __init__(self, scenario: Scenario, events: Events) -> None:
        self.scenario = scenario
        self.events = events
        self.dp_rank, self.tp_rank = divmod(events.rank, scenario.tp)
        self.group, self.peers = _groups(scenario, events.rank)
        self.parameters = [torch.nn.Parameter(normal(i, *shape)) for i, shape in enumerate(SHAPES.values())]
        self.toy = Coalescing(list(SHAPES), [p.data for p in self.parameters], ["sum", "sum", "none", "none"])
        self.toy.group, self.toy.events = self.group, events
        if scenario.faulty:
            self.toy.rules[0] = "none"  # the gain is left unsummed

    def attach(self, knobs: Mapping[str, Any]) -> Watch:
        """Over the groups of this model."""
        groups = {"tp": self.group} if self.group else None
        return _attach(self.toy, None, knobs, self.events, groups=groups)

    def step(self, number: int) -> float:
        """Forward, backward, data-parallel mean, finalizer, update."""
        self.events.at("forward")
        loss = self._forward(number)
        gradients: Gradients = list(torch.autograd.grad(loss, self.parameters))
        if self.scenario.dp > 1:
            _together([g for g in gradients if g is not None], self.peers)
            gradients = [None if g is None else g.div_(self.scenario.dp) for g in gradients]
        self._spoil(gradients)
        self.toy.iteration = number if self.scenario.counts else None
        self.toy.train(gradients)
        self.events.at("update")
        return float(loss.detach())

    def weights(self) -> str:
        """Of all four."""
        return _digest(self.parameters)

    def state(self) -> str:
        """Gradients are those that the toy was trained with."""
        return _digest([*self.parameters, *(g for g in self.toy.gradients if g is not None)])

    def _forward(self, number: int) -> torch.Tensor:
        """This rank's slice of the rows, gathered; the gradient of the gather is the own slice's."""
        gain, shift, mix, head = self.parameters
        rows = normal(1000 * number + self.dp_rank, self.scenario.tp * ROWS, HIDDEN)
        own = rows.chunk(self.scenario.tp)[self.tp_rank] * gain + shift
        parts = [torch.empty_like(own) for _ in range(self.scenario.tp)]
        dist.all_gather(parts, own.detach(), group=self.group)
        parts[self.tp_rank] = own
        return ((torch.tanh(torch.cat(parts) @ mix) @ head - 1) ** 2).mean()

    def _spoil(self, gradients: Gradients) -> None:
        if not self.events.lacking and not self.events.due("not-finite"):
            return
        self.events.fire()
        index = SUMMED if self.scenario.point == "summed" else COPY
        if self.events.lacking:
            gradients[index] = None
        elif (gradient := gradients[index]) is not None:
            gradient.view(-1)[0] = float("nan")


def _groups(scenario: Scenario, rank: int) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Tensor-parallel and data-parallel group of a rank; None is the default group."""
    if scenario.dp == 1:
        return None, None
    tensor = [dist.new_group(list(ranks), timeout=GROUP_TIMEOUT) for ranks in scenario.groups]
    across = [list(range(i, scenario.world, scenario.tp)) for i in range(scenario.tp)]
    data = [dist.new_group(ranks, timeout=GROUP_TIMEOUT) for ranks in across]
    return tensor[rank // scenario.tp], data[rank % scenario.tp]


# ----------------------------------------------------------------------------------- Megatron-core

GROUP_MINUTES = GROUP_TIMEOUT.total_seconds() / 60
"""Timeout of Megatron's process groups, whose own default is half an hour."""

FINALIZER_MODULE = "megatron.core.distributed.finalize_model_grads"


class MegatronTraining:
    """The lab's GPTModel: healthy, or with per-layer embeddings that are summed twice."""

    def __init__(self, scenario: Scenario, events: Events) -> None:
        from megatron.core import parallel_state

        from tpwatch.lab import catalog, faults

        self.scenario = scenario
        self.events = events
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=scenario.tp, distributed_timeout_minutes=GROUP_MINUTES
        )
        entry = catalog.get("ple-double-sum" if scenario.faulty else "dense-sp")
        config: Any = replace(
            entry.at(scenario.tp, scenario.dp),
            precision=scenario.precision,
            distributed_optimizer=scenario.distributed_optimizer,
        )
        self.run, _ = faults.build(entry, config)
        self._come_by()

    def _come_by(self) -> None:
        """Forward, finalizer and update come by the points of the event; in front of it, gradients are spoiled."""
        events, module = self.events, sys.modules[FINALIZER_MODULE]
        reduce = module._allreduce_non_tensor_model_parallel_grads
        finalize = self.run.transformer_config.finalize_model_grads_func

        def reduce_on_the_way(*args: Any, **kwargs: Any) -> Any:
            events.at("finalizer")
            return reduce(*args, **kwargs)

        def finalize_spoiled(*args: Any, **kwargs: Any) -> Any:
            self._spoil()
            return finalize(*args, **kwargs)

        def forward(_batch: object) -> torch.Tensor:
            events.at("forward")
            return torch.zeros(())

        module._allreduce_non_tensor_model_parallel_grads = reduce_on_the_way
        self.run.transformer_config.finalize_model_grads_func = finalize_spoiled
        self.run.extra_losses.append(forward)
        self.run.after_update.append(lambda: events.at("update"))

    def attach(self, knobs: Mapping[str, Any]) -> Watch:
        """As the lab's worker does."""
        return _attach(self.run.chunks, self.run.optimizer, knobs, self.events, adapter="megatron")

    def step(self, number: int) -> float:
        """One step of Megatron's schedule and optimizer."""
        return float(self.run.step(number))

    def weights(self) -> str:
        """Of every chunk."""
        return _digest(self._parameters)

    def state(self) -> str:
        """Gradients are those in DDP's buffer."""
        return _digest([*self._parameters, *(p.main_grad for p in self._parameters)])

    @property
    def _parameters(self) -> list[Any]:
        return [p for chunk in self.run.chunks for p in chunk.parameters()]

    def _spoil(self) -> None:
        if not self.events.due("no-gradient", "not-finite"):
            return
        self.events.fire()
        parameter = self.run.model.decoder.final_layernorm.weight
        if self.scenario.kind == "no-gradient":
            parameter.requires_grad_(False)  # noqa: FBT003 - torch's signature
        else:
            parameter.main_grad.view(-1)[0] = float("nan")
