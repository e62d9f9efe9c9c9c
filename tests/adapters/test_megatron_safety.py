"""What tpwatch may do to a job on real Megatron-core: say things, stop it if asked to, and nothing else."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.adapters import _runs
from tests.commands import run_python
from tpwatch.act import ABORT_EXIT_CODE
from tpwatch.report.summary import summarize

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(240)]

IN_ONE_GROUP = str(Path(__file__).parent / "scripts" / "fault_in_one_group.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def losses(path: Path) -> dict[str, object]:
    """Exact losses and weights that a lab worker left behind."""
    found: dict[str, object] = json.loads(path.read_text())
    return found


def test_a_rank_with_the_kill_switch_leaves_all_ranks_unwatched_and_bit_identical(tmp_path: Path) -> None:
    """One warning, no event file, and losses and weights exactly those of an unwatched run."""
    off = [{}, {"TPWATCH_DISABLED": "1"}]
    first, second = tmp_path / "off.json", tmp_path / "never.json"
    ended = _runs.ranks(_runs.worker("ple-double-sum", tmp_path / "run", 8, f"--losses={first}"), 2, env=off)
    plain = _runs.ranks(_runs.worker("ple-double-sum", tmp_path / "none", 8, f"--losses={second}", "--no-watch"), 2)
    assert (ended.codes, plain.codes) == ([0, 0], [0, 0])
    assert ended.output.count("tpwatch: off on all ranks: rank 1: switched off") == 1
    assert not list(tmp_path.glob("run/events.*"))
    assert losses(first) == losses(second)


def test_ranks_with_different_configurations_all_stay_off(tmp_path: Path) -> None:
    """A rank that would check other steps than its peers would wait in a collective alone."""
    env = [{}, {"TPWATCH_INTERVAL": "7"}]
    ended = _runs.ranks(_runs.worker("dense-sp", tmp_path / "run", 3), 2, env=env)
    assert ended.codes == [0, 0]
    assert ended.output.count("rank 1 has another config") == 1
    assert not list(tmp_path.glob("run/events.*"))


@pytest.mark.parametrize(("faults", "world"), [("slime-gdn-drift,lora-unsummed", 2), ("distributed-optimizer", 4)])
def test_a_watched_run_is_bit_identical_to_an_unwatched_one(tmp_path: Path, faults: str, world: int) -> None:
    """Watching reads: bf16, FP32 and the distributed optimizer end the same to the last bit, drill-down included."""
    paths = [tmp_path / "watched.json", tmp_path / "plain.json"]
    dp = f"--dp={world // 2}"
    watched = _runs.ranks(_runs.worker(faults, tmp_path / "run", 12, dp, f"--losses={paths[0]}"), world)
    plain = _runs.ranks(_runs.worker(faults, tmp_path / "none", 12, dp, f"--losses={paths[1]}", "--no-watch"), world)
    assert watched.codes == plain.codes == [0] * world
    assert losses(paths[0]) == losses(paths[1])


@pytest.mark.parametrize("guard", ["auto", "deferred"])
def test_a_one_sided_gradient_is_on_disk_before_the_framework_trips_over_it(tmp_path: Path, guard: str) -> None:
    """The reduction that follows hangs or fails; the finding names parameter and rank all the same."""
    env = [{"TPWATCH_GUARD": guard}] * 2
    ended = _runs.ranks(_runs.worker("one-sided-gradient", tmp_path, 3), 2, env=env, timeout=25)
    assert ended.codes != [0, 0]
    (found,) = [e["finding"] for e in _runs.events(tmp_path, "finding")][:1]
    assert (found["kind"], found["parameter"]) == ("grad-presence", "decoder.layers.1.pre_mlp_layernorm.weight")
    assert (found["first_step"], found["evidence"]["absent_ranks"]) == (1, [1])
    assert summarize(tmp_path).verdict == "faults"


def test_a_gradient_missing_outside_ddp_names_the_one_rank_of_four(tmp_path: Path) -> None:
    """A chunk outside DDP: None is what its gradient really is on the rank without input."""
    ended = _runs.ranks(_runs.worker("one-sided-chunk", tmp_path, 3, tp=4), 4, timeout=40)
    assert ended.codes != [0] * 4
    findings = {e["finding"]["parameter"]: e["finding"] for e in _runs.events(tmp_path, "finding")}
    assert set(findings) == {"vision_norm.weight", "vision_proj.weight"}
    assert {tuple(f["odd_ranks"]) for f in findings.values()} == {(3,)}


def test_abort_before_the_hang_stops_all_ranks_at_once(tmp_path: Path) -> None:
    """With on_fault: abort the fault is raised instead of the hang, on every rank, at the same step."""
    env = [{"TPWATCH_ON_FAULT": "abort"}] * 2
    ended = _runs.ranks(_runs.worker("one-sided-gradient", tmp_path, 3), 2, env=env, timeout=60)
    assert ended.codes == [0, 0]  # the lab's worker catches ReplicaFault and ends in order
    assert "tpwatch stopped the run at step 1: grad-presence" in ended.output
    assert json.loads((tmp_path / "abort.json").read_text())["step"] == 1


def test_an_abort_comes_out_of_tpwatch_run_with_its_own_exit_code(tmp_path: Path) -> None:
    """All ranks raise at the same step; torchrun says 1, `tpwatch run` says why."""
    started = time.monotonic()
    script = Path(__file__).parent / "scripts" / "raise_on_fault.py"
    command = ["-m", "tpwatch", "run", "--out", tmp_path / "run", "--", *TORCHRUN, script]
    ended = run_python(*command, env={"TPWATCH_ON_FAULT": "abort", "OMP_NUM_THREADS": "1"}, timeout=120)
    assert ended.returncode == ABORT_EXIT_CODE, ended.stdout + ended.stderr
    steps = {line.split()[-1] for line in ended.stdout.splitlines() if line.startswith("fault at step")}
    assert steps == {"3"}
    assert ended.stdout.count("fault at step") == 2
    assert time.monotonic() - started < 60


CASES = ("abort:ple-double-sum", "abort:one-sided-gradient", "checkpoint_then_abort:ple-double-sum")
LAYOUTS = {"dp2": (0, 1), "pp2": (2, 3)}
"""Layout of four ranks in two TP groups, and the ranks of the one that has the fault."""


@pytest.fixture(scope="module", params=LAYOUTS)
def stopped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """Where one layout has run all cases, what it said, and its name."""
    out = tmp_path_factory.mktemp(request.param)
    ended = _runs.ranks([IN_ONE_GROUP, str(out), request.param, *CASES], 4, timeout=120)
    assert ended.codes == [0] * 4, ended.output[-4000:]
    return out, ended.output, request.param


@pytest.mark.parametrize(("case", "step"), list(zip(CASES, (3, 1, 3), strict=True)))
def test_a_fault_in_one_group_stops_every_rank_of_the_job_at_the_same_step(
    stopped: tuple[Path, str, str], case: str, step: int
) -> None:
    """Data-parallel peers or another pipeline stage: no rank is left in a collective, or waiting for its neighbour."""
    out, output, layout = stopped
    directory = out / case.replace(":", "-")
    for rank in range(4):
        (said,) = re.findall(rf"(?m)^{case}: rank {rank} stopped at step (\d+) in step (\d+): (\d+) of (\d+)", output)
        assert said[:2] == (str(step), str(step))
        assert (int(said[2]) > 0) is (rank in LAYOUTS[layout])
        assert int(said[3]) > 0
    assert json.loads((directory / "abort.json").read_text())["step"] == step
    assert [e["step"] for e in _runs.events(directory, "abort")] == [step, step]  # the file of each group says so
    if case.startswith("abort"):
        assert not list(directory.glob("rank*.pt"))


def test_a_checkpoint_is_saved_on_every_rank_before_the_stop(stopped: tuple[Path, str, str]) -> None:
    """checkpoint_then_abort: the trainer's save function, a collective, runs on all ranks; training goes on from it."""
    out, output, _ = stopped
    for rank in range(4):
        saved = torch.load(out / CASES[2].replace(":", "-") / f"rank{rank}.pt")
        assert saved["step"] == 3
        assert all(bool(v.isfinite().all()) for v in saved["model"].values() if isinstance(v, torch.Tensor))
        assert re.search(rf"{CASES[2]}: rank {rank} goes on from its checkpoint, loss [0-9.]+", output)


