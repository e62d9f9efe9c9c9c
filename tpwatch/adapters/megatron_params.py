"""Which parameters of a Megatron-core model are replicated over the TP group, and what will be done to them.

Two witnesses: the marks on the parameter, and the model's own `sharded_state_dict`, which says what
the checkpoint treats as one global tensor. Where they disagree the parameter is left out, with the
reason: guessing would cry wolf. Reads marks and shapes only; changes nothing, asks no other rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tpwatch._guard import shield
from tpwatch.discover import Candidate
from tpwatch.records import Rule

_LAYER = re.compile(r"(?P<head>(?:^|.*\.)layers)\.(?P<index>\d+)(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a chunk."""

    tensor: torch.nn.Parameter
    chunk: int
    candidate: Candidate


def parameters(chunks: Sequence[Any], optimizer: Any) -> list[Parameter]:
    """All parameters of all chunks, in model order, each tensor once (a tied weight keeps its first name)."""
    owned = _owned_slices(optimizer)
    found: list[Parameter] = []
    seen: set[int] = set()
    for number, chunk in enumerate(chunks):
        bare = unwrap(chunk)
        config = getattr(chunk, "config", None) or getattr(bare, "config", None)
        shards = _checkpoint_witness(bare)
        for name, tensor in named_parameters([chunk]):
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            candidate = _candidate(name, tensor, config, shards.get(id(tensor)))
            start, stop = owned(tensor)
            found.append(Parameter(tensor, number, replace(candidate, grad_start=start, grad_stop=stop)))
    return _with_unique_names(found)


def named_parameters(chunks: Sequence[Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Global name and tensor of every parameter, in model order."""
    for chunk in chunks:
        bare = unwrap(chunk)
        layers = _layer_numbers(bare)
        for name, tensor in bare.named_parameters():
            yield _global_name(name, layers), tensor


def unwrap(chunk: Any) -> Any:
    """The bare model below DDP and precision wrappers."""
    while isinstance(getattr(chunk, "module", None), torch.nn.Module):
        chunk = chunk.module
    return chunk


def each_optimizer(optimizer: Any) -> Iterator[Any]:
    """The optimizers inside a chained one, or the optimizer itself."""
    for inner in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        if inner is optimizer:
            yield inner
        else:
            yield from each_optimizer(inner)


def _candidate(name: str, tensor: torch.nn.Parameter, config: Any, sharded: bool | None) -> Candidate:  # noqa: FBT001 - a witness, not a switch
    replicated, reason = _replicated(tensor, sharded)
    return Candidate(
        name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."),
        grad_start=0, grad_stop=tensor.numel(), replicated=replicated, rule=_rule(name, tensor, config), reason=reason,
    )  # fmt: skip


def _replicated(tensor: torch.nn.Parameter, sharded: bool | None) -> tuple[bool | None, str]:  # noqa: FBT001 - a witness, not a switch
    """Weigh the mark against the checkpoint's view.

    `partition_dim` is no witness: replicated weights carry 0 too.
    """
    if getattr(tensor, "allreduce", True) is False:
        return (
            False,
            "expert parameter: its replicas lie on the expert groups, which are not watched yet",
        )
    marked = getattr(tensor, "tensor_model_parallel", False) is True
    if sharded is None or marked == sharded:
        return not marked, ""
    if marked:
        return (
            None,
            ("marked tensor_model_parallel, but the checkpoint treats it as a replica: declare which it is"),
        )
    return (
        None,
        ("no tensor_model_parallel mark, but the checkpoint treats it as a shard: declare which it is"),
    )


def _rule(name: str, tensor: torch.nn.Parameter, config: Any) -> Rule:
    """What `_allreduce_non_tensor_model_parallel_grads` will do, in its own order of tests."""
    if getattr(tensor, "average_gradients_across_tp_domain", False):
        return "avg"
    marked = getattr(config, "sequence_parallel", False) and getattr(tensor, "sequence_parallel", False)
    named = getattr(config, "qk_layernorm", False) and ("q_layernorm" in name or "k_layernorm" in name)
    return "sum" if marked or named else "none"


def _checkpoint_witness(bare: Any) -> Mapping[int, bool]:
    """By id of a parameter: True if `sharded_state_dict` holds it as a slice of a larger tensor.

    Empty if unknown.

    A model without one, or whose one fails outside a full training job, simply is no witness.
    """
    if not hasattr(bare, "sharded_state_dict"):
        return {}
    worked, entries = shield(bare.sharded_state_dict)
    if not worked:
        return {}
    by_data: dict[int, bool] = {}
    for entry in _entries(entries):
        data = getattr(entry, "data", None)
        if isinstance(data, torch.Tensor) and hasattr(entry, "global_shape") and hasattr(entry, "local_shape"):
            whole = tuple(entry.global_shape)[getattr(entry, "prepend_axis_num", 0) :]
            by_data[data.data_ptr()] = by_data.get(data.data_ptr(), False) or whole != tuple(entry.local_shape)
    return {id(p): by_data[p.data_ptr()] for p in bare.parameters() if p.numel() and p.data_ptr() in by_data}


def _entries(tree: Any) -> Iterator[Any]:
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from _entries(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _entries(value)
    else:
        yield tree


def _owned_slices(optimizer: Any) -> Any:
    """Function from a parameter to the flat range of its gradient that this data-parallel rank owns."""
    inner = list(each_optimizer(optimizer))

    def owned(tensor: torch.nn.Parameter) -> tuple[int, int]:
        for one in inner:
            where = getattr(one, "model_param_gbuf_map", {}).get(tensor)
            if where is None:
                continue
            buffer, dtype, bucket = where
            entry = one.gbuf_ranges[buffer][dtype][bucket]["param_map"].get(tensor)
            return (entry["param"].start, entry["param"].end) if entry else (0, 0)
        return 0, tensor.numel()

    return owned


def _layer_numbers(bare: Any) -> Mapping[str, int]:
    """Module path of each layer to its global number from 0 (`layer_number` counts from 1 over all stages)."""
    return {
        name: module.layer_number - 1
        for name, module in bare.named_modules()
        if _LAYER.fullmatch(name) and isinstance(getattr(module, "layer_number", None), int)
    }


def _global_name(name: str, layers: Mapping[str, int]) -> str:
    match = _LAYER.match(name)
    if match is None or match.group(0) not in layers:
        return name
    return f"{match['head']}.{layers[match.group(0)]}{name[match.end() :]}"


def _with_unique_names(found: Sequence[Parameter]) -> list[Parameter]:
    """Prefix the chunk where two chunks have a parameter of the same name."""
    names = [p.candidate.name for p in found]
    twice = {n for n in names if names.count(n) > 1} if len(set(names)) < len(names) else set()
    return [
        (
            replace(p, candidate=replace(p.candidate, name=f"chunk{p.chunk}.{p.candidate.name}"))
            if p.candidate.name in twice
            else p
        )
        for p in found
    ]
