"""Every error names what is wrong and what to do, carries its data, and can be caught as what it is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit._report_runs import HOSTILE
from tests.unit._samples import finding
from tpwatch import errors
from tpwatch.errors import (
    AdapterUnavailable,
    ConfigError,
    FingerprintUnavailable,
    ReplicaFault,
    RunDirectoryError,
    TpwatchError,
    UnreadableTensor,
)

SAMPLES: dict[str, tuple[TpwatchError, type[Exception], dict[str, Any]]] = {
    "ConfigError": (
        ConfigError("patience", 0, "must be at least 1", "Choose another number."),
        ValueError,
        {"knob": "patience", "value": 0, "rule": "must be at least 1", "remedy": "Choose another number."},
    ),
    "AdapterUnavailable": (
        AdapterUnavailable("megatron", "0.12", ">=0.16", "a.b.c"),
        RuntimeError,
        {"adapter": "megatron", "found": "0.12", "supported": ">=0.16", "missing": "a.b.c"},
    ),
    "FingerprintUnavailable": (
        FingerprintUnavailable("triton", "no GPU"),
        RuntimeError,
        {"name": "triton", "reason": "no GPU"},
    ),
    "UnreadableTensor": (
        UnreadableTensor("float32 (3, 4)", "its storage was freed"),
        RuntimeError,
        {"tensor": "float32 (3, 4)", "reason": "its storage was freed"},
    ),
    "RunDirectoryError": (
        RunDirectoryError("runs/1", "it is empty"),
        RuntimeError,
        {"path": "runs/1", "reason": "it is empty"},
    ),
    "ReplicaFault": (
        ReplicaFault([finding()], 7, {"drift": 2}),
        RuntimeError,
        {"findings": (finding(),), "step": 7, "elsewhere": {"drift": 2}},
    ),
}


def test_every_error_is_tried_below() -> None:
    """A new error needs a sample here."""
    raised = {name for name, e in vars(errors).items() if isinstance(e, type) and issubclass(e, TpwatchError)}
    assert raised - {"TpwatchError"} == set(SAMPLES)


@pytest.mark.parametrize(("error", "builtin", "data"), SAMPLES.values(), ids=SAMPLES)
def test_errors_are_of_two_families(error: TpwatchError, builtin: type[Exception], data: dict[str, Any]) -> None:
    """Of tpwatch's own, and of the built-in that a caller who knows nothing of tpwatch would catch."""
    del data
    assert isinstance(error, TpwatchError)
    assert isinstance(error, builtin)


@pytest.mark.parametrize(("error", "builtin", "data"), SAMPLES.values(), ids=SAMPLES)
def test_errors_carry_their_data(error: TpwatchError, builtin: type[Exception], data: dict[str, Any]) -> None:
    """Nobody has to parse a message."""
    del builtin
    assert {name: getattr(error, name) for name in data} == data


@pytest.mark.parametrize("name", [name for name in SAMPLES if name != "ReplicaFault"])
def test_messages_say_all_they_know(name: str) -> None:
    """What was given, the rule and the remedy stand in one line."""
    error, _, data = SAMPLES[name]
    assert all(str(value) in str(error) for value in data.values())
    assert "\n" not in str(error)


def test_an_adapter_without_a_missing_symbol_does_not_speak_of_one() -> None:
    """Only where one symbol is to blame is it named."""
    assert "symbol" not in str(AdapterUnavailable("megatron", "not installed", ">=0.16"))


def test_a_fault_says_the_first_finding_and_what_to_do() -> None:
    """Step, kind, parameter, advice."""
    text = str(ReplicaFault([finding(advice="Reduce it once.")], 7))
    assert text.startswith(
        "tpwatch stopped the run at step 7: double-reduce of decoder.layers.0.input_layernorm.weight"
    )
    assert text.endswith("Reduce it once.")
    assert "more" not in text


def test_a_fault_counts_the_other_findings() -> None:
    """The first stands for them all."""
    assert "(and 2 more)" in str(ReplicaFault([finding(), finding(), finding()], 7))


def test_a_fault_of_another_group_names_kinds_and_where_to_look() -> None:
    """A rank whose own group is healthy is stopped by what others found."""
    text = str(ReplicaFault([], 7, {"drift": 2, "missing-reduce": 1}))
    assert "2 x drift" in text
    assert "1 x missing-reduce" in text
    assert "run directory" in text


def test_a_fault_copies_what_it_is_given() -> None:
    """What the caller changes later does not change the error."""
    findings, elsewhere = [finding()], {"drift": 1}
    fault = ReplicaFault(findings, 1, elsewhere)
    findings.clear()
    elsewhere.clear()
    assert len(fault.findings) == len(fault.elsewhere) == 1


@pytest.mark.parametrize("name", ["bad\x1b[2J\nrm", *HOSTILE])
def test_names_cannot_repaint_the_terminal_that_shows_an_error(name: str) -> None:
    """Of parameters, kinds, knobs, files and frameworks: the text is one line, the data are as given."""
    fault = ReplicaFault([finding(parameter=name, advice=name)], 7)
    shown = [
        fault, ReplicaFault([], 7, {name: 1}), ConfigError(name, name, name, name), RunDirectoryError(name, name),
        AdapterUnavailable(name, name, name, name), FingerprintUnavailable(name, name), UnreadableTensor(name, name),
    ]  # fmt: skip
    assert all(str(error).isprintable() for error in shown)
    assert fault.findings[0].parameter == name
