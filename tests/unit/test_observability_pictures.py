"""The pictures of docs/observability.md are those that the command draws."""

from __future__ import annotations

import re

import pytest

from tests.commands import REPOSITORY, run_python

DOCS = REPOSITORY / "docs"
LARGEST = 150 * 1024
"""Bytes of a picture: a page has eight."""


@pytest.fixture(scope="module")
def drawn() -> list[str]:
    """Files that the command says it draws."""
    return run_python("scripts/draw_observability", "--list", timeout=30).stdout.split()


def of_reports(name: str) -> bool:
    """Whether the command for reports draws it."""
    return name.startswith("report-")


def test_the_page_shows_what_the_command_draws(drawn: list[str]) -> None:
    """Each picture once, none from elsewhere but the report's, and each with the command below it."""
    page = (DOCS / "observability.md").read_text()
    shown = re.findall(r"^!\[.+\]\(images/(.+)\)\n\n\*`python scripts/(.+)`: ", page, re.MULTILINE)
    assert len(shown) == page.count("](images/")
    commands = {name: command for name, command in shown if not of_reports(name)}
    assert commands == {name: f"draw_observability {name.partition('.')[0]}" for name in drawn}


def test_every_picture_is_there_and_small(drawn: list[str]) -> None:
    """And none is left over from an earlier version of the command."""
    sizes = {path.name: path.stat().st_size for path in (DOCS / "images").iterdir() if not of_reports(path.name)}
    assert sizes.keys() == set(drawn)
    assert max(sizes.values()) < LARGEST
