"""Every gate of `make lint` fails on a planted violation, so that a green gate means something."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.commands import REPOSITORY, run_command, run_python

# The least package that keeps every gate: one file per layer.
HEALTHY = {
    "__init__": '"""Public names."""\n\n__version__ = "0.1.0"\n',
    "errors": '"""The errors."""\n',
    "records": '"""The records."""\n\nfrom tpwatch import errors as errors\n',
    "config": '"""The settings."""\n\nfrom tpwatch import records as records\n',
    "diagnose": '"""The rules."""\n\nfrom tpwatch import config as config\n',
    "exchange": '"""The collectives."""\n\nimport torch as torch\n',
    "monitor": '"""The story."""\n\nfrom tpwatch import diagnose as diagnose\n',
    "_guard": (
        '"""The failure boundary."""\n\n\ndef guard() -> None:\n    """Catch all."""\n'
        "    try:\n        print()\n    except Exception:\n        return\n"
    ),
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small tpwatch with the real gate settings, on which every gate passes."""
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [0.1.0] - unreleased\n")
    package = tmp_path / "tpwatch"
    package.mkdir()
    for name, text in HEALTHY.items():
        (package / f"{name}.py").write_text(text)
    return tmp_path


def lint_imports(project: Path) -> tuple[int, str]:
    """Run import-linter on the small project."""
    program = Path(sys.executable).parent / "lint-imports"
    done = run_command(program, "--no-cache", "--no-logo", cwd=project, env={"PYTHONPATH": str(project)})
    return done.returncode, done.stdout + done.stderr


def run_script(name: str, *arguments: str | Path) -> tuple[int, str]:
    """Run one of the gate programs."""
    done = run_python(REPOSITORY / "scripts" / name, *arguments)
    return done.returncode, done.stdout + done.stderr


def function_of(lines: int, name: str = "long") -> str:
    """Return the source of a function that is `lines` lines long."""
    return f"def {name}():\n" + "    pass\n" * (lines - 1)


def test_imports_that_point_down_pass(project: Path) -> None:
    """The import contracts hold for the small package."""
    code, output = lint_imports(project)
    assert code == 0, output


@pytest.mark.parametrize(
    ("module", "statement", "contract"),
    [
        ("errors", "import tpwatch.monitor", "Imports point one way"),
        ("diagnose", "import tpwatch.exchange", "Imports point one way"),
        ("records", "import tpwatch._guard", "Imports point one way"),
        ("surprise", "", "Imports point one way"),
        ("diagnose", "import torch", "torch only where tensors are"),
        ("monitor", "import megatron.core", "megatron only in its adapter"),
        ("exchange", "def f():\n    import triton", "Optional packages only"),
        ("monitor", "import wandb", "Optional packages only"),
    ],
)
def test_imports_against_the_arrow_fail(project: Path, module: str, statement: str, contract: str) -> None:
    """An upward, sideways or unlisted module, or a third-party import out of place, is named."""
    path = project / "tpwatch" / f"{module}.py"
    path.write_text(HEALTHY.get(module, "") + f"\n{statement}\n")
    code, output = lint_imports(project)
    assert code == 1, output
    broken = [line for line in output.splitlines() if " BROKEN" in line]
    assert any(line.startswith(contract) for line in broken), output


def test_shape_of_a_small_package_passes(project: Path) -> None:
    """The shape gate holds for the small package, blind catch in the guard included."""
    code, output = run_script("check_shape.py", project / "tpwatch")
    assert code == 0, output


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("assert True  # noqa: S101\n", "assert"),
        ("def f():\n    global x  # noqa: PLW0603\n", "global statement"),
        ("try:\n    pass\nexcept Exception:  # noqa: BLE001\n    pass\n", "catches everything"),
        ("try:\n    pass\nexcept (OSError, BaseException):\n    pass\n", "catches everything"),
        ("try:\n    pass\nexcept:\n    pass\n", "catches everything"),
        ("import logging\n\nlogger = logging.getLogger('tpwatch')\n", "logs by itself"),
        ("def f():\n    raise NotImplementedError('later')\n", "NotImplementedError"),
        (function_of(81), "long has 81 lines"),
        ("x = 1\n" * 351, "file has 351 lines"),
        ("".join(function_of(13, f"f{i}") for i in range(20)), "median function has 13 lines"),
        (
            function_of(61) + "".join(function_of(2, f"f{i}") for i in range(31)),
            "of functions over 60 lines",
        ),
    ],
)
def test_shape_out_of_bounds_fails(project: Path, source: str, complaint: str) -> None:
    """Each limit on the shape of code is enforced, whatever comment stands beside it."""
    (project / "tpwatch" / "monitor.py").write_text(source)
    code, output = run_script("check_shape.py", project / "tpwatch")
    assert code == 1
    assert complaint in output


