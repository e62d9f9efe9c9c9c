"""Zero-code watching: the script runs as if by itself, and its optimizer is found.

A module written by the test stands for the framework: what is tested here is the runner, and the
adapter tests run it with Megatron-core.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from tests.commands import run_python
from tests.unit._samples import finding
from tpwatch.act import ABORT_EXIT_CODE
from tpwatch.errors import ReplicaFault
from tpwatch.run import NOT_WATCHED, PostImport, Runner, Seam, run

if TYPE_CHECKING:
    import subprocess

SEAM = Seam("framework_of_the_test", "build_optimizer", "chunks")
FRAMEWORK = """
def build_optimizer(config, chunks, scale=1):
    '''Build it.'''
    return ("optimizer of", config, chunks, scale)

def build_special(config, chunks):
    return ("special", build_optimizer(config, chunks))

def alias(*args, **kwargs):
    return build_optimizer(*args, **kwargs)
"""


@dataclass
class RecordingWatch:
    """Remembers how it was ended."""

    model: object
    optimizer: object
    ends: list[str] = field(default_factory=list)
    fault: Exception | None = None

    def finish(self) -> None:
        """An orderly end."""
        self.ends.append("finish")
        if self.fault is not None:
            raise self.fault

    def abandon(self) -> None:
        """An end at once."""
        self.ends.append("abandon")


@dataclass
class Attach:
    """Stands for `tpwatch.attach`; keeps the watches it gave out."""

    watches: list[RecordingWatch] = field(default_factory=list)
    fault: Exception | None = None

    def __call__(self, model: object, optimizer: object) -> RecordingWatch:
        """Give out a recording watch."""
        self.watches.append(RecordingWatch(model, optimizer, fault=self.fault))
        return self.watches[-1]


@pytest.fixture
def attach() -> Attach:
    """A recording attach."""
    return Attach()


@pytest.fixture
def runner(attach: Attach) -> Runner:
    """A runner that watches the framework of the test."""
    return Runner(attach, (SEAM,))


@pytest.fixture(autouse=True)
def _framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The framework is importable and not imported; interpreter state is put back afterwards."""
    (tmp_path / f"{SEAM.module}.py").write_text(FRAMEWORK)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delitem(sys.modules, SEAM.module, raising=False)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def script(tmp_path: Path, text: str) -> str:
    """A script with this text, beside the framework."""
    path = tmp_path / "train.py"
    path.write_text(text)
    return str(path)


BUILD = "import framework_of_the_test as f\noptimizer = f.build_optimizer('c', ['model'])\n"


# ----------------------------------------------------------------------------------------- hook


def test_an_optimizer_that_the_script_builds_is_watched(tmp_path: Path, runner: Runner, attach: Attach) -> None:
    """With the model it was built for."""
    run(script(tmp_path, BUILD), [], is_module=False, runner=runner)
    (watch,) = attach.watches
    assert watch.model == ["model"]
    assert watch.optimizer == ("optimizer of", "c", ["model"], 1)


def test_a_name_imported_from_the_module_is_the_wrapped_one(tmp_path: Path, runner: Runner, attach: Attach) -> None:
    """`from module import name` comes after the hook, so it takes the wrapper."""
    text = "from framework_of_the_test import build_optimizer\nbuild_optimizer('c', chunks=['m'])\n"
    run(script(tmp_path, text), [], is_module=False, runner=runner)
    assert [watch.model for watch in attach.watches] == [["m"]]


def test_a_module_that_was_imported_before_is_wrapped_too(tmp_path: Path, runner: Runner, attach: Attach) -> None:
    """Something else in the process may have been first."""
    importlib.import_module(SEAM.module)
    run(script(tmp_path, BUILD), [], is_module=False, runner=runner)
    assert len(attach.watches) == 1


def test_wrapping_twice_attaches_once(runner: Runner, attach: Attach) -> None:
    """A reload runs the hook again."""
    with runner.hooked():
        module = importlib.import_module(SEAM.module)
        runner.wrap(SEAM, module)
        module.build_optimizer("c", ["m"])
    assert len(attach.watches) == 1


def test_the_wrapper_looks_like_the_function(runner: Runner) -> None:
    """Name, docstring and arguments stay what they were."""
    with runner.hooked():
        wrapped = importlib.import_module(SEAM.module).build_optimizer
    assert (wrapped.__name__, wrapped.__doc__) == ("build_optimizer", "Build it.")
    assert wrapped("c", ["m"], scale=3)[3] == 3


