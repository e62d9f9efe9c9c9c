"""What is done about a finding: which policy holds, how loud it is said, what stops a run."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.unit._report_runs import HOSTILE
from tests.unit._samples import finding
from tpwatch.act import action, announce, headline, must_stop, told, wants_checkpoint
from tpwatch.config import Config, Thresholds


def said(caplog: pytest.LogCaptureFixture, config: Config, **changes: Any) -> list[int]:
    """Levels of the lines that announcing one finding writes."""
    with caplog.at_level(logging.DEBUG, logger="tpwatch"):
        announce(finding(**changes), config)
    return [record.levelno for record in caplog.records]


# ------------------------------------------------------------------------------------------- policies


def test_without_a_policy_on_fault_holds() -> None:
    """The general action applies to whatever no pattern names."""
    assert action(finding(), Config(on_fault="log")) == "log"


def test_a_policy_beats_on_fault_only_where_it_matches() -> None:
    """A pattern of another kind leaves the general action in force."""
    config = Config(on_fault="log", policies={"drift:*": "abort"})
    assert action(finding(kind="drift"), config) == "abort"
    assert action(finding(kind="missing-reduce"), config) == "log"


@pytest.mark.parametrize("pattern", ["double-reduce:*", "*:error@*", "*@decoder.*", "double-reduce:error@decoder.*"])
def test_a_pattern_matches_kind_severity_and_parameter(pattern: str) -> None:
    """Each of the three parts of `kind:severity@parameter` can be named alone or together."""
    config = Config(on_fault="log", policies={pattern: "abort"})
    assert action(finding(kind="double-reduce", severity="error", parameter="decoder.w"), config) == "abort"
    assert action(finding(kind="drift", severity="info", parameter="embedding.w"), config) == "log"


def test_the_last_matching_policy_wins() -> None:
    """Of two patterns that match, the later one holds, whichever is the narrower."""
    narrow_last = Config(policies={"*": "abort", "drift:*": "ignore"})
    narrow_first = Config(policies={"drift:*": "ignore", "*": "abort"})
    assert action(finding(kind="drift"), narrow_last) == "ignore"
    assert action(finding(kind="drift"), narrow_first) == "abort"


# --------------------------------------------------------------------------------------------- levels


@pytest.mark.parametrize(
    ("severity", "level"), [("info", logging.INFO), ("warning", logging.WARNING), ("error", logging.ERROR)]
)
def test_warn_speaks_at_the_level_of_the_severity(caplog: pytest.LogCaptureFixture, severity: str, level: int) -> None:
    """With `warn`, the log level is the finding's severity."""
    assert said(caplog, Config(on_fault="warn"), severity=severity) == [level]


def test_log_speaks_at_info_however_severe(caplog: pytest.LogCaptureFixture) -> None:
    """With `log`, an error is an information line."""
    assert said(caplog, Config(on_fault="log"), severity="error") == [logging.INFO]


def test_ignore_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """With `ignore`, a finding is recorded elsewhere but not logged."""
    assert said(caplog, Config(on_fault="ignore")) == []


def test_callback_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """With `callback`, a finding is for the listeners, not for the log."""
    assert said(caplog, Config(on_fault="callback")) == []


def test_a_policy_can_call_back_for_one_kind_and_log_another(caplog: pytest.LogCaptureFixture) -> None:
    """Only what the pattern names goes to the listeners alone."""
    config = Config(on_fault="warn", policies={"drift:*": "callback"})
    assert said(caplog, config, kind="drift") == []
    assert said(caplog, config, kind="missing-reduce") == [logging.ERROR]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_cannot_repaint_the_terminal(caplog: pytest.LogCaptureFixture, name: str) -> None:
    """Whatever of a finding is from the model, the line that announces it is one line of text."""
    said(caplog, Config(), parameter=name, observed=name, expected=name, advice=name)
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().isprintable()


def test_a_consequence_is_never_louder_than_information(caplog: pytest.LogCaptureFixture) -> None:
    """What merely follows from another fault does not raise an alarm of its own."""
    assert said(caplog, Config(on_fault="warn"), role="consequence", caused_by="a") == [logging.INFO]


def test_the_headline_names_what_where_since_when_and_what_to_do() -> None:
    """One line is enough to act on: code, kind, parameter, first step, ratio, ranks, advice."""
    line = headline(finding(first_step=7, ratio=2.0, odd_ranks=(1,)))
    wanted = ("TPW104", "double-reduce", "decoder.layers.0.input_layernorm.weight", "step 7", "ratio 2", "Reduce it")
    assert all(text in line for text in wanted)
    assert "odd ranks [1]" in line
    assert "\n" not in line