def test_shape_at_the_limits_passes(project: Path) -> None:
    """A function of exactly the greatest length is allowed, and a kernel may be longer."""
    short = "".join(function_of(2, f"f{i}") for i in range(70))
    (project / "tpwatch" / "monitor.py").write_text(short + function_of(80))
    (project / "tpwatch" / "fingerprint").mkdir()
    (project / "tpwatch" / "fingerprint" / "kernels.py").write_text(function_of(100))
    code, output = run_script("check_shape.py", project / "tpwatch")
    assert code == 0, output


def test_equal_versions_pass(project: Path) -> None:
    """Package, project file and changelog agree."""
    code, output = run_script("check_version.py", project)
    assert code == 0, output


@pytest.mark.parametrize("name", ["CHANGELOG.md", "pyproject.toml", "tpwatch/__init__.py"])
def test_unequal_versions_fail(project: Path, name: str) -> None:
    """A version that was raised in one place only is refused."""
    path = project / name
    path.write_text(path.read_text().replace("0.1.0", "0.2.0"))
    code, output = run_script("check_version.py", project)
    assert code == 1
    assert f"{name}: 0.2.0" in output


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("see " + "/home" + "/alice/run", "absolute path"),
        (
            "pip install --index-url " + "https:" + "//x.example/simple",
            "host of a package registry",
        ),
        ("from https://" + "pypi" + ".org/simple", "host of a package registry"),
    ],
)
def test_text_of_one_machine_fails(project: Path, text: str, rule: str) -> None:
    """A path under a home directory, or a registry's host, is named with its line."""
    run_command("git", "init", "-q", cwd=project)
    code, output = run_script("check_text.py", project)
    assert code == 0, output
    (project / "notes.md").write_text(f"first line\n{text}\n")
    code, output = run_script("check_text.py", project)
    assert code == 1
    assert "notes.md:2" in output
    assert rule in output


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ('"""M."""\n\nassert True\n', "S101"),
        ("x = 1\n", "D100"),
        ('"""M."""\n\n\ndef f() -> None:\n    pass\n', "D103"),
        ('"""M."""\n\nprint()\n', "T201"),
        ('"""M."""\n\ntry:\n    x = 1\nexcept Exception:\n    x = 2\n', "BLE001"),
        ('"""M."""\n\n\ndef _f(a, b, c, d, e, g):\n    return a, b, c, d, e, g\n', "PLR0913"),
        ('"""M."""\n\nx = 1  # noqa\n', "PGH004"),
    ],
)
def test_ruff_rules_that_the_style_rests_on(project: Path, source: str, rule: str) -> None:
    """The settings leave these rules on for the package."""
    (project / "tpwatch" / "monitor.py").write_text(source)
    program = Path(sys.executable).parent / "ruff"
    done = run_command(program, "check", "--no-cache", "--output-format=concise", cwd=project)
    assert done.returncode == 1
    assert any("monitor.py" in line and rule in line for line in done.stdout.splitlines())


def test_mypy_refuses_an_untyped_function(project: Path) -> None:
    """The settings are strict for the package."""
    (project / "tpwatch" / "monitor.py").write_text("def f(x):\n    return x\n")
    done = run_python("-m", "mypy", "--cache-dir", project / "cache", "tpwatch/monitor.py", cwd=project)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "[no-untyped-def]" in done.stdout


def test_every_test_file_is_seen() -> None:
    """Git, ruff and pytest see each test file; some leave out a folder named `dist` by default."""
    paths = (REPOSITORY / "tests").rglob("test_*.py")
    files = [path.relative_to(REPOSITORY).as_posix() for path in paths]
    ignored = run_command("git", "check-ignore", *files).stdout
    checked = run_python("-m", "ruff", "check", "--show-files").stdout
    collected = run_python("-m", "pytest", "--collect-only", "-q").stdout
    assert ignored == ""
    assert [name for name in files if f"/{name}\n" not in checked] == []
    assert [name for name in files if f"\n{name}::" not in f"\n{collected}"] == []
