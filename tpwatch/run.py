"""Zero-code watching: `torchrun ... -m tpwatch.run [--out DIR] [--config FILE] train.py args...`.

Runs an unmodified script as `__main__` and attaches when the script builds a Megatron-core
optimizer: a post-import hook wraps the functions that build one. Knows their names and no more of
Megatron; the script's own exceptions and exit code survive unchanged.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from tpwatch.act import ABORT_EXIT_CODE
from tpwatch.errors import ReplicaFault

NOT_WATCHED = (
    "tpwatch: nothing was watched: no Megatron-core optimizer was built in this process; "
    "other training loops call tpwatch.attach(model, optimizer) themselves"
)


class Watched(Protocol):
    """The part of a `tpwatch.Watch` that a runner needs."""

    def finish(self) -> None:
        """End in order, with one last look."""

    def abandon(self) -> None:
        """End at once, keeping what was recorded."""


@dataclass(frozen=True, slots=True)
class Seam:
    """A function of a module that builds an optimizer from model chunks."""

    module: str
    function: str
    model_argument: str


MEGATRON = (
    Seam("megatron.core.optimizer", "get_megatron_optimizer", "model_chunks"),
    Seam("megatron.core.optimizer.muon", "get_megatron_muon_optimizer", "model_chunks"),
)

Attach = Callable[[Any, Any], Watched]
"""Called with the model chunks and the optimizer."""


@dataclass(slots=True)
class Runner:
    """Watches what one script builds, and closes the watches when it ends."""

    attach: Attach
    seams: Sequence[Seam] = MEGATRON
    watches: list[Watched] = field(default_factory=list)
    depth: int = 0
    """Seams under way: one builder may call another, and the outermost has the whole optimizer."""

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Wrap each seam as soon as its module is imported, or now if it has been."""
        with ExitStack() as stack:
            for seam in self.seams:
                wrap = functools.partial(self.wrap, seam)
                if seam.module in sys.modules:
                    wrap(sys.modules[seam.module])
                finder = PostImport(seam.module, wrap)
                sys.meta_path.insert(0, finder)
                stack.callback(sys.meta_path.remove, finder)
            yield

    def wrap(self, seam: Seam, module: ModuleType) -> None:
        """Replace a seam's function by one that attaches to its result. Idempotent."""
        original = getattr(module, seam.function, None)
        if original is None or hasattr(original, "__tpwatch__"):
            return
        signature = inspect.signature(original)
        if seam.model_argument not in signature.parameters:
            return  # a mere alias: it passes everything on to another seam

        @functools.wraps(original)
        def build(*args: object, **kwargs: object) -> object:
            self.depth += 1
            try:
                optimizer = original(*args, **kwargs)
            finally:
                self.depth -= 1
            if self.depth == 0:
                model = signature.bind(*args, **kwargs).arguments[seam.model_argument]
                self.watches.append(self.attach(model, optimizer))
            return optimizer

        build.__tpwatch__ = True  # type: ignore[attr-defined]
        setattr(module, seam.function, build)

    def finish(self) -> None:
        """End every watch in order; say so if there was none."""
        if not self.watches and os.environ.get("RANK", "0") == "0":
            print(NOT_WATCHED, file=sys.stderr, flush=True)
        for watch in self.watches:
            watch.finish()
        self.watches.clear()

    def abandon(self) -> None:
        """End at once whatever was not ended in order: the other ranks may be gone."""
        for watch in self.watches:
            watch.abandon()


class PostImport(MetaPathFinder):
    """Calls back right after a module has been executed and before its importer sees it."""

    def __init__(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.callback = callback
        self.searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec the other finders give, with a loader that calls back."""
        del path, target
        if fullname != self.name or self.searching:
            return None
        self.searching = True
        try:
            spec = find_spec(fullname)
        finally:
            self.searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = CallBack(spec.loader, self.callback)
        return spec


class CallBack(Loader):
    """Loads with another loader, then calls back; leaves no trace in the module."""

    def __init__(self, loader: Loader, callback: Callable[[ModuleType], None]) -> None:
        self.loader = loader
        self.callback = callback

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the real loader does it."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute as the real loader does it, then call back."""
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.callback(module)


# ---------------------------------------------------------------------------------- the command


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script named on the command line; leaves by the script's own exit."""
    args = _parser().parse_args(argv)
    for name, value in (("TPWATCH_OUT", args.out), ("TPWATCH_CONFIG", args.config)):
        if value is not None:
            os.environ[name] = os.path.abspath(value)  # noqa: PTH100 - the script may change directory
    run(args.script, args.args, is_module=args.module, runner=Runner(_attach_megatron))


def run(script: str, args: Sequence[str], *, is_module: bool, runner: Runner) -> None:
    """Run a script or module as `__main__`; end its watches by the way it ends.

    Raises:
        SystemExit: the script's own, or with `ABORT_EXIT_CODE` after a `ReplicaFault`.
    """
    try:
        with runner.hooked():
            _execute(script, args, is_module=is_module)
        runner.finish()
    except ReplicaFault as fault:
        if os.environ.get("RANK", "0") in ({str(f.ranks[0]) for f in fault.findings} or {"0"}):
            print(f"tpwatch: {fault}", file=sys.stderr, flush=True)
        raise SystemExit(ABORT_EXIT_CODE) from fault
    finally:
        runner.abandon()


def _execute(script: str, args: Sequence[str], *, is_module: bool) -> None:
    """As `python script args` or `python -m script args`; an exit with code 0 is a normal end."""
    sys.argv = [script, *args]
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            _execute_file(Path(script))
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise


def _execute_file(path: Path) -> None:
    """Not by `runpy.run_path`, which changes `sys.argv[0]` or `__file__` and drops `__main__`."""
    if not path.is_file():
        _parser().error(f"there is no script {str(path)!r}")
    if not getattr(sys.flags, "safe_path", False):  # python -P puts no directory there
        sys.path[0] = str(path.resolve().parent)
    main_module = ModuleType("__main__")
    main_module.__file__ = str(path.absolute())
    code = compile(path.read_bytes(), main_module.__file__, "exec")
    sys.modules["__main__"] = main_module
    exec(code, vars(main_module))  # noqa: S102 - running the user's script is what it is for


def _attach_megatron(model: object, optimizer: object) -> Watched:
    import tpwatch

    return tpwatch.attach(model, optimizer, None, adapter="megatron")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tpwatch.run",
        description="Run an unmodified Megatron-core training script under tpwatch.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", metavar="DIR", help="run directory (TPWATCH_OUT)")
    parser.add_argument("--config", metavar="FILE", help="YAML configuration (TPWATCH_CONFIG)")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module name")
    parser.add_argument("script", metavar="SCRIPT", help="training script, as after `python`")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser


if __name__ == "__main__":
    main()
