"""Every fault of the catalogue on real Megatron-core.

Named, with its parameters and first step, and nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.adapters import _runs
from tpwatch.lab import catalog
from tpwatch.lab.launch import Job

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(400)]

NAMED = tuple(f.name for f in catalog.FAULTS if not f.wedges and not f.transformer_engine)
CONTROLS = tuple(f.name for f in catalog.CONTROLS)
PROTOCOLS = tuple(f.name for f in catalog.PROTOCOLS)
INITIAL = {"init-mismatch"}
"""Kinds whose first step is a label of values: 0, the initial ones."""


class Runs:
    """Trains each set of entries once, when first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._done: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}

    def get(self, names: tuple[str, ...], tp: int, steps: int, *, fixed: bool = False) -> dict[str, dict[str, Any]]:
        """Summaries by entry."""
        key = (names, tp, steps, fixed)
        if key not in self._done:
            self._done[key] = _runs.train(
                Job(faults=names, out=self.out(key), tp=tp, steps=steps, fixed=fixed, timeout=380)
            )
        return self._done[key]

    def out(self, key: tuple[Any, ...]) -> Path:
        """Directory of one set."""
        names, tp, steps, fixed = key
        return self.root / f"{names[0]}-tp{tp}-{steps}{'-fixed' if fixed else ''}"

    def directory(self, names: tuple[str, ...], tp: int, steps: int, name: str) -> Path:
        """Run directory of one entry of an unfixed set."""
        return self.out((names, tp, steps, False)) / name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The runs of this file."""
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", NAMED)
def test_exactly_the_faulty_parameters_are_causes(runs: Runs, name: str, tp: int) -> None:
    """Each fault is named on exactly its parameters, from the first step at which each is exercised."""
    found = runs.get(NAMED, tp, 6)[name]
    fault = catalog.get(name)
    causes = _runs.causes(found)
    expected = _runs.faulty(name, _runs.watched(runs.directory(NAMED, tp, 6, name)))
    assert found["verdict"] == "faults"
    assert {f["kind"] for f in causes.values()} == {fault.kind}
    first = dict.fromkeys(expected, 0) if fault.kind in INITIAL else expected
    assert {n: f["first_step"] for n, f in causes.items()} == first
    assert found["unverified"] == []


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", [n for n in NAMED if catalog.get(n).multiplied_by_tp])
def test_a_double_sum_multiplies_by_the_group_size_while_copies_agree(runs: Runs, name: str, tp: int) -> None:
    """The ratio of norms is N to a thousandth, and no difference between copies could have shown it."""
    for finding in _runs.causes(runs.get(NAMED, tp, 6)[name]).values():
        assert finding["ratio"] == pytest.approx(tp, rel=1e-3)
        assert finding["max_abs"] == 0.0
        assert (finding["observed"], finding["expected"]) == ("sum", "avg|none")


@pytest.mark.parametrize("name", NAMED)
def test_with_the_upstream_fix_fifty_steps_are_clean(runs: Runs, name: str) -> None:
    """The same run with what upstream did about it has no finding of any severity."""
    found = runs.get(NAMED, 2, 50, fixed=True)[name]
    assert (found["verdict"], found["findings"], found["steps_checked"]) == ("clean", [], 50)


@pytest.mark.parametrize("name", CONTROLS)
def test_healthy_runs_of_fifty_steps_are_silent(runs: Runs, name: str) -> None:
    """No finding, nothing left unverified, two collectives a check."""
    found = runs.get(CONTROLS, 2, 50)[name]
    assert (found["verdict"], found["findings"], found["steps_checked"]) == ("clean", [], 50)
    assert found["unverified"] == []
    assert found["overhead"]["collectives_per_check"] == 2


def test_consequences_stand_under_their_cause(runs: Runs) -> None:
    """Norms drawn into a module's divergence are consequences of it, in the same step."""
    found = runs.get(NAMED, 2, 6)["custom-module-unsynced-nosp"]
    causes = _runs.causes(found)
    others = [f for f in found["findings"] if f["role"] == "consequence"]
    assert others
    assert all(f["caused_by"] in causes for f in others)


