"""The schedule is a function of host and number, and every profile has what it is meant to have."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

from tests.chaos._schedule import CI, HOSTS, KINDS, NIGHTLY, STEPS, draw, profile
from tests.commands import REPOSITORY
from tpwatch.config import Config
from tpwatch.records import KINDS as FINDINGS

NIGHT = profile("nightly")


def test_a_number_is_a_scenario() -> None:
    """Drawn in another process, with another hash seed, it is the same to the last field."""
    program = "from tests.chaos._schedule import profile; print(profile('nightly'))"
    env = {"PYTHONPATH": str(REPOSITORY), "PYTHONHASHSEED": "7"}
    drawn = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert drawn.stdout.strip() == str(NIGHT)


def test_other_numbers_are_other_scenarios() -> None:
    """No two of a night are the same but for their number."""
    seen = Counter(str(s).replace(f"number={s.number},", "") for s in NIGHT)
    assert len(seen) > 0.9 * len(NIGHT)


def test_every_kind_occurs_in_the_ordinary_suite() -> None:
    """At least thirty runs, with each kind of event, and at least six on Megatron-core."""
    drawn = profile("")
    assert len(drawn) >= 30
    assert {s.kind for s in drawn} == set(KINDS)
    assert sum(s.host == "megatron" for s in drawn) >= 6


def test_every_point_of_every_kind_occurs_at_night() -> None:
    """At least two hundred runs, in each of which every point of each kind has its turn."""
    assert len(NIGHT) >= 200
    assert {(s.kind, s.point) for s in NIGHT} == {(name, p) for name, kind in KINDS.items() for p in kind.points}


def test_everything_else_is_mixed_at_night() -> None:
    """Both policies, both guards, layouts, ranks, steps, with and without a fault in the model."""
    for host in HOSTS:
        drawn = [s for s in NIGHT if s.host == host]
        assert {(s.config["guard"], s.faulty) for s in drawn} == {
            (guard, faulty) for guard in ("before_update", "deferred") for faulty in (False, True)
        }
        assert {s.config["checkpoint"] for s in drawn} == {"ignore", "warn", "annotate", "refuse"}
        assert {(s.config["patience"], s.config["max_faults"]) for s in drawn} == {(1, 1), (1, 2), (3, 1), (3, 2)}
        assert {s.config["on_fault"] for s in drawn} == {"warn", "abort", "checkpoint_then_abort"}
        assert {s.world for s in drawn} >= {2, 4}
        assert len({(s.rank, s.step) for s in drawn}) > 12


def test_a_scenario_can_be_played() -> None:
    """Rank and step exist, the configuration is one, and a name leads back to it."""
    for scenario in NIGHT:
        assert scenario.rank in range(scenario.world)
        assert 0 <= scenario.step <= STEPS + 1
        assert Config(**scenario.config).patience in (1, 3)
        assert profile(scenario.name) == [scenario]
        assert scenario == draw(scenario.host, scenario.number)


def test_what_strikes_a_leader_strikes_a_rank_that_writes() -> None:
    """The first of a tensor-parallel group."""
    assert all(s.rank in {g[0] for g in s.groups} for s in NIGHT if s.traits.on_leader)


def test_explained_findings_are_kinds_that_exist() -> None:
    """A misspelt kind would excuse nothing, and say so never."""
    assert {finding for kind in KINDS.values() for finding in kind.findings} <= set(FINDINGS)


def test_the_unwatched_twin_trains_the_same() -> None:
    """It keeps layout and fault, and an event only if that changes the training itself."""
    for scenario in NIGHT:
        twin = scenario.unwatched()
        assert (twin.tp, twin.dp, twin.faulty, twin.host) == (
            scenario.tp, scenario.dp, scenario.faulty, scenario.host,
        )  # fmt: skip
        assert (twin.kind == scenario.kind) == (scenario.traits.alters or scenario.kind == "nothing")


def test_profiles_are_of_the_stated_size() -> None:
    """Names of single runs, and the two profiles."""
    assert [s.name for s in profile("plain-17, megatron-3")] == ["plain-17", "megatron-3"]
    assert len(profile("")) == sum(CI.values())
    assert len(NIGHT) == sum(NIGHTLY.values())