def test_a_builder_within_a_builder_is_not_attached_to(attach: Attach) -> None:
    """Only the outermost one returns the whole optimizer."""
    runner = Runner(attach, (SEAM, Seam(SEAM.module, "build_special", "chunks")))
    with runner.hooked():
        importlib.import_module(SEAM.module).build_special("c", ["m"])
    assert [watch.optimizer[0] for watch in attach.watches] == ["special"]


def test_a_mere_alias_is_left_alone(attach: Attach) -> None:
    """It has no model argument of its own, and what it calls is watched."""
    runner = Runner(attach, (SEAM, Seam(SEAM.module, "alias", "chunks")))
    with runner.hooked():
        importlib.import_module(SEAM.module).alias("c", ["m"])
    assert [watch.optimizer[0] for watch in attach.watches] == ["optimizer of"]


def test_a_builder_that_fails_is_not_attached_to(runner: Runner, attach: Attach) -> None:
    """Its error is the script's, and the next attempt is watched."""
    with runner.hooked():
        module = importlib.import_module(SEAM.module)
        with pytest.raises(TypeError):
            module.build_optimizer()
        module.build_optimizer("c", ["m"])
    assert len(attach.watches) == 1


def test_asking_whether_the_module_exists_does_not_use_up_the_hook(runner: Runner, attach: Attach) -> None:
    """Frameworks probe each other before they import."""
    with runner.hooked():
        assert find_spec(SEAM.module) is not None
        importlib.import_module(SEAM.module).build_optimizer("c", ["m"])
    assert len(attach.watches) == 1


def test_a_module_without_the_function_is_imported_as_it_is(runner: Runner, tmp_path: Path) -> None:
    """Another version of the framework may not have it."""
    (tmp_path / f"{SEAM.module}.py").write_text("value = 3\n")
    with runner.hooked():
        assert importlib.import_module(SEAM.module).value == 3


def test_the_hook_leaves_no_trace_in_the_module(runner: Runner) -> None:
    """Loader and spec are the real ones, and the finder is gone afterwards."""
    before = list(sys.meta_path)
    with runner.hooked():
        module = importlib.import_module(SEAM.module)
    assert type(module.__loader__) is type(find_spec(SEAM.module).loader)
    assert module.__spec__.loader is module.__loader__
    assert sys.meta_path == before


def test_other_modules_are_none_of_the_hook_s_business() -> None:
    """It answers for one name."""
    finder = PostImport("a", lambda _module: None)
    assert finder.find_spec("b", None) is None


def test_a_module_that_does_not_exist_stays_missing(attach: Attach) -> None:
    """The import error is the ordinary one."""
    runner = Runner(attach, (Seam("no_such_framework", "f", "m"),))
    with runner.hooked(), pytest.raises(ModuleNotFoundError, match="no_such_framework"):
        importlib.import_module("no_such_framework")


# ----------------------------------------------------------------------------------------- ends


@pytest.mark.parametrize("ending", ["", "raise SystemExit", "raise SystemExit(0)"])
def test_a_normal_end_finishes_the_watch(tmp_path: Path, runner: Runner, attach: Attach, ending: str) -> None:
    """Exit code 0 is as normal as falling off the end."""
    run(script(tmp_path, BUILD + ending), [], is_module=False, runner=runner)
    assert attach.watches[0].ends == ["finish"]


def test_an_exit_code_survives_and_the_watch_is_abandoned(tmp_path: Path, runner: Runner, attach: Attach) -> None:
    """The other ranks may be gone: nothing waits for them."""
    with pytest.raises(SystemExit) as stop:
        run(script(tmp_path, f"{BUILD}raise SystemExit(5)"), [], is_module=False, runner=runner)
    assert stop.value.code == 5
    assert attach.watches[0].ends == ["abandon"]


def test_an_exception_survives_and_the_watch_is_abandoned(tmp_path: Path, runner: Runner, attach: Attach) -> None:
    """The script's own error is what the user sees."""
    with pytest.raises(KeyError, match="mine"):
        run(script(tmp_path, f"{BUILD}raise KeyError('mine')"), [], is_module=False, runner=runner)
    assert attach.watches[0].ends == ["abandon"]


FAULT = ReplicaFault([finding(ranks=(2, 3))], step=7)


