"""Detaching from a real Megatron-core: the very same objects are back, whatever happened meanwhile."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.dist._harness import RankPool

pytestmark = pytest.mark.megatron

FINALIZER = "_allreduce_non_tensor_model_parallel_grads"


@pytest.fixture(scope="module")
def megatron_ranks() -> Iterator[Callable[..., list[Any]]]:
    """Processes of their own: the lab's doubles for the CUDA runtime stay in a process for good."""
    pool = RankPool()
    yield pool.run
    pool.close()


def megatron() -> SimpleNamespace:
    """A small real GPTModel in training, its optimizer, and the module whose attribute is wrapped."""
    warnings.simplefilter("ignore")  # the host's remarks about packages it does without
    logging.getLogger("megatron").setLevel(logging.ERROR)
    logging.getLogger("tpwatch").setLevel(logging.CRITICAL)
    from tpwatch.lab import cpu

    cpu.install()
    from megatron.core import parallel_state

    from tpwatch.lab import catalog, faults

    # Groups of an earlier test of this process are gone with its default group.
    parallel_state.destroy_model_parallel()
    entry = catalog.get("dense-sp")
    run, _mechanism = faults.build(entry, entry.at(2, 1, None))
    module = sys.modules["megatron.core.distributed.finalize_model_grads"]
    return SimpleNamespace(run=run, module=module, optimizer=run.optimizer)


def seams(host: SimpleNamespace) -> tuple[Any, dict[str, Any]]:
    """The module attribute, and what the optimizer instance holds under the wrapped names."""
    held = {name: vars(host.optimizer).get(name) for name in ("prepare_grads", "step")}
    return getattr(host.module, FINALIZER), held


def attach(host: SimpleNamespace, out: str) -> Any:
    """Attach as a user does."""
    import tpwatch

    knobs = {"out": out, "handshake_timeout": 20.0}
    watch = tpwatch.attach(host.run.chunks, host.optimizer, knobs, adapter="megatron")
    assert watch.enabled, watch.reason
    return watch


def restored(rank: int, out: str) -> dict[str, Any]:
    """Train watched, detach twice, train unwatched: are the seams the objects they were?"""
    del rank
    host = megatron()
    finalizer, held = seams(host)
    watch = attach(host, out)
    wrapped, own = seams(host)
    host.run.step(1)
    host.run.step(2)
    watch.detach()
    once = seams(host)
    watch.detach()
    twice = seams(host)
    host.run.step(3)
    host.run.close()
    return {
        "wrapped": wrapped is not finalizer and all(own[n] is not held[n] for n in held),
        "keys": sorted(set(vars(host.optimizer)) & set(held)),
        "once": once[0] is finalizer and once[1] == held,
        "twice": twice[0] is finalizer and twice[1] == held,
        "counted": (watch.last_step, watch.last_report.step),
        "findings": watch.findings,
    }


def test_detach_puts_the_very_same_objects_back(megatron_ranks: Callable[..., list[Any]], tmp_path: Any) -> None:
    """The module's function and the optimizer's methods, and no attribute is left on the instance."""
    for result in megatron_ranks(2, restored, str(tmp_path), timeout=90):
        assert result["wrapped"]
        assert result["once"]
        assert result["twice"]
        assert result["keys"] == []
        assert result["counted"] == (2, 2)
        assert result["findings"] == []


def shadowed(rank: int, out: str) -> bool:
    """The host's own instance attribute under a wrapped name comes back as it was."""
    del rank
    host = megatron()
    original = host.optimizer.step

    def of_the_host(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    host.optimizer.step = of_the_host
    watch = attach(host, out)
    host.run.step(1)
    watch.detach()
    host.run.close()
    return vars(host.optimizer)["step"] is of_the_host


def test_an_attribute_that_the_host_had_set_comes_back(megatron_ranks: Callable[..., list[Any]], tmp_path: Any) -> None:
    """Wrapped instance attributes are restored, not deleted."""
    assert megatron_ranks(2, shadowed, str(tmp_path), timeout=90) == [True, True]


def replaced(rank: int, out: str) -> dict[str, Any]:
    """The host wraps our wrappers after the attach; then detach, and train on."""
    del rank
    host = megatron()
    watch = attach(host, out)
    ours, own = seams(host)
    calls = []

    def later_finalizer(*args: Any, **kwargs: Any) -> Any:
        calls.append("finalizer")
        return ours(*args, **kwargs)

    def later_step(*args: Any, **kwargs: Any) -> Any:
        calls.append("step")
        return own["step"](*args, **kwargs)

    setattr(host.module, FINALIZER, later_finalizer)
    host.optimizer.step = later_step
    host.run.step(1)
    told = Told()
    logger = logging.getLogger("tpwatch")
    logger.setLevel(logging.WARNING)
    logger.addHandler(told)
    watch.detach()
    logger.removeHandler(told)
    finalizer, held = seams(host)
    before = watch.monitor.parts.exchange.collectives
    host.run.step(2)
    result = {
        "kept": finalizer is later_finalizer and held["step"] is later_step,
        "rest": held["prepare_grads"],
        "calls": calls,
        "told": told.said,
        "silent": watch.monitor.parts.exchange.collectives == before,
        "steps": watch.last_step,
    }
    host.run.close()
    # Other tests of this process start from the host's own function again.
    setattr(host.module, FINALIZER, ours.__wrapped__)
    return result


class Told(logging.Handler):
    """Collects warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message."""
        self.said.append(record.getMessage())


def test_what_the_host_replaced_stays_and_ours_passes_through(
    megatron_ranks: Callable[..., list[Any]], tmp_path: Any
) -> None:
    """Nothing of the host is undone; a note says which wrappers could only be silenced."""
    for result in megatron_ranks(2, replaced, str(tmp_path), timeout=90):
        assert result["kept"]
        assert result["rest"] is None
        assert result["calls"] == ["finalizer", "step"] * 2
        assert [note.split(" was replaced")[0] for note in result["told"]] == [
            f"tpwatch: {FINALIZER}",
            "tpwatch: optimizer.step",
        ]
        assert result["silent"]
        assert result["steps"] == 1


def again(rank: int, out: str) -> dict[str, Any]:
    """Attach, detach, attach: each life sees its own steps, and nothing is wrapped twice."""
    del rank
    host = megatron()
    finalizer, held = seams(host)
    reports = []
    for life in (1, 2):
        watch = attach(host, f"{out}/{life}")
        wrapped = seams(host)[0]
        host.run.step(life)
        reports.append((watch.last_step, watch.last_report.collectives, wrapped.__wrapped__))
        watch.detach()
    host.run.close()
    back = seams(host)
    return {
        "lives": [report[:2] for report in reports],
        "direct": all(report[2] is finalizer for report in reports),
        "back": back[0] is finalizer and back[1] == held,
    }


def test_attach_detach_attach(megatron_ranks: Callable[..., list[Any]], tmp_path: Any) -> None:
    """A second life works like the first and ends like it."""
    for result in megatron_ranks(2, again, str(tmp_path), timeout=90):
        assert result == {"lives": [(1, 2), (1, 2)], "direct": True, "back": True}
