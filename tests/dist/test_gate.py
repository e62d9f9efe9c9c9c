"""The gate in front of a checkpoint: copies that differ are said, written into it, or keep it from being saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist._harness import run_ranks
from tests.dist._parts import CPU, Rig, normal, rig
from tpwatch.alike import Alike
from tpwatch.config import Config
from tpwatch.errors import ReplicaFault
from tpwatch.gate import Gate
from tpwatch.job import Job


def gate(rank: int, policy: str, *, leader: bool | None = None, states: bool = True, **knobs: Any) -> tuple[Gate, Rig]:
    """Two healthy parameters with masters and moments, and a gate of the given policy."""
    config = Config(checkpoint=policy, **knobs)  # type: ignore[arg-type]
    watched = rig([normal(1, 8), normal(2, 8)], [None, None], config)
    if states:
        kept = ("master", "exp_avg", "exp_avg_sq")
        watched.source.kept = [{label: normal(10 * i + j, 8) for j, label in enumerate(kept)} for i in range(2)]
    job = Job(leader=rank == 0 if leader is None else leader, device=CPU)
    return Gate(watched.monitor, job, config, watched.guard), watched


def notes(watched: Rig) -> list[str]:
    """Everything that was noted."""
    return [text for _, text in watched.memo.of("note")]


def healthy(rank: int, policy: str, directory: Path) -> tuple[list[str], list[Any]]:
    """Save with copies that agree."""
    guard, watched = gate(rank, policy)
    guard.before_save(5)
    guard.after_save(5, directory)
    return notes(watched), watched.findings


@pytest.mark.parametrize("policy", ["warn", "annotate", "refuse"])
def test_copies_that_agree_pass(policy: str, tmp_path: Path) -> None:
    """Nothing is said and nothing found, under every policy."""
    assert run_ranks(2, healthy, policy, tmp_path) == [([], [])] * 2


def parted(rank: int, policy: str, directory: Path, where: str) -> tuple[list[str], list[Any], str]:
    """Save while rank 1 has another copy of the second parameter's `where`."""
    guard, watched = gate(rank, policy)
    tensor = watched.source.parameters[1] if where == "value" else watched.source.kept[1][where]
    tensor[3] += rank
    try:
        guard.before_save(5)
        guard.after_save(5, directory)
    except ReplicaFault as fault:
        return notes(watched), watched.findings, str(fault)
    return notes(watched), watched.findings, ""


@pytest.mark.parametrize("where", ["master", "exp_avg", "exp_avg_sq"])
def test_state_that_differs_is_a_finding_that_names_it(tmp_path: Path, where: str) -> None:
    """Values agree: nothing else would see it before the next update."""
    for said, findings, refused in run_ranks(2, parted, "warn", tmp_path, where):
        (finding,) = findings
        assert (finding.kind, finding.code, finding.parameter) == ("optimizer-mismatch", "TPW109", "p1")
        assert (finding.observed, finding.first_step, finding.severity) == (f"{where} differ", 5, "error")
        assert said == [f"copies differ as a checkpoint is saved: p1 ({where})"]
        assert refused == ""


def offloaded(_rank: int) -> tuple[dict[str, tuple[str, ...]] | None, int]:
    """What differs, and internal errors, where an optimizer keeps its moments on another device."""
    watched = rig([normal(1, 30)], [None])
    watched.source.kept = [{"exp_avg": torch.empty(30, device="meta")}]
    return Alike(watched.monitor.parts, watched.guard).differing(), watched.guard.errors


def test_state_that_lies_elsewhere_is_not_compared() -> None:
    """Offloaded to the host, it is no reason to fail, nor to take it for something else."""
    assert run_ranks(2, offloaded) == [({}, 0), ({}, 0)]


@pytest.mark.parametrize("where", ["value", "exp_avg"])
def test_a_save_can_be_refused_on_every_rank(tmp_path: Path, where: str) -> None:
    """One policy away from the warning: every rank raises, and says of what."""
    for _, _, refused in run_ranks(2, parted, "refuse", tmp_path, where):
        assert refused.startswith("tpwatch refused to save a checkpoint at step 5: ")
        assert ("optimizer-mismatch of p1" if where == "exp_avg" else "1 x drift") in refused


def test_a_warning_does_not_keep_from_saving(tmp_path: Path) -> None:
    """Values that differ are said; what they are is for the checks of training steps to find."""
    for said, findings, refused in run_ranks(2, parted, "warn", tmp_path, "value"):
        assert (said, findings, refused) == (["copies differ as a checkpoint is saved: p1 (value)"], [], "")


def test_the_checkpoint_is_annotated_by_the_leader(tmp_path: Path) -> None:
    """Which copies differ, in the words of the run."""
    run_ranks(2, parted, "annotate", tmp_path, "exp_avg")
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text())
    assert path.name == "tpwatch.tp-0.json"
    assert (found["step"], found["verdict"], found["differing"]) == (5, "copies differ", {"p1": ["exp_avg"]})
    assert [f["kind"] for f in found["findings"]] == ["optimizer-mismatch"]


def test_an_annotation_also_says_that_copies_agree(tmp_path: Path) -> None:
    """Its absence could mean that nobody looked."""
    run_ranks(2, healthy, "annotate", tmp_path)
    assert json.loads((tmp_path / "tpwatch.tp-0.json").read_text())["verdict"] == "copies agree"


