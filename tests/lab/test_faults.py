"""Every fault of the catalogue has the mechanism that it claims, on exactly the parameters it names."""

from __future__ import annotations

import pytest

from tests.lab.conftest import DRIFT_STEPS, WORLD_1, WORLD_4, Runs, as_reported
from tests.lab.measured import NEAR, Run, equal, same
from tpwatch.lab import catalog

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(200)]

SIGNATURE_STEPS = 3
ENTRIES = {entry.name: entry for entry in catalog.FAULTS if not entry.transformer_engine}
REDUCED = [name for name, entry in ENTRIES.items() if not entry.wedges]
AT_TP4 = [name.removesuffix(":tp4") for name in WORLD_4 if name.removesuffix(":tp4") in ENTRIES]

# kind -> does this row, in a step in which it is exercised, show it?
SHOWS = {
    "drift": lambda row, _tp: row.unreduced() and row.spread() < NEAR,
    "double-reduce": lambda row, tp: row.multiplied() == pytest.approx(tp, rel=1e-6),
    "init-mismatch": lambda row, _tp: not equal(row.value) and row.unreduced(),
    "grad-presence": lambda row, _tp: any(row.presence) and not all(row.presence),
    "missing-reduce": lambda row, _tp: row.unreduced() and row.spread() > NEAR,
}


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


@pytest.mark.parametrize("name", ENTRIES)
def test_exactly_the_named_parameters_show_the_fault(name: str, tp2: Runs) -> None:
    """Measured before and behind the reduction at TP 2, from the first step they are exercised."""
    check_signature(ENTRIES[name], tp2[as_reported(name)])


@pytest.mark.parametrize("name", AT_TP4)
def test_the_fault_is_the_same_at_tp4(name: str, tp4: Runs) -> None:
    """The factor of a double sum is then 4."""
    check_signature(ENTRIES[name], tp4[f"{name}:tp4"])


@pytest.mark.parametrize("name", ENTRIES)
def test_the_fix_makes_all_replicas_bit_identical(name: str, tp2: Runs) -> None:
    """With the upstream fix, no value and no reduced gradient differs between ranks in any step."""
    for row in tp2[f"{name}:fixed"].all_rows():
        assert equal(row.value)
        assert equal(row.after)
        assert row.presence in ([True, True], [False, False])


@pytest.mark.parametrize("name", REDUCED)
def test_other_parameters_are_reduced_properly(name: str, tp2: Runs) -> None:
    """At step 1 the rest of the model is either the same on all ranks or summed to be so."""
    entry, rows = ENTRIES[name], tp2[as_reported(name)].rows(1)
    for row in (row for n, row in rows.items() if n not in entry.first_steps(rows)):
        assert equal(row.value)
        assert equal(row.after) or not entry.config.sequence_parallel


@pytest.mark.parametrize("name", WORLD_1)
def test_the_fixed_gradient_is_the_true_one(name: str, tp2: Runs, alone: Runs) -> None:
    """It agrees with that of a single process, where nothing has to be reduced."""
    for step in (1, 2):
        truth = alone[name].rows(step)
        for parameter, row in tp2[f"{name}:fixed"].rows(step).items():
            assert all(same(gradient, truth[parameter].after[0]) for gradient in row.after)


@pytest.mark.parametrize("name", ["gdn-gamma-double-sum", "ple-double-sum"])
def test_double_sums_are_the_true_gradient_times_tp(name: str, tp2: Runs, alone: Runs) -> None:
    """Before the reduction every rank has the gradient of a single process, behind it TP times that."""
    truth, rows = alone[name].rows(1), tp2[name].rows(1)
    for parameter in ENTRIES[name].first_steps(rows):
        true = truth[parameter].after[0]
        assert all(same(gradient, true) for gradient in rows[parameter].before)
        assert all(same(gradient, 2 * true) for gradient in rows[parameter].after)


def test_drift_grows_like_the_report(tp2: Runs) -> None:
    """Values start equal, differ after few steps, and then by more and in more elements."""
    run = tp2[as_reported("slime-gdn-drift")]
    start, early, late = (run.value_spread(step) for step in (1, 6, DRIFT_STEPS))
    assert start == (0.0, 0)
    assert 0 < 2 * early[0] <= late[0]
    assert 0 < early[1] < late[1]


@pytest.mark.parametrize("size", [2, 4])
def test_masked_prompts_leave_ranks_exactly_zero(size: int, tp2: Runs, tp4: Runs) -> None:
    """Behind the last attention only the last rank, which holds the answer, has a gradient."""
    run = {2: tp2["lora-unsummed"], 4: tp4["lora-unsummed:tp4"]}[size]
    rows = run.rows(SIGNATURE_STEPS)
    partly = {name for name, row in rows.items() if row.before and row.zero_ranks}
    assert partly == ENTRIES["lora-unsummed"].zero_ranked(rows)
    assert all(rows[name].zero_ranks == list(range(size - 1)) for name in partly)


def test_an_unsynced_module_draws_in_what_lies_behind_it(tp2: Runs) -> None:
    """Without sequence parallelism norms behind the module differ at once, though their values agree."""
    rows = tp2["custom-module-unsynced-nosp"].rows(1)
    drawn_in = {n for n, row in rows.items() if equal(row.value) and not equal(row.after)}
    assert "decoder.final_layernorm.weight" in drawn_in
    assert "decoder.layers.0.input_layernorm.weight" not in drawn_in


def test_last_rank_alone_lacks_the_gradient(tp4: Runs) -> None:
    """The one-sided chunk has gradients on all ranks but the last."""
    rows = tp4["one-sided-chunk:tp4"].rows(1)
    assert rows["vision_norm.weight"].presence == [True, True, True, False]
