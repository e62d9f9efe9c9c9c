"""Where Megatron-core saves and loads checkpoints, and what its optimizers keep of a parameter.

Seams: `megatron.core.dist_checkpointing.save`, a module attribute that trainers resolve at the call, and
`load_state_dict` of the outermost optimizer, as an instance attribute: when that returns, trainers have loaded the
model already. Only translates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core import dist_checkpointing

from tpwatch.adapters.megatron_params import each_optimizer
from tpwatch.adapters.patch import Patch
from tpwatch.parts import STATES
from tpwatch.watch import Watch


def states(optimizer: Any, parameters: Sequence[torch.nn.Parameter]) -> list[list[torch.Tensor | None]]:
    """What the optimizer keeps of each parameter on this rank, as in `STATES`.

    With the distributed optimizer that is the slice this rank owns; before the first step there are no moments.
    """
    found: dict[int, list[torch.Tensor | None]] = {}
    for one in each_optimizer(optimizer):
        kept = getattr(one, "optimizer", None)
        if kept is None:
            continue
        stepped = {id(tensor) for group in kept.param_groups for tensor in group["params"]}
        for parameter in parameters:
            main = _main(one, kept, parameter)
            if id(main) in stepped:
                found[id(parameter)] = _states(kept.state.get(main, {}), None if main is parameter else main)
    return [found.get(id(parameter), [None] * len(STATES)) for parameter in parameters]


def _main(optimizer: Any, kept: Any, parameter: torch.nn.Parameter) -> torch.Tensor:
    """What the torch optimizer below steps in place of `parameter`.

    The distributed optimizer maps parameters to places in its groups; the others hang the fp32 copy on the parameter.
    """
    if where := getattr(optimizer, "model_param_group_index_map", {}).get(parameter):
        group, place = where
        main: torch.Tensor = kept.param_groups[group]["params"][place]
        return main
    copy: torch.Tensor | None = getattr(parameter, "main_param", None)
    return parameter if copy is None else copy


def _states(kept: Mapping[str, Any], master: torch.Tensor | None) -> list[torch.Tensor | None]:
    named = {"master": master, **kept}
    return [state if isinstance(state := named.get(label), torch.Tensor) else None for label in STATES]


class CheckpointSeams:
    """Wraps saving and loading, so that they drive the gate of a Watch."""

    def __init__(self, watch: Watch, optimizer: Any) -> None:
        """Wrap both."""
        self._watch = watch
        self._active = True
        load = optimizer.load_state_dict
        self._patches = (
            Patch(dist_checkpointing, "save", self._wrap_save(dist_checkpointing.save), "dist_checkpointing.save"),
            Patch(optimizer, "load_state_dict", self._wrap_load(load), "load_state_dict"),
        )

    def remove(self) -> Sequence[str]:
        """Put the host's own functions back; what was replaced since becomes a pass-through, and a note says so."""
        self._active = False
        return [note for patch in self._patches for note in patch.remove()]

    def _wrap_save(self, save: Callable[..., Any]) -> Callable[..., Any]:
        def save_watched(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._active:
                return save(sharded_state_dict, checkpoint_dir, *args, **kwargs)
            self._watch.before_save()
            result = save(sharded_state_dict, checkpoint_dir, *args, **kwargs)
            self._watch.after_save(checkpoint_dir)
            return result

        return save_watched

    def _wrap_load(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def load_watched(*args: Any, **kwargs: Any) -> Any:
            if not self._active:
                return load(*args, **kwargs)
            with self._watch.loading():
                return load(*args, **kwargs)

        return load_watched
