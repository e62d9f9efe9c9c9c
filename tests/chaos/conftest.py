"""One set of nurseries for all chaos tests of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos._runs import Nurseries, nurseries


@pytest.fixture(scope="session")
def chaos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nurseries]:
    """Runs scenarios; see `Nurseries`."""
    with nurseries(tmp_path_factory.mktemp("chaos")) as opened:
        yield opened
