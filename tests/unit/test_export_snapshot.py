"""From events to numbers: each event moves the metrics that its help text says, and no others."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.unit._samples import finding, plan, step_report
from tpwatch.config import Config
from tpwatch.export import Health
from tpwatch.export.catalog import BUILD_INFO, CHECK_DURATION, FAULTY, METRICS, OTHER
from tpwatch.export.jsonl import RunLog, event_file
from tpwatch.export.sinks import Loss
from tpwatch.export.snapshot import EXEMPLAR_CHARACTERS, Exemplar, Numbers, Sample, Series
from tpwatch.records import KINDS


class Run:
    """A run log whose events are folded into numbers as a sink would."""

    def __init__(self, directory: Path, health: Health | None = None) -> None:
        """Watch two parameters."""
        self.numbers = Numbers("tp-0", health or Health())
        self.log = RunLog(directory, "tp-0", "x", lambda line: self.numbers.fold(json.loads(line)))
        versions = {"tpwatch": "1.2", "torch": "2.13", "python": "3.11", "megatron_core": "0.16.1"}
        facts: dict[str, Any] = {"fingerprint": {"name": "native", "reason": "CPU"}, "versions": versions}
        self.log.start(plan("a", "b"), 0, Config(), stage="1", **facts)

    def check(self, step: int, **changes: Any) -> None:
        """One checked step."""
        self.log.check(step_report(step, **changes))

    def finding(self, **changes: Any) -> None:
        """One finding."""
        self.log.finding(6, finding(**changes))

    def samples(self, name: str) -> dict[tuple[str, ...], Sample]:
        """The samples of a metric by their labels behind the group."""
        found = {f.metric.name: f for f in self.numbers.snapshot()}
        if name not in found:
            return {}
        assert {sample.labels[0] for sample in found[name].samples} == {"tp-0"}
        return {sample.labels[1:]: sample for sample in found[name].samples}

    def value(self, name: str, *labels: str) -> float:
        """The value of one sample."""
        return self.samples(name)[labels].value


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run that has just started."""
    return Run(tmp_path)


def test_a_start_says_what_is_watched(run: Run) -> None:
    """Pipeline stage, versions and size of the group are facts of one series."""
    (facts,) = run.samples("tpwatch_build_info")
    assert facts == ("1", "1.2", "2.13", "megatron_core 0.16.1", "native", "2", Config().digest())
    assert run.value("tpwatch_watched_replicas") == 2
    assert run.value("tpwatch_watching") == 1
    assert run.value("tpwatch_start_timestamp_seconds") > 1e9


def test_a_stage_that_nobody_says_is_empty(tmp_path: Path) -> None:
    """So it is where the framework has none, and in event files from before there was one."""
    numbers = Numbers("tp-0", Health())
    RunLog(tmp_path, "tp-0", "x", lambda line: numbers.fold(json.loads(line))).start(plan("a"), 0, Config())
    (info,) = numbers.samples(BUILD_INFO)
    assert dict(zip(BUILD_INFO.labels, info.labels, strict=True))["stage"] == ""


def test_every_kind_of_fault_is_zero_from_the_start(run: Run) -> None:
    """Nobody has to tell `no fault` from `no data`."""
    active = run.samples("tpwatch_drift_active")
    assert set(active) == {(kind,) for kind in KINDS}
    assert {sample.value for sample in active.values()} == {0.0}


def test_there_is_nothing_to_watch_on_one_rank(tmp_path: Path) -> None:
    """A run in which nothing can be compared is not watching, so that nobody waits for its checks."""
    numbers = Numbers("tp-0", Health())
    log = RunLog(tmp_path, "tp-0", "x", lambda line: numbers.fold(json.loads(line)))
    log.start(plan(), 0, Config())
    values = {f.metric.name: f.samples[0].value for f in numbers.snapshot()}
    assert values["tpwatch_watching"] == 0


def test_checks_are_counted_by_result(run: Run) -> None:
    """Clean until there is a finding; a skipped step is neither."""
    run.check(1)
    run.check(2)
    run.check(3, active=2)
    run.check(4, active=2, skipped=True)
    checks = {labels[0]: sample.value for labels, sample in run.samples("tpwatch_checks_total").items()}
    assert checks == {"clean": 2, "findings": 1, "skipped": 1}
    assert run.value("tpwatch_last_check_step") == 4
    assert run.value("tpwatch_last_check_timestamp_seconds") > 1e9


def test_collectives_and_bytes_add_up(run: Run) -> None:
    """Two checks, of which one gathered."""
    run.check(1, collectives=2, deep_collectives=0, bytes_exchanged=100)
    run.check(2, collectives=2, deep_collectives=4, bytes_exchanged=900)
    assert run.value("tpwatch_collectives_total", "watch") == 4
    assert run.value("tpwatch_collectives_total", "explain") == 4
    assert run.value("tpwatch_exchanged_bytes_total") == 1000


