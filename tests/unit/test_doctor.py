"""The doctor says what is there, what will be used, and why."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tpwatch.cli import main
from tpwatch.doctor import EXTRAS, Fact, as_text, examine
from tpwatch.fingerprint import choose

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def facts(section: str, env: dict[str, str] | None = None) -> dict[str, Fact]:
    """The facts of one section by name."""
    return {fact.name: fact for fact in examine(env or {}) if fact.section == section}


def test_versions_are_those_that_are_installed() -> None:
    """Torch as its distribution calls itself."""
    assert facts("versions")["torch"].value == importlib.metadata.version("torch")


def test_the_fingerprint_named_is_the_one_that_auto_takes() -> None:
    """With the reason."""
    chosen = choose(torch.device("cpu"))
    named = facts("fingerprints")["cpu: auto"]
    assert (named.value, named.why) == (chosen.name, chosen.reason)


def test_every_fingerprint_is_listed_with_why_or_why_not() -> None:
    """Plain torch runs everywhere."""
    found = facts("fingerprints")
    assert found["cpu: reference"].value == "usable"
    assert all(fact.why for fact in found.values())


def test_a_fingerprint_that_does_not_work_is_told_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernel fails at its first row: the next one is used, and both lines say why."""
    from tpwatch.fingerprint.native import NativeFingerprinter

    failure = RuntimeError("illegal instruction")
    monkeypatch.setattr(NativeFingerprinter, "rows", Mock(side_effect=failure))
    found = facts("fingerprints")
    assert found["cpu: auto"].value == "packed"
    assert "not native: RuntimeError: illegal instruction" in found["cpu: auto"].why
    assert (found["cpu: native"].value, found["cpu: native"].why) == ("no", "RuntimeError: illegal instruction")


def test_a_device_on_which_nothing_works_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that torch knows and cannot use; the other sections stand."""
    monkeypatch.setattr("tpwatch.doctor._devices", lambda: ["cpu", "meta"])
    found = facts("fingerprints")
    assert found["meta: auto"].value == "none"
    assert "not packed: " in found["meta: auto"].why
    assert found["cpu: auto"].value != "none"


@pytest.mark.megatron
def test_an_installed_framework_is_named_with_its_version_and_seams() -> None:
    """The version from the distribution, the range from the support table."""
    found = facts("adapters")
    version = importlib.metadata.version("megatron-core")
    assert found["megatron"].value == f"{version} supported"
    assert "megatron-core" in found["megatron"].why
    assert found["megatron seams"].value == "all present"


def test_a_framework_that_is_not_installed_is_said_to_be_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the range that would be supported."""
    monkeypatch.setattr("tpwatch.adapters.installed", lambda _row: "")
    found = facts("adapters")
    assert found["megatron"].value == "not installed"
    assert "supported" in found["megatron"].why


def test_overrides_from_the_environment_are_listed() -> None:
    """Knobs, reserved names, and names that are neither."""
    env = {"TPWATCH_INTERVAL": "5", "TPWATCH_CONFIG": "a.yaml", "TPWATCH_TYPO": "1", "HOME": "/"}
    found = facts("environment", env)
    assert found["TPWATCH_INTERVAL"].why == "knob interval"
    assert found["TPWATCH_CONFIG"].why == "path of the YAML file"
    assert found["TPWATCH_TYPO"].why == "unknown"
    assert "HOME" not in found


def test_the_kill_switch_is_pointed_out() -> None:
    """Whoever wonders why nothing is watched must see it."""
    assert facts("environment", {"TPWATCH_DISABLED": "1"})["in force"].why == "TPWATCH_DISABLED"
    assert "in force" not in facts("environment", {"TPWATCH_DISABLED": "0"})


def test_the_extras_are_those_of_the_package() -> None:
    """Every optional extra of pyproject.toml, except the one for developers."""
    text = PYPROJECT.read_text()
    section = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    declared = set(re.findall(r"^([a-z-]+) = \[", section, re.MULTILINE)) - {"dev", "megatron"}
    assert set(EXTRAS) == declared


def test_an_extra_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The distributions to install."""
    monkeypatch.setattr("tpwatch.doctor._installed", lambda name: "" if name == "rich" else "1.0")
    found = facts("extras")
    assert found["wandb"].value == "installed"
    assert (found["report"].value, found["report"].why) == ("not installed", "missing: rich")


def test_text_and_json_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """Every name and value in both."""
    assert main(["doctor", "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert all(fact["name"] in text and fact["value"] in text for fact in data)


def test_sections_are_blocks_of_aligned_lines() -> None:
    """A heading, then one line per fact."""
    shown = as_text([Fact("a", "x", "1"), Fact("a", "longer", "2", "why"), Fact("b", "y", "3")])
    assert shown == "a\n  x       1\n  longer  2  why\n\nb\n  y  3"
