"""What tpwatch reads cannot run, what it writes is nobody else's business, and names cannot break out of any output."""

from __future__ import annotations

import ast
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit._report_runs import HOSTILE, hostile_run, steps, write_run
from tests.unit._samples import finding, plan
from tpwatch.cli import main
from tpwatch.export.jsonl import RunLog, write_abort, write_meta, write_summary
from tpwatch.report.summary import summarize

PACKAGE = Path(__file__).parents[2] / "tpwatch"

MODULES = frozenset({"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"})
"""Reading with these runs what was written."""

CALLS = frozenset({
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load", "yaml.load", "yaml.full_load",
    "yaml.unsafe_load", "yaml.load_all", "yaml.Loader", "yaml.UnsafeLoader", "yaml.FullLoader",
})  # fmt: skip


ALLOWED = {"run.py": ["compile", "exec"]}
"""The runner runs the script that it was given: that is what it is for."""


def dangers(source: str) -> Iterator[str]:
    """Imports and calls in Python source that run what they read, and shells."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield str(node.module)
        elif isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) in CALLS:
            yield ast.unparse(node)
        elif isinstance(node, ast.keyword) and node.arg == "shell" and ast.unparse(node.value) != "False":
            yield "shell"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_that_is_read_is_run(path: Path) -> None:
    """No pickle, no eval, no loader of objects, no shell, anywhere in the package."""
    allowed = ALLOWED.get(str(path.relative_to(PACKAGE)), [])
    assert sorted(dangers(path.read_text(encoding="utf-8"))) == allowed


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", "pickle"),
        ("from pickle import loads", "pickle"),
        ("def f(x):\n    return eval(x)", "eval"),
        ("import yaml\nyaml.load(text, yaml.Loader)", "yaml.load"),
        ("run(command, shell=True)", "shell"),
        ("import torch\ntorch.load(path)", "torch.load"),
    ],
)
def test_the_search_finds_what_it_looks_for(source: str, found: str) -> None:
    """It could not fail otherwise."""
    assert found in list(dangers(source))


WRITING = re.compile(r"(logging|.*logger)\.(debug|info|warning|error|exception|critical|log|handle)|warnings\.warn")


def unescaped(source: str) -> Iterator[str]:
    """Lines of the log that names can get into raw: written past `say`, or with a text put together beforehand."""
    for node in (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call)):
        called = ast.unparse(node.func)
        if WRITING.fullmatch(called):
            yield called
        elif called == "say" and ast.unparse(node.args[0]).startswith(("logging.", "level")):
            texts = (arg for arg in node.args[1:2] if not isinstance(arg, (ast.Constant, ast.Name)))
            yield from map(ast.unparse, texts)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_line_of_the_log_is_escaped(path: Path) -> None:
    """It goes through `say`, which escapes what it puts into a text, and not the text."""
    boundary = ["logger.log", "logger.handle"] if path.name == "_guard.py" else []
    assert list(unescaped(path.read_text(encoding="utf-8"))) == boundary


@pytest.mark.parametrize(
    "source",
    [
        'say(logging.WARNING, f"of {name}")',
        'say(level, "of " + name)',
        'say(logging.ERROR if bad else logging.INFO, "of {}".format(name))',
        'logger.warning("of %s", name)',
        'warnings.warn(f"of {name}")',
    ],
)
def test_a_line_that_is_not_escaped_is_seen(source: str) -> None:
    """It could not fail otherwise."""
    assert list(unescaped(source))


def test_a_run_directory_is_closed_to_others(tmp_path: Path) -> None:
    """The directories that are made, and every file, whatever the umask of the job and the mode of what was there."""
    before = os.umask(0)
    try:
        root = tmp_path / "runs" / "today"
        RunLog(root, "tp-0", "x", rotate_bytes=200).note(1, "x" * 300)
        log = RunLog(root, "tp-0", "x", rotate_bytes=200)
        log.note(2, "x" * 300)
        log.close()
        write_meta(root, {"world_size": 2})
        write_abort(root, 1, "launch")
        write_summary(root, summarize(root))
    finally:
        os.umask(before)
    paths = [root.parent, root, *root.iterdir()]
    assert len(paths) == 7
    assert {path.name: oct(stat.S_IMODE(path.stat().st_mode) & 0o027) for path in paths} == {
        path.name: "0o0" for path in paths
    }


@pytest.mark.parametrize("command", [("check",), ("report",), ("watch",), ("report", "--format=json")])
def test_names_cannot_repaint_a_terminal(
    tmp_path: Path, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Escape sequences, line breaks and reversed text in names come out as what they are called, on one line."""
    names = (
        "!first \x1b[31m",
        *HOSTILE,
        "red \x1b[31m",
        "up \x1b[1A\r",
        "two\nlines",
        "title \x1b]0;owned\x07",
        "null \x00",
    )
    found = [(2, finding(parameter=name, advice=name, observed=name)) for name in names]
    watched = plan(*names, not_watched=((names[-1], names[-2]),))
    write_run(tmp_path, watched, findings=found, checks=steps(2), not_exercised=names, unverified=names)
    main([command[0], str(tmp_path), *command[1:]])
    out = capsys.readouterr()
    assert "x1b" in out.out or "u001b" in out.out
    for line in (*out.out.split("\n"), *out.err.split("\n")):
        assert line.isprintable()


def test_names_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    """The only script elements are the report's own three; no text of a name is markup."""
    hostile_run(tmp_path)
    assert main(["report", str(tmp_path), "--html"]) == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("<script") == page.count("</script>") == 3
    assert "<img" not in page
    assert "</style><style>" not in page
