"""Healthy controls stay bit-clean, and the variants of the finalizer's protocol are what they say."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.lab.conftest import CONTROL_STEPS, Runs
from tests.lab.measured import Run, equal
from tpwatch.lab import catalog
from tpwatch.lab.launch import Job, launch

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(200)]

ENTRIES = {entry.name: entry for entry in catalog.CONTROLS}


@pytest.fixture
def control(request: pytest.FixtureRequest, tp2: Runs, tp4: Runs) -> Run:
    """The run of the control that the test names."""
    entry = ENTRIES[request.param]
    job = f"{entry.name}:{CONTROL_STEPS}"
    return tp2[job] if entry.config.dp == 1 else tp4[f"{job}:tp2"]


@pytest.mark.parametrize("control", ENTRIES, indirect=True)
def test_healthy_runs_are_bit_clean(control: Run) -> None:
    """Values and reduced gradients of all replicas are bit-identical in every step."""
    rows = list(control.all_rows())
    assert len(rows) >= 5 * CONTROL_STEPS
    assert all(equal(row.value) and equal(row.after) for row in rows)


@pytest.mark.parametrize("control", ENTRIES, indirect=True)
def test_healthy_runs_learn(control: Run) -> None:
    """The lab trains: the loss falls."""
    assert sum(control.losses[-5:]) < sum(control.losses[:5])


def test_norms_on_queries_and_keys_are_partial_sums(tp2: Runs) -> None:
    """Their gradients differ before the reduction, which sums them by name; other norms are copies."""
    rows = tp2[f"qk-layernorm:{CONTROL_STEPS}"].rows(1)
    partial = {name for name, row in rows.items() if not equal(row.before)}
    assert partial == {name for name in rows if "q_layernorm" in name or "k_layernorm" in name}
    assert len(partial) == 4


def test_skipped_finalizer_is_never_called(tp2: Runs) -> None:
    """The steps run, and the reduction over TP is not seen."""
    run = tp2["finalizer-skipped"]
    assert len(run.losses) == len(run.steps) > 0
    assert not list(run.all_rows())


def test_second_finalizer_multiplies_what_the_first_has_summed(tp2: Runs) -> None:
    """In the second call of a step every norm is a copy and comes out times TP."""
    run = tp2["finalizer-twice"]
    for calls in run.steps[0].values():
        first, second = calls
        assert first.multiplied() is None
        assert second.multiplied() == pytest.approx(2)
    assert set(catalog.get("finalizer-twice").first_steps(run.steps[0])) == set(run.steps[0])


def test_chunked_reduction_does_the_same_arithmetic(tp2: Runs) -> None:
    """It really is another function, and the losses are those of the framework's own, bit for bit."""
    chunked, plain = tp2["finalizer-chunked"], tp2[f"dense-sp:{CONTROL_STEPS}"]
    assert chunked.reduction == "chunked_reduction"
    assert chunked.losses == plain.losses[: len(chunked.losses)]


def test_chunked_reduction_is_taken_back(tp2: Runs) -> None:
    """A run that comes later in the same processes has the framework's own function again."""
    assert tp2[f"dense-sp:{CONTROL_STEPS}"].reduction == "_allreduce_non_tensor_model_parallel_grads"


@pytest.mark.timeout(100)
def test_unwatched_training_repeats_itself_bit_by_bit(tmp_path: Path, tp2: Runs) -> None:
    """The losses are a function of the seed: another set of processes has the same, bit for bit."""
    file = tmp_path / "losses.json"
    job = Job(faults=("lora-unsummed", "dense-sp"), out=tmp_path, steps=3, watch=False, losses=file)
    assert launch(job, subprocess.DEVNULL) == 0
    again = json.loads(file.read_text())["dense-sp"]
    plain = tp2[f"dense-sp:{CONTROL_STEPS}"]
    assert again["losses"] == [loss.hex() for loss in plain.losses[:3]]
    assert len(set(again["weights"])) == 2  # the shards of two ranks
