"""The verb about Weights & Biases: `wandb workspace`."""

from __future__ import annotations

import argparse
from typing import Any

from tpwatch.cli.codes import CLEAN
from tpwatch.cli.output import say
from tpwatch.export.jsonl import encode
from tpwatch.export.wandb_workspace import View


def add_verbs(verbs: Any) -> None:  # noqa: ANN401 - argparse gives its sub-parsers no public type
    """Add `wandb`."""
    actions = verbs.add_parser("wandb", help="panels for Weights & Biases").add_subparsers(
        metavar="ACTION", required=True
    )
    workspace = actions.add_parser("workspace", help="save a view with panels about replica consistency in a project")
    workspace.add_argument("--entity", required=True, help="user or team that has the project")
    workspace.add_argument("--project", required=True)
    workspace.add_argument("--dry-run", action="store_true", help="print the view as JSON; needs no key, no network")
    workspace.set_defaults(verb=_workspace)


def _workspace(args: argparse.Namespace) -> int:
    view = View(args.entity, args.project)
    say(encode(view.spec(), indent=2) if args.dry_run else view.save())
    return CLEAN
