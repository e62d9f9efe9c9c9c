"""Parameters that join or leave a Megatron-core model after attach: the plan is made, they are not in it.

Knows modules and their parameters, not the plan and not what is said about a change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.nn.modules import module as modules

from tpwatch.act import listed
from tpwatch.adapters.megatron_params import named_parameters

NAMED = 4
"""Names that a note lists."""


class Changes:
    """Looks through the model chunks, if anything has been registered in any module since the last look.

    Torch calls a hook then; a step in which nothing is costs nothing. What is put into a module past its
    `register_parameter` and `register_module` is not noticed.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        """What is in the chunks now is known."""
        self._chunks = chunks
        self._known: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
        self._names = {name for name, _ in self._new()}
        self._due = False
        self._hooks = [
            modules.register_module_parameter_registration_hook(self._registered),
            modules.register_module_module_registration_hook(self._registered),
        ]

    def look(self) -> str:
        """What has come since the last look, in words; empty if nothing has."""
        if not self._due:
            return ""
        self._due = False
        new = [name for name, _ in self._new()]
        replaced = [name for name in new if name in self._names]
        added = [name for name in new if name not in self._names]
        self._names.update(new)
        told = [_said(added, "added"), _said(replaced, "replaced")]
        return "; ".join(filter(None, told))

    def remove(self) -> None:
        """Take the hooks out again."""
        for hook in self._hooks:
            hook.remove()

    def _registered(self, *_what: object) -> None:
        self._due = True

    def _new(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named_parameters(self._chunks):
            if id(tensor) not in self._known:
                self._known[id(tensor)] = tensor
                yield name, tensor


def _said(names: Sequence[str], what: str) -> str:
    """One line about parameters that share a fate."""
    if not names:
        return ""
    return f"{what} after attach and not watched (attach again to watch the model as it is): {listed(names, NAMED)}"
