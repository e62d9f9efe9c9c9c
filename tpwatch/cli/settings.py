"""Verbs about this installation: `doctor` and `config show|validate|schema`."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from typing import Any

import yaml

from tpwatch.cli.codes import CLEAN
from tpwatch.cli.output import say
from tpwatch.config import load, schema
from tpwatch.doctor import as_text, examine
from tpwatch.export.jsonl import encode


def add_verbs(verbs: Any) -> None:  # noqa: ANN401 - argparse gives its sub-parsers no public type
    """Add `doctor` and `config`."""
    doctor = verbs.add_parser("doctor", help="what is installed, what will be used, and why")
    doctor.add_argument("--format", choices=("text", "json"), default="text")
    doctor.set_defaults(verb=_doctor)
    config = verbs.add_parser("config", help="show, validate or describe the configuration")
    actions = config.add_subparsers(metavar="ACTION", required=True)
    show = actions.add_parser("show", help="the configuration in force: environment, file, default")
    show.add_argument("--config", metavar="FILE")
    show.add_argument("--format", choices=("yaml", "json"), default="yaml")
    show.set_defaults(verb=_show)
    validate = actions.add_parser("validate", help="exit 2 if a file is not a valid configuration")
    validate.add_argument("files", metavar="FILE", nargs="+")
    validate.set_defaults(verb=_validate)
    actions.add_parser("schema", help="JSON Schema of the YAML file").set_defaults(verb=_schema)


def _doctor(args: argparse.Namespace) -> int:
    facts = examine(os.environ)
    say(encode([asdict(f) for f in facts], indent=2) if args.format == "json" else as_text(facts))
    return CLEAN


def _show(args: argparse.Namespace) -> int:
    values = json.loads(encode(load(env=os.environ, file=args.config).to_mapping()))
    if args.format == "json":
        say(encode(values, indent=2))
    else:
        say(yaml.safe_dump(values, sort_keys=False).rstrip())
    return CLEAN


def _validate(args: argparse.Namespace) -> int:
    for file in args.files:
        load(file=file)
        say(f"{file}: valid")
    return CLEAN


def _schema(args: argparse.Namespace) -> int:
    del args
    say(encode(schema(), indent=2))
    return CLEAN