def test_the_headline_gives_the_spread_where_there_is_no_ratio() -> None:
    """A fault of values is measured by its largest difference."""
    line = headline(finding(kind="drift", ratio=None, max_abs=0.25))
    assert "max abs 0.25" in line
    assert "ratio" not in line
    assert "odd ranks" not in line


def test_the_headline_states_no_measure_that_was_not_taken() -> None:
    """Of a gradient that is missing there is neither a ratio nor a spread."""
    assert "(observed sum, expected" in headline(finding(ratio=None, max_abs=0.0))


# ------------------------------------------------------------------------------------------- listeners


@pytest.mark.parametrize(
    ("on_fault", "heard"),
    [
        ("ignore", False),
        ("log", True),
        ("warn", True),
        ("callback", True),
        ("abort", True),
        ("checkpoint_then_abort", True),
    ],
)
def test_listeners_hear_of_all_that_is_not_ignored(on_fault: Any, heard: bool) -> None:  # noqa: FBT001 - a parametrised value
    """Whatever else is done about it; consequences and information too."""
    found = (finding(), finding(role="consequence", severity="info"))
    assert told(found, Config(on_fault=on_fault)) == (found if heard else ())


def test_listeners_hear_in_the_order_given() -> None:
    """Without the one that a policy ignores."""
    first, ignored, last = finding(parameter="b"), finding(kind="drift"), finding(parameter="a")
    assert told([first, ignored, last], Config(policies={"drift:*": "ignore"})) == (first, last)


# ------------------------------------------------------------------------------------------- stopping


@pytest.mark.parametrize(
    ("on_fault", "stops"),
    [
        ("ignore", False),
        ("log", False),
        ("warn", False),
        ("callback", False),
        ("abort", True),
        ("checkpoint_then_abort", True),
    ],
)
def test_only_the_stopping_actions_stop(on_fault: Any, stops: bool) -> None:  # noqa: FBT001 - a parametrised value
    """A confirmed error stops a run if and only if its action says so."""
    assert bool(must_stop([finding()], Config(on_fault=on_fault))) is stops


@pytest.mark.parametrize(
    ("severity", "role", "stops"),
    [
        ("warning", "cause", True),
        ("error", "cause", True),
        ("info", "cause", False),
        ("error", "consequence", False),
    ],
)
def test_only_what_counts_as_a_fault_stops(severity: str, role: str, stops: bool) -> None:  # noqa: FBT001 - as above
    """Information and consequences never stop a run."""
    assert bool(must_stop([finding(severity=severity, role=role)], Config(on_fault="abort"))) is stops


def test_those_that_stop_come_in_the_order_given() -> None:
    """The first one named is the first one found; others are left out."""
    first, other, second = finding(parameter="b"), finding(severity="info"), finding(parameter="a")
    assert must_stop([first, other, second], Config(on_fault="abort")) == (first, second)


@pytest.mark.parametrize("limits", [{"max_abs": 0.1}, {"max_rel": 0.1}])
def test_drift_stops_only_past_a_threshold_that_is_set(limits: dict[str, float]) -> None:
    """Drift below the user's limit is what they said they can live with."""
    config = Config(on_fault="abort", thresholds=Thresholds(**limits))
    below = finding(kind="drift")
    past = finding(kind="drift", evidence={"threshold": "max_abs 0.2 > 0.1"})
    assert must_stop([below, past], config) == (past,)


def test_drift_stops_without_any_threshold() -> None:
    """Where no limit on values is set, growing drift is as good a reason as another."""
    drift = finding(kind="drift", severity="warning")
    assert must_stop([drift], Config(on_fault="abort")) == (drift,)


def test_a_threshold_on_the_ratio_does_not_excuse_drift() -> None:
    """The limit on norms says nothing about how far values may move apart."""
    drift = finding(kind="drift", severity="warning")
    config = Config(on_fault="abort", thresholds=Thresholds(ratio=1.5))
    assert must_stop([drift], config) == (drift,)


def test_a_threshold_on_values_does_not_excuse_other_faults() -> None:
    """A missing reduction stops the run below the limit on spread, too."""
    fault = finding(kind="missing-reduce")
    config = Config(on_fault="abort", thresholds=Thresholds(max_abs=0.1))
    assert must_stop([fault], config) == (fault,)


def test_a_checkpoint_is_wanted_if_any_finding_asks_for_one() -> None:
    """One policy with a checkpoint among several that only abort is enough."""
    config = Config(on_fault="abort", policies={"drift:*": "checkpoint_then_abort"})
    assert wants_checkpoint([finding(), finding(kind="drift")], config)
    assert not wants_checkpoint([finding()], config)
    assert not wants_checkpoint([], config)