def test_a_threshold_stops_at_exactly_the_step_that_exceeds_it(tmp_path: Path) -> None:
    """Between two recorded maxima it stops at the later; just above the largest it never stops."""
    _runs.ranks(_runs.worker("slime-gdn-drift", tmp_path / "free", 20), 2)
    series = {c["step"]: c["max_abs"] for c in _runs.events(tmp_path / "free", "check") if c["call"]}
    step = next(s for s in sorted(series) if s > 8 and series[s] > max(v for k, v in series.items() if k < s))
    below = max(v for k, v in series.items() if k < step)
    for limit, stop in (((below + series[step]) / 2, step), (max(series.values()) * 1.001, None)):
        out = tmp_path / f"limit-{stop}"
        env = [{"TPWATCH_ON_FAULT": "abort", "TPWATCH_THRESHOLDS__MAX_ABS": repr(limit)}] * 2
        ended = _runs.ranks(_runs.worker("slime-gdn-drift", out, 20), 2, env=env)
        assert ended.codes == [0, 0]
        aborted = [e["step"] for e in _runs.events(out, "abort")]
        assert aborted == ([] if stop is None else [stop])


def test_a_killed_run_can_be_read(tmp_path: Path) -> None:
    """After kill -9 of every rank there is no summary.json; the event files of all groups give it."""
    command = [sys.executable, *_runs.worker("ple-double-sum", tmp_path, 100_000, "--dp=2")]
    workers = [
        subprocess.Popen(
            command, env={**os.environ, **_runs.rank_environment(rank, 4)}, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(4)
    ]  # fmt: skip
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and len(_runs.events(tmp_path, "check")) < 20:
        time.sleep(0.2)
    for process in workers:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "summary.json").exists()
    found = summarize(tmp_path)
    assert found.verdict == "faults"
    assert {f.ranks for f in found.causes} == {(0, 1, 2, 3)}
    assert {f.parameter for f in found.causes} == set(_runs.faulty("ple-double-sum", _runs.watched(tmp_path)))
    assert run_python("-m", "tpwatch", "check", tmp_path, timeout=60).returncode == 1
