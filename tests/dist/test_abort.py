"""A run that is stopped, in a script that catches nothing and closes nothing: what is left of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.commands import run_python
from tests.dist.test_session import attach, partials, toy
from tpwatch.errors import ReplicaFault

Ranks = Callable[..., list[Any]]


def die(rank: int, out: str) -> tuple[list[str], str, bool]:
    """Train until a fault stops the run; at that moment: what the sink has, the summary's verdict, `abort.json`."""
    model = toy()
    model.rules[0] = "none"
    watch = attach(model, out, on_fault="abort", sinks=("tests.export._sinks:Lists",))
    with suppress(ReplicaFault):
        for step in range(1, 9):
            model.train(partials(model, rank, step))
    kinds, summary, abort = (Path(out, name) for name in ("kinds.tp-0", "summary.json", "abort.json"))
    left = kinds.read_text().split() if rank == 0 else []
    verdict = json.loads(summary.read_text())["verdict"] if rank == 0 else ""
    found = left, verdict, rank != 0 or abort.exists()
    watch.abandon()
    return found


SCRIPT = """
import sys
import torch.distributed as dist
from tests.commands import run_python
from tests.dist.test_session import attach, partials, toy

dist.init_process_group("gloo")
model = toy()
model.rules[0] = "none"
watch = attach(model, sys.argv[1], on_fault="abort", sinks=("tests.export._sinks:Slow",))
for step in range(1, 9):
    model.train(partials(model, dist.get_rank(), step))
"""


def test_a_launcher_ends_no_rank_that_still_says_why(tmp_path: Path) -> None:
    """Torchrun kills all ranks once the first has ended: those with nothing to say wait for those that have."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = run_python("-m", "torch.distributed.run", "--nproc_per_node=2", script, tmp_path / "run", timeout=100)
    assert done.returncode != 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["aborted_at"] == 3
    assert (tmp_path / "run" / "told.tp-0").read_text() == "abort"


def test_what_is_left_does_not_hang_on_the_scripts_manners(tmp_path: Path, gloo_ranks: Ranks) -> None:
    """The sinks have heard of the finding and the abort, the summary is there, and says why the run stopped."""
    (left, verdict, abort), _ = gloo_ranks(2, die, str(tmp_path), timeout=60)
    assert left[0] == "start"
    assert left[-2:] == ["finding", "abort"]
    assert (verdict, abort) == ("faults", True)
