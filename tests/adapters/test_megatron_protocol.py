"""What a training loop on real Megatron-core may do between two steps: followed, said, or named, and never invented.

How the finalizer is called (not at all, twice, replaced late) is in `test_megatron_faults`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.adapters import _runs
from tpwatch.report.events import read_events

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(240)]

SCRIPT = str(Path(__file__).parent / "scripts" / "protocols.py")
GAIN = "decoder.layers.1.pre_mlp_layernorm.weight"
NORMS = {
    "decoder.final_layernorm.weight",
    *(f"decoder.layers.{i}.{name}.weight" for i in (0, 1) for name in ("input_layernorm", "pre_mlp_layernorm")),
}


class Scenario:
    """What one scenario of the script left behind."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.facts: list[dict[str, Any]] = [
            json.loads((directory / f"facts.{rank}.json").read_text()) for rank in (0, 1)
        ]

    @property
    def summary(self) -> dict[str, Any]:
        """`summary.json`."""
        return _runs.summary(self.directory)

    @property
    def causes(self) -> dict[str, dict[str, Any]]:
        """Findings that are causes, by parameter."""
        return _runs.causes(self.summary)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Events of one kind; lines that are no events are left out."""
        return [dict(event) for _, event in read_events(self.directory).of(kind)]

    @property
    def watched(self) -> list[str]:
        """Names of the replicas."""
        return [name for event in self.events("start") for name in event["names"]]

    @property
    def checks(self) -> list[tuple[int, int]]:
        """Step and call of every check; call 0 is the comparison of values at the end."""
        return [(event["step"], event["call"]) for event in self.events("check")]

    def is_clean(self) -> bool:
        """No finding of any severity, and nothing left open."""
        found = self.summary
        open_ends = found["findings"] + found["unverified"] + found["not_exercised"]
        return found["verdict"] == "clean" and not open_ends


def steps(*which: int) -> list[tuple[int, int]]:
    """One check in each of these steps, and the last comparison of values."""
    return [*((step, 1) for step in which), (which[-1], 0)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All scenarios, played once by two ranks."""
    out = tmp_path_factory.mktemp("protocols")
    ended = _runs.ranks([SCRIPT, str(out)], 2, timeout=150)
    assert ended.codes == [0, 0], ended.output[-2500:]
    return out


@pytest.fixture
def played(root: Path, request: pytest.FixtureRequest) -> Scenario:
    """The scenario that the test names."""
    return Scenario(root / request.param)


scenario = pytest.mark.parametrize


@scenario("played", ["evaluation"], indirect=True)
def test_evaluation_in_between_is_no_step(played: Scenario) -> None:
    """Forward passes without gradients are neither checked nor counted, and the finalizer is not missed."""
    assert played.is_clean()
    assert all(loss > 0 for loss in played.facts[0]["losses"])
    assert played.checks == steps(1, 2, 3, 4, 5, 6)
    assert played.summary["notes"] == []
    assert {check["collectives"] for check in played.events("check") if check["call"]} == {2}


@scenario("played", ["accumulation", "no-sync"], indirect=True)
def test_accumulated_microbatches_are_one_step(played: Scenario) -> None:
    """Three microbatches are checked once, where they are reduced; also where the schedule holds reductions back."""
    assert played.is_clean()
    assert played.checks == steps(1, 2, 3, 4, 5, 6)
    assert played.summary["notes"] == []


@scenario("played", ["no-sync"], indirect=True)
def test_the_schedule_really_holds_reductions_back(played: Scenario) -> None:
    """What the test above is about takes place: `no_sync` is entered in every step."""
    assert played.facts[0]["no_sync"] >= 6


@scenario("played", ["accumulated-fault"], indirect=True)
def test_a_fault_is_named_under_accumulation(played: Scenario) -> None:
    """The same parameters, steps and factor as with one microbatch."""
    expected = _runs.faulty("ple-double-sum", played.watched)
    assert {name: f["first_step"] for name, f in played.causes.items()} == expected
    assert all(f["ratio"] == pytest.approx(2, rel=1e-3) for f in played.causes.values())


@scenario("played", ["frozen-alike"], indirect=True)
def test_freezing_and_thawing_on_all_ranks_is_no_fault(played: Scenario) -> None:
    """Frozen it is not exercised, thawed it is, and frozen again it stays what was seen."""
    assert played.is_clean()
    assert played.checks == steps(*range(1, 10))
    said = {event["step"]: event["not_exercised"] for event in played.events("status")}
    assert all((GAIN in names) == (step < 4) for step, names in said.items())
    assert min(said) < 4 <= max(said)


@scenario("played", ["frozen-on-one"], indirect=True)
def test_freezing_on_one_rank_is_named_in_that_step(played: Scenario) -> None:
    """Both ranks are stopped at step 4, before the framework's reduction can hang on it."""
    assert [facts["stopped"] for facts in played.facts] == [4, 4]
    (found,) = [event["finding"] for event in played.events("finding")][:1]
    assert (found["kind"], found["parameter"], found["first_step"]) == ("grad-presence", GAIN, 4)
    assert found["evidence"]["absent_ranks"] == [1]


