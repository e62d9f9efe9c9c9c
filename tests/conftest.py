"""Fixtures and rules that hold for every test."""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

# Set by continuous integration, which installs everything: there a skip is a test that was lost.
NO_SKIPS = "TPWATCH_TEST_NO_SKIPS"


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


# marker -> (is it there?, what is missing)
NEEDS: dict[str, tuple[Callable[[], bool], str]] = {
    "megatron": (lambda: importlib.util.find_spec("megatron") is not None, "megatron-core"),
    "te": (
        lambda: importlib.util.find_spec("transformer_engine") is not None,
        "transformer-engine",
    ),
    "triton": (lambda: importlib.util.find_spec("triton") is not None, "triton"),
    "gpu": (_has_gpu, "a CUDA device"),
    "prom": (
        lambda: all(map(shutil.which, ("amtool", "prometheus", "prometheus-alertmanager", "promtool"))),
        "Prometheus (packages prometheus and prometheus-alertmanager)",
    ),
    "browser": (
        lambda: all(map(shutil.which, ("chromium", "chromedriver"))),
        "chromium (packages chromium and chromium-driver)",
    ),
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose marked need is not met, saying which."""
    for marker, (is_there, missing) in NEEDS.items():
        if item.get_closest_marker(marker) and not is_there():
            pytest.skip(f"needs {missing}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn the skip of a test into a failure where skips are not allowed."""
    del item, call
    return _refuse_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn the skip of a whole file into an error where skips are not allowed."""
    del collector
    return _refuse_skip((yield))


def _refuse_skip(report: Any) -> Any:
    # An expected failure reports as skipped too, with `wasxfail`.
    if report.skipped and os.environ.get(NO_SKIPS) == "1" and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped although {NO_SKIPS}=1: {report.longrepr[-1]}"
    return report


@pytest.fixture(autouse=True)
def _no_inherited_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the caller's TPWATCH_* variables, so that a test sees only what it sets."""
    for name in [name for name in os.environ if name.startswith("TPWATCH_") and name != NO_SKIPS]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def gloo_ranks() -> Iterator[Callable[..., list[Any]]]:
    """`gloo_ranks(world_size, fn, *args, timeout=60)`: see `RankPool.run`; one pool a session."""
    from tests.dist._harness import RankPool

    pool = RankPool()
    yield pool.run
    pool.close()
