"""Two pipeline stages of two tensor-parallel ranks: Megatron's own pipeline schedule, watched stage by stage."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tpwatch.errors import ConfigError
from tpwatch.lab.config import LabConfig
from tpwatch.lab.launch import Job, launch
from tpwatch.report.events import read_events

STEPS = 8
NORMS = ("input_layernorm", "pre_mlp_layernorm")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A healthy run of PP2xTP2."""
    out = tmp_path_factory.mktemp("pipeline")
    job = Job(faults=("dense-sp",), out=out, tp=2, dp=1, pp=2, steps=STEPS, losses=out / "losses.json", timeout=200)
    assert launch(job, subprocess.DEVNULL) == 0
    return out


def outcome(run: Path) -> dict[str, Any]:
    """Losses of rank 0, and hashes of the weights of every rank."""
    found: dict[str, Any] = json.loads((run / "losses.json").read_text())["dense-sp"]
    return found


@pytest.mark.megatron
@pytest.mark.timeout(240)
def test_a_pipeline_learns(run: Path) -> None:
    """The first stage hears the loss of the last, and it falls."""
    losses = [float.fromhex(loss) for loss in outcome(run)["losses"]]
    assert len(losses) == STEPS
    assert sum(losses[-3:]) < sum(losses[:3])


@pytest.mark.megatron
@pytest.mark.timeout(240)
def test_every_rank_has_a_part_of_its_own(run: Path) -> None:
    """Two shards of two stages: no two ranks hold the same weights."""
    assert len(set(outcome(run)["weights"])) == 4


@pytest.mark.megatron
@pytest.mark.timeout(240)
def test_each_stage_is_a_replica_group_with_global_layer_names(run: Path) -> None:
    """Two layers a stage: the second stage begins with layer 2, and only the last has the final norm."""
    starts = dict(read_events(run).of("start"))
    layers = {"tp-0": (0, 1), "tp-2": (2, 3)}
    expected = {g: {f"decoder.layers.{i}.{norm}.weight" for i in at for norm in NORMS} for g, at in layers.items()}
    expected["tp-2"].add("decoder.final_layernorm.weight")
    assert {group: set(start["names"]) for group, start in starts.items()} == expected


@pytest.mark.megatron
@pytest.mark.timeout(240)
def test_each_group_says_its_stage(run: Path) -> None:
    """As Megatron-core numbers them."""
    assert {group: start["stage"] for group, start in read_events(run).of("start")} == {"tp-0": "0", "tp-2": "1"}


@pytest.mark.megatron
@pytest.mark.timeout(240)
def test_a_healthy_pipeline_is_clean(run: Path) -> None:
    """No finding of any severity in either stage, and every step checked."""
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["verdict"], summary["findings"], summary["steps_checked"]) == ("clean", [], STEPS)
    assert (summary["unverified"], summary["notes"]) == ([], [])


def test_stages_have_equally_many_layers() -> None:
    """Three layers in two stages is an error that names the knob."""
    with pytest.raises(ConfigError, match=r"lab.layers = 3: must be a multiple of the pipeline-parallel size 2"):
        LabConfig(pp=2, layers=3)