def test_durations_fall_into_buckets_by_phase(run: Run) -> None:
    """Cumulative, the sum exact, and each bucket remembers the step that it saw last."""
    run.check(1, phases={"fingerprint": 0.0001, "exchange": 0.3})
    run.check(2, phases={"fingerprint": 0.004, "exchange": 7.0})
    fingerprint, exchange = (run.samples("tpwatch_check_duration_seconds")[p,] for p in ("fingerprint", "exchange"))
    assert {b.bound: b.count for b in fingerprint.buckets} == {
        bound: 2 if bound >= 0.004 else 1 for bound in (*CHECK_DURATION.buckets, math.inf)
    }
    assert fingerprint.value == pytest.approx(0.0041)
    assert [b.count for b in exchange.buckets][-3:] == [1, 1, 2]
    (last,) = (b.exemplar for b in exchange.buckets if math.isinf(b.bound))
    assert last is not None
    assert (last.labels, last.value) == ({"step": "2"}, 7.0)


def test_a_fault_is_active_from_its_finding_on(run: Run) -> None:
    """Each parameter once, however often its finding is written; since the earliest step."""
    for parameter, first in (("a", 4), ("b", 2), ("a", 4)):
        run.finding(parameter=parameter, first_step=first, kind="drift", point="param")
    assert run.value("tpwatch_drift_active", "drift") == 1
    assert run.value("tpwatch_drift_active", "double-reduce") == 0
    assert run.value("tpwatch_faulty_parameters", "drift", "param") == 2
    assert run.value("tpwatch_findings_total", "drift", "param", "cause") == 2
    assert run.value("tpwatch_first_faulty_step", "drift") == 2


def test_a_fault_that_is_over_is_active_no_more(run: Run) -> None:
    """What holds is what the last check says: an alert resolves when all are healthy again, and may come back."""
    run.finding(parameter="a", kind="drift", point="param")
    run.finding(parameter="b", kind="drift", point="param")
    run.check(6, faults={"drift@param": 2})
    assert run.value("tpwatch_faulty_parameters", "drift", "param") == 2
    run.check(7, faults={"drift@param": 1})
    assert run.value("tpwatch_faulty_parameters", "drift", "param") == 1
    assert run.value("tpwatch_drift_active", "drift") == 1
    run.check(8)
    assert run.value("tpwatch_faulty_parameters", "drift", "param") == 0
    assert run.value("tpwatch_drift_active", "drift") == 0
    run.check(9, faults={"drift@param": 1})
    assert run.value("tpwatch_drift_active", "drift") == 1
    assert run.value("tpwatch_findings_total", "drift", "param", "cause") == 2


@pytest.mark.parametrize("harmless", [{"severity": "info"}, {"role": "consequence", "caused_by": "b"}])
def test_what_is_no_fault_activates_nothing(run: Run, harmless: dict[str, Any]) -> None:
    """Rounding noise and consequences are counted as findings, not as faults."""
    run.finding(kind="drift", **harmless)
    assert run.value("tpwatch_drift_active", "drift") == 0
    assert run.samples("tpwatch_faulty_parameters") == {}
    role = harmless.get("role", "cause")
    assert run.value("tpwatch_findings_total", "drift", "grad_post", role) == 1


def test_a_finding_that_gets_worse_becomes_a_fault(run: Run) -> None:
    """Information first, a warning later: one finding, one fault."""
    for severity in ("info", "warning", "error"):
        run.finding(kind="drift", severity=severity)
    assert run.value("tpwatch_faulty_parameters", "drift", "grad_post") == 1
    assert run.value("tpwatch_findings_total", "drift", "grad_post", "cause") == 1


def test_measures_of_a_kind_keep_their_largest(run: Run) -> None:
    """Over parameters; a number that was not finite is infinite, not zero."""
    run.finding(parameter="a", max_abs=0.5, max_rel=0.1)
    run.finding(parameter="b", max_abs=0.25, max_rel=float("inf"))
    assert run.value("tpwatch_divergence_max_abs", "double-reduce") == 0.5
    assert run.value("tpwatch_divergence_max_rel_ratio", "double-reduce") == math.inf


def test_a_spread_stays_until_it_is_measured_again(run: Run) -> None:
    """Most checks gather nothing, which is no news; copies that are equal again are."""
    run.check(1)
    assert run.value("tpwatch_replica_spread_max_abs") == 0
    run.check(2, differing={"param": 1}, max_abs=0.5, max_rel=0.25)
    run.check(3, differing={"param": 1})
    assert run.value("tpwatch_replica_spread_max_abs") == 0.5
    assert run.value("tpwatch_replica_spread_max_rel_ratio") == 0.25
    assert run.value("tpwatch_differing_replicas", "param") == 1
    run.check(4, differing={"param": 0})
    assert run.value("tpwatch_replica_spread_max_abs") == 0


