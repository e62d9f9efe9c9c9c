"""Every fault of the catalogue has the mechanism that it claims, on exactly the parameters it names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.lab.measured import NEAR, Row, Run, equal, run_probe
from tpwatch.lab import catalog

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(200)]

HERE = [entry for entry in catalog.FAULTS if not entry.transformer_engine]
SIGNATURE_STEPS = 3
DRIFT_STEPS = 30
DRIFT = f"slime-gdn-drift:{DRIFT_STEPS}"
RUNS = {entry.name: entry.name for entry in HERE} | {"slime-gdn-drift": DRIFT}
FIXED = {name: f"{name}:fixed" for name in RUNS}
AT_TP4 = ("slime-gdn-drift", "gdn-gamma-double-sum", "ple-double-sum", "lora-unsummed", "one-sided-chunk")
REFERENCED = ("gdn-gamma-double-sum", "custom-module-unsynced", "ple-double-sum", "lora-unsummed")

# kind -> does this row, in a step in which it is exercised, show it?
SHOWS = {
    "drift": lambda row, _tp: row.unreduced() and row.spread() < NEAR,
    "double-reduce": lambda row, tp: row.multiplied() == pytest.approx(tp, rel=1e-6),
    "init-mismatch": lambda row, _tp: not equal(row.value) and row.unreduced(),
    "grad-presence": lambda row, _tp: any(row.presence) and not all(row.presence),
    "missing-reduce": lambda row, _tp: row.unreduced() and row.spread() > NEAR,
}


@pytest.fixture(scope="module")
def tp2(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Every fault, as reported and fixed, at TP 2."""
    jobs = [*RUNS.values(), *FIXED.values()]
    return run_probe(tmp_path_factory.mktemp("tp2"), 2, jobs)


