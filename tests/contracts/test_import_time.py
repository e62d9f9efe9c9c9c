"""Reading a recorded run needs no torch, and importing tpwatch does nothing else either.

Contracts on single import statements cannot show this: importing `tpwatch.diagnose` also runs
`tpwatch/__init__.py`. So each module is imported in a process in which torch cannot be.
"""

from __future__ import annotations

import pytest

from tests.commands import REPOSITORY, run_python

TORCH_FREE = {"_guard", "act", "cli", "config", "diagnose", "errors", "export", "records", "report"}
OPTIONAL = {
    "megatron",
    "numpy",
    "opentelemetry",
    "prometheus_client",
    "rich",
    "tensorboard",
    "transformer_engine",
    "triton",
    "wandb",
}

# A finder in front of all others, which refuses the packages named by the first argument.
IMPORT_WITHOUT = """
import importlib, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ImportError(f"{name} must not be imported here")

refused = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Refuse())
importlib.import_module(sys.argv[2])
"""

IMPORT_QUIETLY = """
import logging, os, sys, threading, warnings

class Unread(dict):
    def __getitem__(self, name):
        raise AssertionError(f"importing tpwatch reads the environment: {name}")
    get = __contains__ = __getitem__

environment, os.environ = os.environ, Unread()
import tpwatch
os.environ = environment
state = logging.root.handlers, logging.getLogger("tpwatch").handlers, threading.enumerate()[1:]
assert state == ([], [], []), state
"""


def torch_free_modules() -> list[str]:
    """Return every module of the package that must do without torch, submodules included."""
    files = sorted(path.relative_to(REPOSITORY) for path in (REPOSITORY / "tpwatch").rglob("*.py"))
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files]
    return [
        "tpwatch",
        *(name for name in names if name != "tpwatch" and name.split(".")[1] in TORCH_FREE),
    ]


@pytest.mark.parametrize("module", torch_free_modules())
def test_imports_without_torch(module: str) -> None:
    """The module imports where torch and every optional package are out of reach."""
    done = run_python("-c", IMPORT_WITHOUT, ",".join({"torch", *OPTIONAL}), module)
    assert done.returncode == 0, done.stderr


def test_the_refusal_refuses() -> None:
    """The process above fails for a module that needs torch: its passing means something."""
    done = run_python("-c", IMPORT_WITHOUT, "torch", "tpwatch.fingerprint.reference")
    assert done.returncode != 0
    assert "torch must not be imported here" in done.stderr


def test_import_has_no_side_effect() -> None:
    """Importing tpwatch reads no environment, adds no log handler and starts no thread."""
    done = run_python("-c", IMPORT_QUIETLY)
    assert done.returncode == 0, done.stderr