@scenario("played", ["moved"], indirect=True)
def test_a_moved_parameter_is_no_fault(played: Scenario) -> None:
    """Another storage with the same values, on every rank."""
    assert all(facts["moved"] for facts in played.facts)
    assert played.is_clean()
    assert played.summary["notes"] == []


@scenario("played", ["moved-and-written"], indirect=True)
def test_a_moved_parameter_is_followed(played: Scenario) -> None:
    """What one rank writes into the new storage after step 5 is seen; the old one would be equal for ever."""
    assert {name: (f["kind"], f["first_step"]) for name, f in played.causes.items()} == {GAIN: ("external-write", 5)}


@scenario("played", ["added"], indirect=True)
def test_added_parameters_are_said_once_and_left_alone(played: Scenario) -> None:
    """One note in the step after they came; the watch goes on with what it knows."""
    assert played.is_clean()
    assert played.checks == steps(1, 2, 3, 4, 5, 6)
    (note,) = played.events("note")
    assert note["step"] == 4
    assert "added after attach and not watched" in note["text"]
    names = ("decoder.layers.0.extra", "decoder.layers.1.adapter.weight", "decoder.layers.1.adapter.bias")
    assert all(name in note["text"] for name in names)
    assert set(played.watched) >= NORMS
    assert not set(played.watched) & set(names)


@scenario("played", ["replaced"], indirect=True)
def test_a_replaced_parameter_is_said_once(played: Scenario) -> None:
    """The tensor that is watched is no longer the model's; that must not pass in silence."""
    assert played.summary["findings"] == []
    (note,) = played.events("note")
    assert (note["step"], "replaced after attach" in note["text"], GAIN in note["text"]) == (4, True, True)


@scenario("played", ["stepped-outside"], indirect=True)
def test_a_step_of_the_optimizer_outside_the_loop_is_named(played: Scenario) -> None:
    """It is a step without the finalizer: dated to the first one, counted, and nothing else is said."""
    (found,) = played.summary["findings"]
    assert (found["kind"], found["first_step"], found["last_step"], found["count"]) == ("finalize-skipped", 4, 7, 2)
    assert played.checks == steps(1, 2, 3, 5, 6, 8)


@scenario("played", ["loaded-alike"], indirect=True)
def test_a_checkpoint_that_all_ranks_load_is_no_fault(played: Scenario) -> None:
    """Values jump back, on every rank alike."""
    assert played.is_clean()
    assert played.checks == steps(*range(1, 9))


@scenario("played", ["loaded-apart"], indirect=True)
def test_a_checkpoint_that_one_rank_loads_is_a_write_of_that_step(played: Scenario) -> None:
    """Every replica is named, since the update after which its values were first seen to differ."""
    found = {name: (f["kind"], f["first_step"]) for name, f in played.causes.items()}
    assert found == dict.fromkeys(NORMS, ("external-write", 4))


@scenario("played", ["overflow"], indirect=True)
def test_a_skipped_update_is_no_fault_and_no_check(played: Scenario) -> None:
    """The optimizer finds an inf in step 3 and does not step; the loop goes on."""
    assert not any(facts["updated"] for facts in played.facts)
    assert played.is_clean()
    skipped = {check["step"]: check["skipped"] for check in played.events("check") if check["call"]}
    assert skipped == {step: step == 3 for step in range(1, 7)}
    assert played.summary["steps_checked"] == 5


@scenario("played", ["overflow-in-a-fault"], indirect=True)
def test_a_skipped_update_does_not_break_patience(played: Scenario) -> None:
    """Two bad steps, one without a verdict, one bad step: confirmed, since the first."""
    name = "decoder.layers.0.per_layer_embedding.key_proj.weight"
    found = played.causes[name]
    assert (found["kind"], found["first_step"]) == ("double-reduce", 1)
    said = [event for event in played.events("finding") if event["finding"]["parameter"] == name]
    assert said[0]["step"] == 4


@scenario("played", ["full-disk"], indirect=True)
def test_a_full_disk_costs_checks_and_neither_the_run_nor_its_findings(played: Scenario) -> None:
    """Nothing can be written from step 2 to 5; the fault that is confirmed at step 3 is written down for that step."""
    assert set(played.causes) == set(_runs.faulty("ple-double-sum", played.watched))
    assert 3 in {event["step"] for event in played.events("finding")}
    assert any("events could not be written" in note for note in played.summary["notes"])
    seen = {step for step, _ in played.checks}
    assert {1, 6, 7, 8} <= seen
    assert not seen >= {2, 3, 4, 5}


def test_a_captured_finalizer_is_said_not_to_be_watched(root: Path) -> None:
    """Two steps are checked; then a note, and no word about a finalizer that seems not to run."""
    found = Scenario(root / "captured")
    assert found.checks == [(1, 1), (2, 1)]
    assert [e["text"] for e in found.events("note") if e["text"].startswith("not watched: CUDA graph")] != []
    assert found.summary["findings"] == []
