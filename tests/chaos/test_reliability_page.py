"""docs/reliability.md names tests that exist."""

from __future__ import annotations

import re

from tests.chaos._schedule import CI, NIGHTLY
from tests.commands import REPOSITORY

PAGE = (REPOSITORY / "docs" / "reliability.md").read_text()


def test_every_test_it_names_exists() -> None:
    """Each `path::name` is a function of that file, and all fourteen promises have some."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    missing = [f"{path}::{name}" for path, name in named if f"def {name}(" not in (REPOSITORY / path).read_text()]
    assert missing == []
    promises = [line for line in PAGE.splitlines() if re.match(r"\| \d+\. .*`tests/", line)]
    assert len(promises) == 14


def test_profiles_have_the_size_it_states() -> None:
    """Runs in all, in plain torch and on Megatron-core."""
    for name, sizes in (("ordinary", CI), ("nightly", NIGHTLY)):
        stated = f"| {name} | {sum(sizes.values())} | {sizes['plain']} | {sizes['megatron']} |"
        assert stated in PAGE
