"""One attribute of the host with ours in its place, and the way back.

Knows attributes, not what any of them does.
"""

from __future__ import annotations

from typing import Any


class Patch:
    """Puts `ours` where the host looks for `name`: on a module, or on an object whose class has it."""

    def __init__(self, owner: Any, name: str, ours: object, label: str) -> None:
        """Put it there; `label` is what a note calls the place."""
        self._owner = owner
        self._name = name
        self._ours = ours
        self._label = label
        self._before = vars(owner).get(name)
        setattr(owner, name, ours)

    @property
    def lost(self) -> bool:
        """True if the host has put something else there since."""
        return vars(self._owner).get(self._name) is not self._ours

    def remove(self) -> list[str]:
        """Put the very same object back. Where the host has replaced ours nothing is touched, and a note says so."""
        if self.lost:
            return [f"{self._label} was replaced after attach: the replacement stays, ours passes through"]
        if self._before is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)
        return []