@pytest.mark.parametrize(("rank", "lines"), [("2", 1), ("3", 0)])
def test_a_fault_at_the_end_is_one_line_and_the_documented_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: str,
    lines: int,
) -> None:
    """From the leader of the group; the other ranks only exit."""
    monkeypatch.setenv("RANK", rank)
    runner = Runner(Attach(fault=FAULT), (SEAM,))
    with pytest.raises(SystemExit) as stop:
        run(script(tmp_path, BUILD), [], is_module=False, runner=runner)
    assert stop.value.code == ABORT_EXIT_CODE
    err = capsys.readouterr().err
    assert err.count("\n") == lines
    assert ("tpwatch: tpwatch stopped the run at step 7" in err) == bool(lines)


def test_a_fault_within_training_exits_with_the_documented_code(
    tmp_path: Path, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script did not catch it."""
    module = ModuleType("fault_of_the_test")
    module.fault = FAULT  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fault_of_the_test", module)
    text = "import fault_of_the_test\nraise fault_of_the_test.fault\n"
    with pytest.raises(SystemExit) as stop:
        run(script(tmp_path, text), [], is_module=False, runner=runner)
    assert stop.value.code == ABORT_EXIT_CODE


def test_a_script_without_an_optimizer_is_told_so(
    tmp_path: Path, runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, by rank 0."""
    run(script(tmp_path, "pass"), [], is_module=False, runner=runner)
    assert capsys.readouterr().err.splitlines() == [NOT_WATCHED]


def test_a_script_without_an_optimizer_is_not_told_so_by_every_rank(
    tmp_path: Path,
    runner: Runner,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line for the job."""
    monkeypatch.setenv("RANK", "1")
    run(script(tmp_path, "pass"), [], is_module=False, runner=runner)
    assert capsys.readouterr().err == ""


# -------------------------------------------------------------------------------- as by itself


def launch(*arguments: str, cwd: Path, module: str = "tpwatch.run") -> subprocess.CompletedProcess[str]:
    """`python -m tpwatch.run ARGUMENTS` in a new interpreter."""
    return run_python("-m", module, *arguments, cwd=cwd, env={"PYTHONDONTWRITEBYTECODE": "1"})


SHOW = """
import json, os, sys
if __name__ == "__main__":
    shown = {"argv": sys.argv, "path0": sys.path[0], "file": __file__}
    shown |= {k: v for k, v in os.environ.items() if k in ("TPWATCH_OUT", "TPWATCH_CONFIG")}
    print(json.dumps(shown))
"""


def test_a_script_sees_what_it_would_see_by_itself(tmp_path: Path) -> None:
    """Arguments, import path and name; also with options that look like ours."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "train.py").write_text(SHOW)
    arguments = ("scripts/train.py", "--out", "theirs", "-m", "x", "--", "y")
    ours = launch(*arguments, cwd=tmp_path)
    plain = run_python(*arguments, cwd=tmp_path)
    assert ours.returncode == 0, ours.stderr
    assert ours.stdout == plain.stdout


def test_a_module_sees_what_it_would_see_by_itself(tmp_path: Path) -> None:
    """`-m package.module`."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "train.py").write_text(SHOW)
    ours = launch("-m", "package.train", "--steps", "3", cwd=tmp_path)
    plain = launch("--steps", "3", cwd=tmp_path, module="package.train")
    assert ours.returncode == 0, ours.stderr
    assert ours.stdout == plain.stdout


def test_directory_and_configuration_reach_the_environment(tmp_path: Path) -> None:
    """As absolute paths: the script may change directory."""
    (tmp_path / "train.py").write_text(SHOW)
    done = launch("--out", "runs/a", "--config", "c.yaml", "train.py", cwd=tmp_path)
    assert f'"TPWATCH_OUT": "{tmp_path}/runs/a"' in done.stdout
    assert f'"TPWATCH_CONFIG": "{tmp_path}/c.yaml"' in done.stdout


def test_a_traceback_of_the_script_is_shown_with_its_code(tmp_path: Path) -> None:
    """As python does it: the traceback on standard error, exit code 1."""
    (tmp_path / "train.py").write_text("def f():\n    raise ValueError('mine')\nf()\n")
    done = launch("train.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: mine"
    assert 'train.py", line 2, in f' in done.stderr


def test_a_script_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    """Exit code 2 and its name."""
    done = launch("nothing.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "there is no script 'nothing.py'" in done.stderr
