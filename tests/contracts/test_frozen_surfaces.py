"""What users write down in scripts, files and alerts changes only on purpose: edit the sets here.

An entry may be added; renaming or removing one breaks somebody's run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import get_args, get_type_hints

from tpwatch.cli import build_parser
from tpwatch.config import RESERVED_ENV, Action, Config
from tpwatch.diagnose.rules import RULES

# verb -> its arguments: flags, and positional arguments in capitals
COMMANDS: dict[str, set[str]] = {
    "": {"--version"},
    "check": {"DIRECTORY", "--allow-incomplete-ranks", "--fail-on", "--format"},
    "config": set(),
    "config schema": set(),
    "config show": {"--config", "--format"},
    "config validate": {"FILES"},
    "demo": {"--dp", "--fault", "--fixed", "--list", "--out", "--steps", "--tp"},
    "doctor": {"--format"},
    "explain": {"NAME", "--format"},
    "report": {"DIRECTORY", "--format", "--html", "--output"},
    "rules": {"--format"},
    "run": {"COMMAND", "--config", "--out"},
    "wandb": set(),
    "wandb workspace": {"--dry-run", "--entity", "--project"},
    "watch": {"DIRECTORY", "--interval"},
}

CONFIG_KEYS = {
    "adapter",
    "checkpoint",
    "deep_interval",
    "enabled",
    "explain.exact_elements",
    "explain.gather_bytes",
    "explain.gather_checks",
    "fingerprint",
    "guard",
    "handshake_timeout",
    "interval",
    "job_wide",
    "max_errors",
    "max_faults",
    "max_overhead",
    "on_fault",
    "otel.enabled",
    "otel.endpoint",
    "otel.interval",
    "out",
    "patience",
    "policies",
    "prometheus.address",
    "prometheus.enabled",
    "prometheus.file_sd",
    "prometheus.http",
    "prometheus.port",
    "prometheus.ports",
    "prometheus.push_gateway",
    "prometheus.textfile",
    "prometheus.tls_cert",
    "prometheus.tls_client_ca",
    "prometheus.tls_key",
    "resync",
    "seed",
    "sinks",
    "start_step",
    "tensorboard.directory",
    "tensorboard.enabled",
    "thresholds.max_abs",
    "thresholds.max_rel",
    "thresholds.ratio",
    "thresholds.rel_floor",
    "wandb.alerts",
    "wandb.enabled",
    "wandb.rank",
    "warmup",
    "watch.declare",
    "watch.exclude",
    "watch.include",
}

ACTIONS = {"abort", "callback", "checkpoint_then_abort", "ignore", "log", "warn"}

ENVIRONMENT = {"TPWATCH_CONFIG", "TPWATCH_DEBUG", "TPWATCH_DISABLED", "TPWATCH_LAUNCH_ID"}

RULE_CODES = {
    "TPW101": "init-mismatch",
    "TPW102": "drift",
    "TPW103": "missing-reduce",
    "TPW104": "double-reduce",
    "TPW105": "averaged-partial",
    "TPW106": "wrong-group",
    "TPW107": "external-write",
    "TPW108": "wrong-scale",
    "TPW109": "optimizer-mismatch",
    "TPW201": "grad-presence",
    "TPW202": "nonfinite",
    "TPW301": "replica-layout",
    "TPW302": "finalize-skipped",
}


def commands(parser: argparse.ArgumentParser, verb: str = "") -> Iterator[tuple[str, set[str]]]:
    """Walk a parser and its subcommands: the full verb and the arguments it takes."""
    names: set[str] = set()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from commands(child, f"{verb} {name}".strip())
        elif action.option_strings:
            names.update({*action.option_strings} - {"-h", "--help"})
        else:
            names.add(action.dest.upper())
    yield verb, names


def config_keys(section: type, prefix: str = "") -> Iterator[str]:
    """Walk the configuration's sections: every dotted key."""
    hints = get_type_hints(section)
    for field in fields(section):
        hint = hints[field.name]
        if isinstance(hint, type) and is_dataclass(hint):
            yield from config_keys(hint, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def test_command_line() -> None:
    """Verbs and flags are these."""
    assert dict(commands(build_parser())) == COMMANDS


def test_configuration_keys() -> None:
    """Keys of the configuration file are these."""
    assert set(config_keys(Config)) == CONFIG_KEYS


def test_actions() -> None:
    """What can be done about a fault is one of these."""
    assert set(get_args(Action)) == ACTIONS


def test_environment_variables() -> None:
    """Environment variables that are not derived from a configuration key are these."""
    assert set(RESERVED_ENV) == ENVIRONMENT


def test_rule_codes() -> None:
    """Every rule has this code and names this kind of finding."""
    assert {rule.code: rule.kind for rule in RULES} == RULE_CODES
    assert len(RULES) == len(RULE_CODES)