def test_an_unsynced_module_shows_its_unsummed_gradient(runs: Runs) -> None:
    """The init mismatch carries what was seen of the gradient: partials that nothing reduces."""
    for finding in _runs.causes(runs.get(NAMED, 2, 6)["custom-module-unsynced"]).values():
        assert finding["evidence"]["gradient"] == {"before": "partials", "reduction": "none"}


@pytest.mark.parametrize("tp", [2, 4])
def test_masked_prompts_name_the_ranks_whose_gradient_is_zero(runs: Runs, tp: int) -> None:
    """In the last layer every rank but the last has an exactly zero gradient.

    Those ranks are named.
    """
    causes = _runs.causes(runs.get(NAMED, tp, 6)["lora-unsummed"])
    for name in catalog.get("lora-unsummed").zero_ranked(causes):
        assert causes[name]["evidence"]["zero_ranks"] == list(range(tp - 1))


def test_drift_grows_over_thirty_steps(runs: Runs) -> None:
    """Count of differing values, max abs and max rel are recorded step by step, and grow."""
    runs.get(("slime-gdn-drift", "dense-sp"), 2, 30)
    directory = runs.directory(("slime-gdn-drift", "dense-sp"), 2, 30, "slime-gdn-drift")
    checks = [c for c in _runs.events(directory, "check") if c["call"]]
    early, late = checks[1:6], checks[-6:]
    for measure in ("max_abs", "max_rel"):
        assert min(c[measure] for c in early) > 0
        assert max(c[measure] for c in late) > min(c[measure] for c in early)
    values = [c["differing"]["param"] for c in checks]
    assert values[0] == 0
    assert 0 < values[1] < max(values[-6:])


def test_the_drift_of_p0_is_a_warning_within_six_steps(runs: Runs) -> None:
    """Growth, not size, raises it above information."""
    severities = {f["severity"] for f in _runs.causes(runs.get(NAMED, 2, 6)["slime-gdn-drift"]).values()}
    assert "warning" in severities


def test_a_finalizer_that_never_runs_is_named(runs: Runs) -> None:
    """Every step counts; replicas are compared once in its place.

    No second alarm for what follows.
    """
    found = runs.get(PROTOCOLS, 2, 6)["finalizer-skipped"]
    (finding,) = found["findings"]
    assert (finding["kind"], finding["first_step"], finding["count"]) == ("finalize-skipped", 1, 6)
    assert any("compared once" in note for note in found["notes"])


def test_a_second_call_of_the_finalizer_is_noticed(runs: Runs) -> None:
    """The call is noted, and what it does to sums that are complete is a double-reduce."""
    found = runs.get(PROTOCOLS, 2, 6)["finalizer-twice"]
    assert any("called 2 times" in note for note in found["notes"])
    assert {f["kind"] for f in found["findings"]} == {"double-reduce"}


def test_a_late_chunked_replacement_of_the_finalizer_is_watched(runs: Runs) -> None:
    """One step is lost to the replacement.

    From the next on it is watched, and it is not a fault.
    """
    found = runs.get(PROTOCOLS, 2, 6)["finalizer-chunked"]
    assert (found["verdict"], found["findings"]) == ("clean", [])
    assert found["steps_checked"] == 5


def test_two_data_parallel_groups_merge_into_one_summary(runs: Runs) -> None:
    """DP2xTP2 has two event files; the same fault in both is one finding with all ranks."""
    names = ("ple-double-sum", "lora-unsummed")
    job = Job(faults=names, out=runs.root / "dp2", tp=2, dp=2, steps=6, timeout=380)
    for name, found in _runs.train(job).items():
        causes = _runs.causes(found)
        assert set(causes) == set(_runs.faulty(name, _runs.watched(runs.root / "dp2" / name)))
        assert {tuple(f["ranks"]) for f in causes.values()} == {(0, 1, 2, 3)}
        assert len(list((runs.root / "dp2" / name).glob("events.*.jsonl"))) == 2