def test_ratios_are_those_of_the_last_check_that_had_any(run: Run) -> None:
    """A comparison of values alone has none."""
    run.check(1)
    assert run.samples("tpwatch_grad_norm_max_ratio") == {}
    run.check(2, ratio_lo=0.5, ratio_hi=2.0)
    run.check(2, call=0)
    assert run.value("tpwatch_grad_norm_min_ratio") == 0.5
    assert run.value("tpwatch_grad_norm_max_ratio") == 2.0


def test_parameters_without_a_claim_are_counted(run: Run) -> None:
    """Their names are in the event file."""
    run.log.status(3, ["a", "b"], ["b"])
    assert run.value("tpwatch_not_exercised_replicas") == 2
    assert run.value("tpwatch_unverified_replicas") == 1


@pytest.mark.parametrize(("event", "aborts"), [("abort", 1), ("end", 0)])
def test_a_run_that_is_over_is_not_watching(run: Run, event: str, aborts: int) -> None:
    """However it ended; an abort is counted."""
    getattr(run.log, event)(7)
    assert run.value("tpwatch_watching") == 0
    assert run.value("tpwatch_aborts_total") == aborts


def test_losses_of_every_sink_are_exported(tmp_path: Path) -> None:
    """As they stand when asked, not when the last event came."""
    health = Health({"wandb": Loss()})
    run = Run(tmp_path, health)
    health.losses["wandb"].errors = 3
    health.losses["wandb"].dropped = 4
    assert run.value("tpwatch_exporter_errors_total", "wandb") == 3
    assert run.value("tpwatch_exporter_dropped_events_total", "wandb") == 4


def test_an_exemplar_fits_whatever_the_parameter_is_called(run: Run) -> None:
    """At most 128 characters of names and values; the end of the name is what tells parameters apart."""
    long = "decoder.layers." + "deeply_nested." * 20 + "weight"
    run.finding(parameter=long, first_step=123456)
    (sample,) = run.samples("tpwatch_findings_total").values()
    assert sample.exemplar is not None
    labels = sample.exemplar.labels
    assert labels["step"] == "123456"
    assert labels["parameter"].startswith("...")
    assert long.endswith(labels["parameter"].removeprefix("..."))
    assert sum(len(key) + len(value) for key, value in labels.items()) == EXEMPLAR_CHARACTERS


def test_label_sets_are_capped() -> None:
    """Beyond the cap everything is booked under `other`, the group apart, and counted."""
    series = Series(FAULTY, cap=2)
    for kind in ("a", "b", "c", "d", "a"):
        series.add(1.0, "tp-0", kind, "param")
    values = {sample.labels: sample.value for sample in series.samples()}
    assert values == {("tp-0", "a", "param"): 2, ("tp-0", "b", "param"): 1, ("tp-0", OTHER, OTHER): 2}
    assert series.dropped == 2


def test_a_snapshot_does_not_change(run: Run) -> None:
    """A scrape renders what was true at one moment."""
    run.check(1)
    before = run.numbers.snapshot()
    copy = [[(s.labels, s.value) for s in family.samples] for family in before]
    run.check(2)
    run.finding()
    assert [[(s.labels, s.value) for s in family.samples] for family in before] == copy


def test_a_whole_run_moves_every_metric_of_the_catalogue(run: Run, tmp_path: Path) -> None:
    """No row of the table is dead, and a recorded event file gives the same numbers again."""
    run.numbers._health.losses["prometheus"] = Loss()
    run.check(1, phases={"diagnose": 0.1}, ratio_lo=1.0, ratio_hi=1.0)
    run.finding()
    run.log.status(1, [], [])
    assert [family.metric for family in run.numbers.snapshot()] == list(METRICS)
    again = Numbers("tp-0", Health({"prometheus": Loss()}))
    for line in event_file(tmp_path, "tp-0").read_text().splitlines():
        again.fold(json.loads(line))
    assert again.snapshot() == run.numbers.snapshot()


def test_an_event_of_a_kind_that_moves_nothing_is_no_error(run: Run) -> None:
    """Notes are for readers."""
    before = run.numbers.snapshot()
    run.log.note(1, "text")
    assert run.numbers.snapshot() == before


def test_an_observation_on_a_bound_belongs_to_the_bucket_below() -> None:
    """`le` means less or equal."""
    series = Series(CHECK_DURATION)
    series.observe(Exemplar({"step": "1"}, 0.001, 0.0), "tp-0", "exchange")
    (sample,) = series.samples()
    assert next(b.bound for b in sample.buckets if b.count) == 0.001
