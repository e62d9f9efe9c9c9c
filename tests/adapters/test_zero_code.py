"""An unmodified Megatron-core script under `-m tpwatch.run` and `tpwatch run`: diagnosed as if it had called us."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.adapters import _runs
from tests.commands import run_python

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(180)]

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_plain_megatron.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
QUIET = {"OMP_NUM_THREADS": "1"}


def test_the_script_does_not_know_tpwatch() -> None:
    """What is diagnosed below is a script without a mention of tpwatch."""
    assert "tpwatch" not in SCRIPT.read_text()


@pytest.mark.parametrize("optimizer", [(), ("--distributed-optimizer",)])
def test_an_unmodified_script_is_diagnosed(tmp_path: Path, optimizer: tuple[str, ...]) -> None:
    """The wrongly marked module is named on exactly its parameters, with the ratio of the group size."""
    options = ("--fault=ple", "--steps=6", *optimizer)
    ended = run_python(*TORCHRUN, "-m", "tpwatch.run", "--out", tmp_path, SCRIPT, *options, env=QUIET)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = _runs.summary(tmp_path)
    causes = _runs.causes(found)
    memory = ("key_proj", "value_proj", "norm_key")
    assert set(causes) == {f"decoder.layers.0.memory.{name}.weight" for name in memory}
    assert {f["kind"] for f in causes.values()} == {"double-reduce"}
    assert all(f["ratio"] == pytest.approx(2, rel=1e-3) for f in causes.values())
    assert found["steps_checked"] == 6


def test_a_healthy_script_is_clean_and_trains_the_same_to_the_last_bit(tmp_path: Path) -> None:
    """Exactly the losses of a run without tpwatch."""
    files = [tmp_path / "watched.json", tmp_path / "plain.json"]
    script = (SCRIPT, "--steps=8")
    runner = ("-m", "tpwatch.run", "--out", tmp_path / "run")
    watched = run_python(*TORCHRUN, *runner, *script, f"--losses={files[0]}", env=QUIET)
    plain = run_python(*TORCHRUN, *script, f"--losses={files[1]}", env=QUIET)
    assert (watched.returncode, plain.returncode) == (0, 0), watched.stderr + plain.stderr
    assert _runs.summary(tmp_path / "run")["verdict"] == "clean"
    assert json.loads(files[0].read_text()) == json.loads(files[1].read_text())


def test_a_failing_script_keeps_its_exit_code_and_its_records(tmp_path: Path) -> None:
    """The script's own error decides the exit code; what was recorded until then stays readable."""
    script = Path(__file__).parent / "scripts" / "fail_at_step_four.py"
    command = ("-m", "tpwatch", "run", "--out", tmp_path / "run", "--", sys.executable, *TORCHRUN, script)
    ended = run_python(*command, env=QUIET)
    assert ended.returncode == 1
    assert "the script's own trouble" in ended.stdout + ended.stderr
    steps = [c["step"] for c in _runs.events(tmp_path / "run", "check")]
    assert steps == [1, 2, 3]
