"""torch's private test helpers are used in one file only."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.commands import REPOSITORY

PRIVATE = "torch.testing._internal"


def imported_modules(path: Path) -> set[str]:
    """Return the dotted names that a file imports, function bodies included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_only_the_harness_imports_private_test_helpers() -> None:
    """`torch.testing._internal` may move with any torch release, so one file wraps it."""
    folders = ("tpwatch", "tests", "benchmarks", "scripts")
    files = [path for folder in folders for path in (REPOSITORY / folder).rglob("*.py")]
    users = [
        path.relative_to(REPOSITORY).as_posix()
        for path in files
        if any(name == PRIVATE or name.startswith(f"{PRIVATE}.") for name in imported_modules(path))
    ]
    assert users == ["tests/dist/_harness.py"]
