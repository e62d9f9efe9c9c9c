"""What things are called, on all ranks alike: the run directory, ranks of the job, and parameters of any name."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

import tpwatch
from tests.dist._parts import Gradients, ToyAdapter, normal
from tests.dist.test_session import NAMES, attach, partials, toy
from tests.unit._report_runs import HOSTILE
from tpwatch import session
from tpwatch.errors import ReplicaFault

Ranks = Callable[..., list[Any]]


def without_a_directory(rank: int, here: str) -> tuple[int, str]:
    """Attach and finish where no directory was chosen; this process, and the directory it went to."""
    before = Path.cwd()
    os.chdir(here)
    try:
        model = toy()
        with mock.patch.object(session, "choose", return_value=ToyAdapter()):
            watch = tpwatch.attach(model, None)
        model.train(partials(model, rank, 1))
        watch.finish()
        return os.getpid(), watch.directory
    finally:
        os.chdir(before)


def test_without_a_directory_all_ranks_take_the_one_that_rank_0_chose(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """A new one under `tpwatch-runs`, named after the time and the process of rank 0, and there is no other."""
    results = gloo_ranks(3, without_a_directory, str(tmp_path), timeout=60)
    (chosen,) = (tmp_path / "tpwatch-runs").iterdir()
    assert {directory for _, directory in results} == {str(chosen)}
    assert chosen.name.endswith(f"-{results[0][0]}")
    assert json.loads((chosen / "summary.json").read_text())["steps_checked"] == 1


def in_a_group_of_three(rank: int, out: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Rank 0 is a group of its own; in the other one a gradient is missing on rank 3: ranks of the findings."""
    groups = [dist.new_group([0]), dist.new_group([1, 2, 3])]
    model = toy()
    model.rules, model.group = ["none"] * 4, groups[rank > 0]
    with mock.patch.object(session, "choose", return_value=ToyAdapter()):
        watch = tpwatch.attach(model, None, {"out": out}, groups={"tp": model.group})
    for step in range(1, 4):
        copies: Gradients = [normal(step, 20) for _ in NAMES]
        model.train([*copies[:3], None if rank == 3 else copies[3]])
    found = [(f.ranks, f.odd_ranks) for f in watch.findings]
    watch.finish()
    return found


def test_ranks_are_those_of_the_job(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """Not those within the replica group: in findings, in the name of the event file, in the plan it begins with."""
    results = gloo_ranks(4, in_a_group_of_three, str(tmp_path), timeout=60)
    assert results == [[], *[[((1, 2, 3), (3,))]] * 3]
    (finding,) = json.loads((tmp_path / "summary.json").read_text())["findings"]
    assert (finding["ranks"], finding["odd_ranks"]) == ([1, 2, 3], [3])
    assert "events.tp-1.jsonl" in {path.name for path in tmp_path.iterdir()}


class Lines(logging.Handler):
    """Collects every line of the `tpwatch` logger as a terminal would get it."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the formatted line."""
        self.said.append(self.format(record))


BAD = ["bad\x1b[2J\nrm", *HOSTILE[-3:]]


def of_bad_names(rank: int, out: str) -> tuple[list[str], str]:
    """A model of such names, one parameter unknown to rank 1, none reduced: all lines of the log, and the last word."""
    model, lines, logger = toy(BAD), Lines(), logging.getLogger("tpwatch")
    model.rules = ["none"] * 4
    if rank == 1:
        del model.names[0], model.parameters[0], model.rules[0]
    before = logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.DEBUG)
    policies = {"replica-layout:*": "warn"}
    try:
        watch = attach(model, out, on_fault="abort", policies=policies, watch={"exclude": [BAD[1]]})
        for step in range(1, 5):
            model.train(partials(model, rank, step))
    except ReplicaFault as fault:
        watch.abandon()
        return lines.said, str(fault)
    finally:
        logger.removeHandler(lines)
        logger.setLevel(before)
    return lines.said, ""


def test_names_cannot_repaint_the_terminal_of_a_run(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """What is not watched, what differs, what is found and why a run is stopped: one line each, names escaped."""
    (said, last), (_, other) = gloo_ranks(2, of_bad_names, str(tmp_path), timeout=60)
    assert last == other
    assert "missing-reduce of " in last
    lines = [*said, last]
    assert all(line.isprintable() for line in lines)
    escaped = [name.encode("unicode_escape").decode() for name in BAD]
    assert all(any(name in line for line in lines) for name in escaped)
