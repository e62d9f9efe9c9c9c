"""P1 inside Transformer Engine's own Python, with only its compiled kernels replaced."""

from __future__ import annotations

import pytest

from tests.lab.measured import Run, equal, run_probe, same
from tpwatch.lab import catalog

pytestmark = [pytest.mark.megatron, pytest.mark.te, pytest.mark.timeout(200)]

REAL = "gdn-gamma-double-sum-te"
RECREATED = "gdn-gamma-double-sum"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The fault as reported and fixed, and its re-creation in the same processes."""
    return run_probe(tmp_path_factory.mktemp("te"), 2, [REAL, f"{REAL}:fixed", RECREATED])


def test_the_gain_is_multiplied_by_tp(runs: dict[str, Run]) -> None:
    """Its gradient is complete on every rank before the reduction sums the copies."""
    rows = runs[REAL].rows(1)
    multiplied = {name for name, row in rows.items() if row.multiplied() == pytest.approx(2)}
    assert multiplied == set(catalog.get(REAL).first_steps(rows))


def test_the_fix_makes_all_replicas_bit_identical(runs: dict[str, Run]) -> None:
    """No value and no reduced gradient differs between ranks, and none is multiplied."""
    for row in runs[f"{REAL}:fixed"].all_rows():
        assert equal(row.value)
        assert equal(row.after)
        assert row.multiplied() in (None, pytest.approx(1))


def test_the_recreation_computes_the_same(runs: dict[str, Run]) -> None:
    """The default demo's stand-in for this module has the same gradients, before and behind."""
    real, recreated = runs[REAL].rows(1), runs[RECREATED].rows(1)
    assert real.keys() == recreated.keys()
    for name, row in real.items():
        assert all(map(same, row.before, recreated[name].before))
        assert all(map(same, row.after, recreated[name].after))
