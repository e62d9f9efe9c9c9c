"""Where settings come from: code over command line over environment over file over defaults.

Reads YAML and a mapping of environment variables that the caller passes in. Knows no knob by name
except `out`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from tpwatch._guard import shield
from tpwatch.config.fields import build, convert, hints, is_section, knobs, unknown
from tpwatch.config.knobs import Config
from tpwatch.errors import ConfigError

ENV_PREFIX = "TPWATCH_"
"""`TPWATCH_<KEY>` sets a knob; `__` stands for the dot: `TPWATCH_THRESHOLDS__MAX_ABS`."""

RESERVED_ENV: Mapping[str, str] = {
    "TPWATCH_CONFIG": "path of the YAML file",
    "TPWATCH_DISABLED": "kill switch: 1 wins over everything else",
    "TPWATCH_DEBUG": "1 lets internal errors propagate, with their traceback",
    "TPWATCH_LAUNCH_ID": "set by `tpwatch run`: which launch this process belongs to",
}
"""Names under the prefix that are not knobs."""

TEST_PREFIX = "TPWATCH_TEST_"
"""Names that begin so belong to the test suite."""

BOOLS = {
    "1": True, "true": True, "yes": True, "on": True,
    "0": False, "false": False, "no": False, "off": False, "": False,
}  # fmt: skip
"""What a truth value may be called in the environment."""


def load(
    code: Config | Mapping[str, Any] | None = None,
    cli: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    file: str | os.PathLike[str] | None = None,
) -> Config:
    """Combine the sources, the first of which wins: `code`, `cli`, `env`, `file`, defaults.

    A `Config` given in code is complete: only `out`, where None means "not chosen", is filled from
    the others. A None in `cli` is an option that was not given. `file` may also come from
    TPWATCH_CONFIG. TPWATCH_DISABLED=1 wins over everything, mistakes in the other sources included.

    Raises:
        ConfigError: a key, value, environment name or file is wrong; the message names its source.
    """
    env = env or {}
    if disabled(env):
        return Config(enabled=False)
    merged: dict[str, Any] = {}
    for source, values in _layers(code, cli, env, file or env.get("TPWATCH_CONFIG")):
        try:
            build(Config, values)
        except ConfigError as error:
            remedy = f"{error.remedy} (Given in {source}.)"
            raise ConfigError(error.knob, error.value, error.rule, remedy) from None
        _merge(merged, values)
    return build(Config, merged)


def disabled(env: Mapping[str, str]) -> bool:
    """Whether the kill switch is on."""
    name = "TPWATCH_DISABLED"
    return bool(convert(name, bool, from_text(bool, env.get(name, ""))))


def env_names() -> dict[str, str]:
    """Environment variable to dotted knob, for every knob."""
    return {ENV_PREFIX + knob.upper().replace(".", "__"): knob for knob in knobs(Config)}


def from_text(hint: object, text: str) -> object:
    """Read an environment value; what does not fit `hint` stays text, for `convert` to refuse.

    `none` where a knob may be unset; `a,b` for a list; `PATTERN=RULE,...` for a mapping.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        inner = next(a for a in args if a is not type(None))
        return None if text.lower() in ("", "none", "null") else from_text(inner, text)
    if origin is Annotated:
        return from_text(args[0], text)
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if origin is tuple:
        return parts
    if origin is Mapping:
        return {pattern: rule for pattern, _, rule in (part.rpartition("=") for part in parts)}
    if hint is bool:
        return BOOLS.get(text.lower(), text)
    is_integer = hint is int and text.strip().lstrip("+-").isdecimal()
    return int(text) if is_integer else text


# ------------------------------------------------------------------------------------ sources


def _layers(
    code: Config | Mapping[str, Any] | None,
    cli: Mapping[str, Any] | None,
    env: Mapping[str, str],
    file: str | os.PathLike[str] | None,
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Sources in rising precedence, each with its name for error messages."""
    if file:
        yield f"file {os.fspath(file)}", _read_file(Path(file))
    yield "the environment", _read_env(env)
    yield "the command line", {k: v for k, v in (cli or {}).items() if v is not None}
    if isinstance(code, Config):
        code = {k: v for k, v in code.to_mapping().items() if (k, v) != ("out", None)}
    yield "code", code or {}


def _read_file(path: Path) -> Mapping[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping."""
    import yaml  # a third of the time that `import tpwatch` would take

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        rule = f"cannot be read: {error}"
        raise _bad_file(path, rule, "Give the path of a YAML file.") from None
    # Of a bad date, tag or depth PyYAML lets out whatever it came upon, not only errors of its own.
    valid, values = shield(yaml.safe_load, text)
    if not valid:
        rule = f"is not valid YAML: {' '.join(str(values).split()) or type(values).__name__}"
        raise _bad_file(path, rule, "Mend the line that is named.")
    if values is not None and not isinstance(values, Mapping):
        rule = "must hold a mapping of keys to values"
        raise _bad_file(path, rule, "Write lines of the form `key: value`.")
    return values or {}


def _bad_file(path: Path, rule: str, remedy: str) -> ConfigError:
    return ConfigError("config", str(path), rule, remedy)


def _read_env(env: Mapping[str, str]) -> Mapping[str, Any]:
    """Knobs set by `TPWATCH_*`; another such name is an error: a typo would change nothing."""
    names, types = env_names(), knobs(Config)
    found: dict[str, Any] = {}
    for name in sorted(n for n in env if n.startswith(ENV_PREFIX)):
        if name in names:
            *section, key = names[name].split(".")
            target = found.setdefault(section[0], {}) if section else found
            target[key] = from_text(types[names[name]], env[name])
        elif name not in RESERVED_ENV and not name.startswith(TEST_PREFIX):
            raise unknown(name, env[name], "unknown environment variable", [*names, *RESERVED_ENV])
    return found


def _merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Lay `values` over `into`: sections knob by knob, everything else as a whole."""
    sections = {name for name, hint in hints(Config).items() if is_section(hint)}
    for key, value in values.items():
        if key not in sections:
            into[key] = value
        elif value is not None:
            given = value if isinstance(value, Mapping) else asdict(value)
            into[key] = {**into.get(key, {}), **given}
