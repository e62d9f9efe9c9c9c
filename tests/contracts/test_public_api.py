"""The public names change only on purpose."""

from __future__ import annotations

from types import ModuleType

import tpwatch

PUBLIC_NAMES = [
    "AdapterUnavailable",
    "Config",
    "ConfigError",
    "Finding",
    "FingerprintUnavailable",
    "ReplicaFault",
    "RunDirectoryError",
    "StepReport",
    "Summary",
    "TpwatchError",
    "Watch",
    "__version__",
    "attach",
]


def test_public_names() -> None:
    """`__all__` is this list, which is alphabetical."""
    assert list(tpwatch.__all__) == PUBLIC_NAMES
    assert sorted(set(PUBLIC_NAMES)) == PUBLIC_NAMES


def test_every_public_name_stays_what_it_is() -> None:
    """A name that is resolved late is the same object at every use, never a submodule."""
    # Importing a submodule sets an attribute of its own name on the package.
    first, second = ([getattr(tpwatch, name) for name in PUBLIC_NAMES] for _ in range(2))
    assert first == second
    assert not any(isinstance(value, ModuleType) for value in second)
