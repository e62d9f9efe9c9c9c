"""Where skips are not allowed, a skip is a failure; elsewhere it is visible."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import REPOSITORY, run_python

SKIPPING_TESTS = {
    "marked need": ("import pytest\n\n@pytest.mark.browser\ndef test_x():\n    pass\n"),
    "call in a test": "import pytest\n\ndef test_x():\n    pytest.skip('no reason')\n",
    "whole file": "import pytest\n\npytest.skip('no reason', allow_module_level=True)\n",
}


def run_pytest(directory: Path, source: str, *, no_skips: str) -> tuple[int, str]:
    """Run one test file under this project's conftest and settings."""
    for name in ("tests/conftest.py", "pyproject.toml"):
        (directory / Path(name).name).write_text((REPOSITORY / name).read_text())
    (directory / "tests").mkdir()
    (directory / "tests" / "test_x.py").write_text(source)
    done = run_python(
        *("-m", "pytest", "-p", "no:cacheprovider", directory),
        cwd=directory,
        env={"TPWATCH_TEST_NO_SKIPS": no_skips, "PATH": ""},
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("source", SKIPPING_TESTS.values(), ids=SKIPPING_TESTS)
def test_a_skip_fails_where_skips_are_not_allowed(tmp_path: Path, source: str) -> None:
    """A need that is not met, a skip in a test and a skipped file all fail the run."""
    code, output = run_pytest(tmp_path, source, no_skips="1")
    assert code != 0
    assert "skipped although TPWATCH_TEST_NO_SKIPS=1" in output


def test_an_expected_failure_is_not_a_skip(tmp_path: Path) -> None:
    """A test marked as a known failure stays one."""
    source = "import pytest\n\n@pytest.mark.xfail\ndef test_x():\n    assert False\n"
    code, output = run_pytest(tmp_path, source, no_skips="1")
    assert code == 0, output


def test_a_skip_elsewhere_says_what_is_missing(tmp_path: Path) -> None:
    """On a user's machine the summary names the missing need, and the run passes."""
    code, output = run_pytest(tmp_path, SKIPPING_TESTS["marked need"], no_skips="0")
    assert code == 0, output
    assert "needs chromium (packages chromium and chromium-driver)" in output
