"""Gate on the shape of the package: short functions, short files, no asserts, no blind catches.

    python scripts/check_shape.py [PACKAGE]

Prints each violation and exits 1, or prints the figures and exits 0. Ruff covers some of these
rules too, but there a comment switches a rule off; here nothing does.
"""

from __future__ import annotations

import ast
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MEDIAN_LINES = 12  # of a function, signature and docstring included
LONG_LINES = 60  # at most LONG_SHARE of the functions are longer
LONG_SHARE = 0.03
MOST_LINES = 80  # no function is longer, except where MAY_BE_LONG
FILE_LINES = 350
MAY_BE_LONG = "fingerprint"  # kernels are long by nature
BOUNDARY = "_guard.py"  # the one failure boundary around the training loop
BLIND = {"Exception", "BaseException"}
OWN_LOGGER = 'logging.getLogger("tpwatch")'

Function = ast.FunctionDef | ast.AsyncFunctionDef


def length(function: Function) -> int:
    """Lines of a function from `def` to its last line."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def is_blind(handler: ast.ExceptHandler) -> bool:
    """Whether an except clause catches everything."""
    if handler.type is None:
        return True
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(name, ast.Name) and name.id in BLIND for name in caught)


def is_for_the_boundary(node: ast.AST) -> str:
    """What only the failure boundary may do, if this node does that."""
    if isinstance(node, ast.ExceptHandler) and is_blind(node):
        return f"catches everything: only {BOUNDARY} may"
    if isinstance(node, ast.Call) and ast.unparse(node) == ast.unparse(ast.parse(OWN_LOGGER)):
        return f"logs by itself: only {BOUNDARY} may, the others call its `say`"
    return ""


def fault(node: ast.AST, path: Path) -> str | None:
    """Why this node may not be in the package, if so."""
    if isinstance(node, ast.Assert):
        return "assert: raise an error from errors.py, asserts vanish under -O"
    if isinstance(node, ast.Global):
        return "global statement: pass state as an argument"
    if path.name != BOUNDARY and (why := is_for_the_boundary(node)):
        return why
    if isinstance(node, ast.Raise) and "NotImplementedError" in ast.dump(node):
        return "NotImplementedError: what is not built yet is absent, not a stub"
    if isinstance(node, Function) and length(node) > MOST_LINES and MAY_BE_LONG not in path.parts:
        return f"{node.name} has {length(node)} lines, at most {MOST_LINES}"
    return None


def faults_of_file(path: Path, tree: ast.Module) -> Iterator[str]:
    """All violations that one file shows by itself."""
    lines = len(path.read_text().splitlines())
    if lines > FILE_LINES:
        yield f"{path}:1: file has {lines} lines, at most {FILE_LINES}"
    for node in ast.walk(tree):
        if why := fault(node, path):
            yield f"{path}:{getattr(node, 'lineno', 1)}: {why}"


def faults_of_package(lengths: list[int]) -> Iterator[str]:
    """Violations of the package as a whole, from the lengths of all its functions."""
    median = statistics.median(lengths)
    share = sum(lines > LONG_LINES for lines in lengths) / len(lengths)
    if median > MEDIAN_LINES:
        yield f"median function has {median:g} lines, at most {MEDIAN_LINES}"
    if share > LONG_SHARE:
        yield f"{share:.1%} of functions over {LONG_LINES} lines, at most {LONG_SHARE:.0%}"


def main(arguments: list[str]) -> int:
    """Check the package named on the command line, by default `tpwatch`."""
    root = Path(arguments[0] if arguments else "tpwatch")
    trees = {path: ast.parse(path.read_text()) for path in sorted(root.rglob("*.py"))}
    lengths = [length(node) for tree in trees.values() for node in ast.walk(tree) if isinstance(node, Function)]
    if not lengths:
        print(f"no function found under {root}")
        return 1
    faults = [why for path, tree in trees.items() for why in faults_of_file(path, tree)]
    faults += faults_of_package(lengths)
    print("\n".join(faults) if faults else "shape: ok", end="\n")
    share = sum(lines > LONG_LINES for lines in lengths) / len(lengths)
    print(
        f"{len(trees)} files, {len(lengths)} functions: median {statistics.median(lengths):g} "
        f"lines, longest {max(lengths)}, {share:.1%} over {LONG_LINES}"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