def in_one_group(rank: int, run: str) -> str:
    """Two groups of two ranks in one job; only the first has a moment that differs."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    asked_for = run == "stopping" and rank < 2
    guard, watched = gate(rank, "refuse", leader=rank % 2 == 0, on_fault="abort")
    watched.exchange.group = groups[rank // 2]
    watched.source.kept[0]["exp_avg"].add_(float(rank == 1))
    try:
        guard.before_save(7, asked_for=asked_for)
    except ReplicaFault as fault:
        return str(fault)
    return ""


def test_a_difference_in_one_group_refuses_the_save_of_all() -> None:
    """A save is collective: a rank that went on would wait for the others for ever."""
    said = run_ranks(4, in_one_group, "going on")
    assert all("refused to save" in text for text in said)
    assert ["optimizer-mismatch of p0" in text for text in said] == [True, True, False, False]


def test_the_checkpoint_before_an_abort_is_not_refused() -> None:
    """It was asked for, with what was found."""
    assert run_ranks(4, in_one_group, "stopping") == [""] * 4


def failing(rank: int) -> tuple[list[str], int]:
    """Rank 1 cannot read its optimizer."""
    guard, watched = gate(rank, "refuse")
    if rank == 1:
        watched.source.states = lambda: [[]]  # type: ignore[method-assign]
    watched.source.parameters[0].add_(rank)
    guard.before_save(5)
    return notes(watched), watched.guard.errors


def test_a_rank_that_cannot_compare_joins_and_refuses_nothing() -> None:
    """Nobody waits for it, the error is counted, and everyone knows that no comparison was made."""
    line = "copies could not be compared as a checkpoint is saved: an internal error on one rank"
    assert run_ranks(2, failing) == [([line], 0), ([line], 1)]


def switched_off(rank: int) -> str:
    """Rank 2 and 3 are a group whose monitor is off, rank 0 and 1 one with a difference."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    guard, watched = gate(rank, "refuse", leader=rank % 2 == 0)
    watched.exchange.group = groups[rank // 2]
    watched.monitor.watching = rank < 2
    watched.source.parameters[0].add_(float(rank == 1))
    with pytest.raises(ReplicaFault) as fault:
        guard.before_save(7)
    return str(fault.value)


def test_a_group_that_is_off_still_comes_to_the_meeting() -> None:
    """It has nothing to say, and the others wait for every rank of the job."""
    assert all("1 x drift" in text for text in run_ranks(4, switched_off))


def on_one_rank_only(rank: int) -> list[str]:
    """Rank 0 has optimizer state and rank 1 has none: a resume that loaded it on one rank."""
    guard, watched = gate(rank, "warn", states=rank == 0)
    guard.before_save(5)
    return [f"{f.parameter}: {f.observed}" for f in watched.findings]


def test_state_on_some_ranks_only_differs() -> None:
    """Nothing is compared with nothing, and differs from something."""
    expected = [f"{name}: master, exp_avg, exp_avg_sq differ" for name in ("p0", "p1")]
    assert run_ranks(2, on_one_rank_only) == [expected] * 2


def failing_annotated(rank: int, directory: Path) -> None:
    """As `failing`, with a note in the checkpoint asked for."""
    guard, watched = gate(rank, "annotate")
    if rank == 1:
        watched.source.states = lambda: [[]]  # type: ignore[method-assign]
    guard.before_save(5)
    guard.after_save(5, directory)


def test_a_checkpoint_is_not_annotated_with_what_nobody_compared(tmp_path: Path) -> None:
    """That copies agree would be a claim."""
    run_ranks(2, failing_annotated, tmp_path)
    assert list(tmp_path.iterdir()) == []


def load(rank: int, before: float, after: float) -> list[str]:
    """Load a checkpoint that sets a moment of rank 1 from `before` to `after`; 0 is what rank 0 has."""
    guard, watched = gate(rank, "warn")
    moment = watched.source.kept[0]["exp_avg"]
    moment.fill_(before * rank)
    with guard.loading(9):
        moment.fill_(after * rank)
    return [note for note in notes(watched) if "with the checkpoint" in note]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (0.0, 1.0, ["a difference between copies came with the checkpoint: p0"]),
        (1.0, 0.0, ["a difference between copies went with the checkpoint: p0"]),
        (1.0, 2.0, []),
        (0.0, 0.0, []),
    ],
)
def test_a_load_is_compared_with_what_was_before(before: float, after: float, said: list[str]) -> None:
    """Whether the checkpoint brought the difference or ended it is known only to who looked before."""
    assert run_ranks(2, load, before, after) == [said] * 2


def test_what_is_compared_costs_one_collective() -> None:
    """However many tensors there are."""

    def count(rank: int) -> int:
        guard, watched = gate(rank, "warn")
        guard.before_save(5)
        return watched.exchange.collectives

    assert run_ranks(2, count) == [1, 1]


def test_the_smallest_tensors_are_compared_like_others() -> None:
    """An empty one has nothing to differ in, one element is enough to."""

    def tiny(rank: int) -> list[str]:
        config = Config(checkpoint="warn")
        watched = rig([torch.zeros(0), torch.full((1,), float(rank))], [None, None], config)
        Gate(watched.monitor, None, config, watched.guard).before_save(1)
        return notes(watched)

    assert run_ranks(2, tiny) == [["copies differ as a checkpoint is saved: p1 (value)"]] * 2