@pytest.fixture(scope="module")
def tp4(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Some faults at TP 4."""
    return run_probe(tmp_path_factory.mktemp("tp4"), 4, list(AT_TP4))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The reference: the same models on one rank, where nothing has to be reduced."""
    return run_probe(tmp_path_factory.mktemp("tp1"), 1, list(REFERENCED))


def check_signature(entry: catalog.Fault, run: Run) -> None:
    """Up to its first step a faulty gradient is zero, then it shows the fault; others never do."""
    shows = SHOWS[str(entry.kind)]
    first_steps = entry.first_steps(run.rows(1))
    assert first_steps, "the catalogue names no parameter of this model"
    for step in range(1, min(SIGNATURE_STEPS, len(run.steps)) + 1):
        shown = {name for name, row in run.rows(step).items() if shows(row, run.tp)}
        others = shown - set(first_steps)
        if entry.name.endswith("-nosp"):  # there the values of the norms drift apart as well
            others = {name for name in others if step == 1}
        assert not others
        assert {name for name, first in first_steps.items() if first <= step} <= shown
        early = [run.rows(step)[name] for name, first in first_steps.items() if first > step]
        assert all(len(row.zero_ranks) == run.tp for row in early)


@pytest.mark.parametrize("name", RUNS)
def test_exactly_the_named_parameters_show_the_fault(name: str, tp2: dict[str, Run]) -> None:
    """Measured before and behind the reduction at TP 2, from the first step they are exercised."""
    check_signature(catalog.get(name), tp2[RUNS[name]])


@pytest.mark.parametrize("name", AT_TP4)
def test_the_fault_is_the_same_at_tp4(name: str, tp4: dict[str, Run]) -> None:
    """The factor of a double sum is then 4, and all ranks but the last are the zero ones."""
    check_signature(catalog.get(name), tp4[name])


@pytest.mark.parametrize("name", RUNS)
def test_the_fix_makes_all_replicas_bit_identical(name: str, tp2: dict[str, Run]) -> None:
    """With the upstream fix, no value and no reduced gradient differs between ranks in any step."""
    for row in tp2[FIXED[name]].all_rows():
        assert equal(row.value)
        assert equal(row.after)
        assert row.presence in ([True, True], [False, False])


@pytest.mark.parametrize("name", RUNS)
def test_other_parameters_are_reduced_properly(name: str, tp2: dict[str, Run]) -> None:
    """At step 1 the rest of the model is either the same on all ranks or summed to be so."""
    entry, run = catalog.get(name), tp2[RUNS[name]]
    others = {n: row for n, row in run.rows(1).items() if n not in entry.first_steps([n])}
    if entry.wedges:
        pytest.skip("stopped before the reduction: there is nothing behind it")
    for row in others.values():
        assert equal(row.value)
        assert equal(row.after) or not entry.config.sequence_parallel


@pytest.mark.parametrize("name", REFERENCED)
def test_the_fixed_gradient_is_the_true_one(name: str, tp2: dict[str, Run], alone: dict[str, Run]) -> None:
    """It agrees with a single process, to which the double sums are too large by the factor TP."""
    entry = catalog.get(name)
    for step in (1, 2):
        truth = alone[name].rows(step)
        for parameter, row in tp2[FIXED[name]].rows(step).items():
            if row.after:
                torch.testing.assert_close(row.after[0], truth[parameter].after[0], rtol=1e-3, atol=2e-6)
    if entry.multiplied_by_tp:
        for parameter in entry.first_steps(alone[name].rows(1)):
            wrong = tp2[name].rows(1)[parameter].after[0]
            torch.testing.assert_close(wrong, 2 * alone[name].rows(1)[parameter].after[0], rtol=1e-3, atol=2e-6)


def test_drift_grows_like_the_report(tp2: dict[str, Run]) -> None:
    """Values start equal, differ after few steps, and then by more and in more elements."""
    run = tp2[DRIFT]
    start, early, late = (run.value_spread(step) for step in (1, 6, DRIFT_STEPS))
    assert start == (0.0, 0)
    assert 0 < 2 * early[0] <= late[0]
    assert 0 < early[1] < late[1]


def test_drifting_gradients_differ_from_the_first_step(tp2: dict[str, Run]) -> None:
    """Every parameter of the replicated block is a cause: none begins to differ later only."""
    run = tp2[DRIFT]
    block = catalog.get("slime-gdn-drift").first_steps(run.rows(1))
    assert all(not equal(run.rows(1)[name].after) for name in block)


@pytest.mark.parametrize("size", ["tp2", "tp4"])
def test_masked_prompts_leave_ranks_exactly_zero(size: str, request: pytest.FixtureRequest) -> None:
    """Behind the last attention only the last rank, which holds the answer, has a gradient."""
    run: Run = request.getfixturevalue(size)["lora-unsummed"]
    entry = catalog.get("lora-unsummed")
    rows, names = run.rows(SIGNATURE_STEPS), entry.first_steps(run.rows(1))
    partly = {n for n in names if 0 < len(rows[n].zero_ranks) < run.tp}
    assert partly == entry.zero_ranked(names)
    assert all(rows[n].zero_ranks == list(range(run.tp - 1)) for n in partly)


def test_an_unsynced_module_draws_in_what_lies_behind_it(tp2: dict[str, Run]) -> None:
    """Without sequence parallelism norms behind the module differ at once, though their values agree."""
    rows = tp2["custom-module-unsynced-nosp"].rows(1)
    drawn_in = {n for n, row in rows.items() if equal(row.value) and not equal(row.after)}
    assert "decoder.final_layernorm.weight" in drawn_in
    assert "decoder.layers.0.input_layernorm.weight" not in drawn_in


def test_last_rank_alone_lacks_the_gradient(tp4: dict[str, Run]) -> None:
    """The one-sided chunk has gradients on all ranks but the last."""
    rows: dict[str, Row] = tp4["one-sided-chunk"].rows(1)
    assert rows["vision_norm.weight"].presence == [True, True, True, False]
