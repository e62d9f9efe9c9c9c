"""Whatever a YAML file holds: a configuration, or one `ConfigError` that says what to mend. Nothing else, and soon."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tpwatch.config import Config, env_names, load
from tpwatch.errors import ConfigError

steadily = settings(
    max_examples=120,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)

LONGEST_MESSAGE = 20_000


def loaded(text: bytes) -> Config | ConfigError:
    """What a file comes to; any other error is a failure of the test."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "tpwatch.yaml")
        path.write_bytes(text)
        try:
            return load(file=path)
        except ConfigError as error:
            return error


def check(outcome: Config | ConfigError) -> None:
    """A configuration can be used; an error has all its parts, and a message of bounded length."""
    if isinstance(outcome, Config):
        assert Config(**outcome.to_mapping()) == outcome
        assert len(outcome.digest()) == 16
        json.dumps(outcome.to_mapping())
        return
    assert all(isinstance(part, str) and part for part in (outcome.knob, outcome.rule, outcome.remedy))
    assert hasattr(outcome, "value")
    assert str(outcome).startswith(outcome.knob)
    assert len(str(outcome)) < LONGEST_MESSAGE


# ------------------------------------------------------------------------------------ what is drawn

KNOBS = sorted(env_names().values())
SECTIONS = sorted({knob.split(".")[0] for knob in KNOBS})

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**19), 2**63, 0, 1])
    | st.floats()
    | st.dates()
    | st.binary(max_size=4)
    | st.text(max_size=8)
    | st.sampled_from(["abort", "warn", "wran", "sum", "1e-3", "megatron", "*"])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(scalars.filter(lambda k: k == k), inner, max_size=3),  # noqa: PLR0124 - a NaN is no key
    max_leaves=5,
)


@st.composite
def settings_files(draw: st.DrawFn) -> bytes:
    """Known knobs, some misspelt, with values of any type."""
    chosen: dict[Any, Any] = {}
    for knob in draw(st.lists(st.sampled_from(KNOBS), max_size=4)):
        at = chosen
        *sections, key = knob.split(".")
        for section in sections:
            at = at.setdefault(section, {})
            if not isinstance(at, dict):
                break
        else:
            at[key if draw(st.integers(0, 9)) else key[:-1]] = draw(values)
    if draw(st.integers(0, 4)) == 0:
        chosen[draw(st.sampled_from(SECTIONS))] = draw(values)
    return yaml.safe_dump(chosen, allow_unicode=True).encode("utf-8", "replace")


PIECES = (
    "&a ", "*a", "*b", "[", "]", "{", "}", ": ", ":", "- ", "\n", "\n  ", "? ", "| ", "> ", "'", '"', "~", "#", "%",
    "@", "<<: ", "---\n", "...\n", "\t", "\x00", "\ufeff", "!!int ", "!!float ", "!!bool ", "!!timestamp ", "!!binary ",
    "!!set ", "!!omap ", "!!pairs ", "!!python/object/apply:os.system ", "!x ", "2001-99-99", "2001-01-01t25:00:00Z",
    "0x", "0b2", "1:60:99", "1e999", ".nan", "=", "x", "1", *KNOBS, *SECTIONS,
)  # fmt: skip

fragments = st.lists(st.sampled_from(PIECES), max_size=14).map("".join).map(str.encode)


@steadily
@given(settings_files())
def test_any_values_are_a_configuration_or_an_error(text: bytes) -> None:
    """Wrong types, huge numbers, misspelt keys and keys of any type."""
    check(loaded(text))


@steadily
@given(fragments | st.text(max_size=40).map(str.encode) | st.binary(max_size=40))
def test_any_text_is_a_configuration_or_an_error(text: bytes) -> None:
    """YAML that is broken in every way, and bytes that are none."""
    check(loaded(text))


# ---------------------------------------------------------------------------------- known to be nasty

BOMB = "\n".join(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 10) if i else 'lol'}]" for i in range(12))
"""A few hundred bytes that stand for 10^11 words."""


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        BOMB + "\ninterval: *x11",
        BOMB + "\npolicies: {'*': *x11}",
        BOMB + "\nwatch: {declare: *x11, include: *x11}",
        BOMB + "\nsinks: [*x11]",
        BOMB + "\n? *x11\n: 1",
        "&a [*a]",
        "policies: &a {x: *a}",
        "thresholds: &a {max_abs: *a}",
        "[" * 20_000,
        "{a: " * 5_000,
        "- " * 20_000 + "x",
        "interval: 0x" + "f" * 6_000,
        "0x" + "f" * 6_000 + ": 1",
        "interval: " + "9" * 6_000,
        "patience: 2001-99-99",
        "patience: !!timestamp x",
        "enabled: !!bool x",
        "seed: !!int ''",
        "thresholds: {max_abs: 1" + "0" * 4_000 + "}",
        "x" * 100_000 + ": 1",
    ],
    ids=lambda text: text[-30:].strip(),
)
def test_a_file_made_to_hurt_is_refused_at_once(text: str) -> None:
    """Anchors that multiply, references to themselves, lists without end, numbers of thousands of digits."""
    began = time.monotonic()
    outcome = loaded(text.encode())
    assert isinstance(outcome, ConfigError)
    assert time.monotonic() - began < 5
    assert len(str(outcome)) < LONGEST_MESSAGE + len(text)


def test_what_is_refused_is_named_with_its_place(tmp_path: Path) -> None:
    """Knob, value, rule, remedy, and the file that holds it."""
    path = tmp_path / "tpwatch.yaml"
    path.write_text("thresholds:\n  max_abs: 1" + "0" * 400 + "\n")
    with pytest.raises(ConfigError) as caught:
        load(file=path)
    error = caught.value
    assert (error.knob, error.rule) == ("thresholds.max_abs", "must be a finite number")
    assert str(path) in error.remedy
    assert len(str(error)) < 400
