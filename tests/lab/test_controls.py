"""Healthy controls stay bit-clean, and the variants of the finalizer's protocol are what they say."""

from __future__ import annotations

import pytest

from tests.lab.measured import Run, equal, run_probe
from tpwatch.lab import catalog

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(200)]

STEPS = 50
FEWER = 20
ONE_REPLICA = [f"{entry.name}:{STEPS}" for entry in catalog.CONTROLS if entry.config.dp == 1]
TWO_REPLICAS = [f"{entry.name}:{FEWER}" for entry in catalog.CONTROLS if entry.config.dp == 2]
PROTOCOLS = ["finalizer-chunked", "finalizer-skipped", "finalizer-twice"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """All controls, and the variants before them in the same processes."""
    out = tmp_path_factory.mktemp("controls")
    return {
        **run_probe(out, 2, [*PROTOCOLS, *ONE_REPLICA]),
        **run_probe(out, 2, TWO_REPLICAS, dp=2),
    }


@pytest.mark.parametrize("job", [*ONE_REPLICA, *TWO_REPLICAS])
def test_healthy_runs_are_bit_clean(job: str, runs: dict[str, Run]) -> None:
    """Values and reduced gradients of all replicas are bit-identical in every step."""
    rows = list(runs[job].all_rows())
    assert len(rows) >= 5 * min(STEPS, FEWER)
    assert all(equal(row.value) and equal(row.after) for row in rows)


@pytest.mark.parametrize("job", [*ONE_REPLICA, *TWO_REPLICAS])
def test_healthy_runs_learn(job: str, runs: dict[str, Run]) -> None:
    """The lab trains: the loss falls."""
    losses = runs[job].losses
    assert sum(losses[-5:]) < sum(losses[:5])


def test_norms_on_queries_and_keys_are_partial_sums(runs: dict[str, Run]) -> None:
    """Their gradients differ before the reduction, which sums them by name; other norms are copies."""
    rows = runs[f"qk-layernorm:{STEPS}"].rows(1)
    partial = {name for name, row in rows.items() if not equal(row.before)}
    assert partial == {name for name in rows if "q_layernorm" in name or "k_layernorm" in name}
    assert len(partial) == 4


def test_skipped_finalizer_is_never_called(runs: dict[str, Run]) -> None:
    """The steps run, and the reduction over TP is not seen."""
    run = runs["finalizer-skipped"]
    assert len(run.losses) == len(run.steps) > 0
    assert not list(run.all_rows())


def test_second_finalizer_multiplies_what_the_first_has_summed(runs: dict[str, Run]) -> None:
    """In the second call of a step every norm is a copy and comes out times TP."""
    run = runs["finalizer-twice"]
    for calls in run.steps[0].values():
        first, second = calls
        assert first.multiplied() is None
        assert second.multiplied() == pytest.approx(2)
    assert set(catalog.get("finalizer-twice").first_steps(run.steps[0])) == set(run.steps[0])


def test_chunked_reduction_does_the_same_arithmetic(runs: dict[str, Run]) -> None:
    """It really is another function, and the losses are those of the framework's own, bit for bit."""
    chunked, plain = runs["finalizer-chunked"], runs[f"dense-sp:{STEPS}"]
    assert chunked.reduction == "chunked_reduction"
    assert chunked.losses == plain.losses[: len(chunked.losses)]


def test_chunked_reduction_is_taken_back(runs: dict[str, Run]) -> None:
    """A run that comes later in the same processes has the framework's own function again."""
    assert runs[f"dense-sp:{STEPS}"].reduction == "_allreduce_non_tensor_model_parallel_grads"
