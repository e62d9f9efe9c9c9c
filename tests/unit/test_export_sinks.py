"""Which sinks a configuration asks for, and how sinks of other packages are found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tpwatch.config import Config, Prometheus
from tpwatch.errors import ConfigError
from tpwatch.export import Place
from tpwatch.export.fanout import Fanout
from tpwatch.export.sinks import ENTRY_POINTS, chosen

DOCUMENT = Path(__file__).parents[2] / "docs" / "observability.md"

Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a package of one module with one entry point, as pip would: module and metadata on the path."""

    def install(source: str, entry: str) -> None:
        site = tmp_path / "site"
        metadata = site / "my_sink-1.0.dist-info"
        metadata.mkdir(parents=True)
        (site / "my_sink.py").write_text(source)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-sink\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{entry}\n")
        monkeypatch.syspath_prepend(site)

    return install


def documented_sink() -> str:
    """The sink that the documentation shows."""
    _, _, behind = DOCUMENT.read_text().partition("```python\n# my_sink.py\n")
    return behind.partition("```")[0]


def feed(place: Place) -> None:
    """Send a run of two events to every sink that the configuration of the place asks for."""
    fanout = Fanout(chosen(place.config), place)
    for event in ({"event": "check", "step": 3, "differing": {"param": 2}}, {"event": "end", "step": 3}):
        fanout.hand_over(json.dumps(event))
    fanout.close()


def test_nothing_is_exported_unless_asked_for() -> None:
    """The event file is the only output by default."""
    assert chosen(Config()) == {}
    assert list(chosen(Config(prometheus=Prometheus(enabled=True), sinks=("a", "b:c")))) == ["prometheus", "a", "b:c"]


def test_the_documented_sink_works_as_an_entry_point(install: Install, tmp_path: Path) -> None:
    """What the documentation shows is found by name, gets the run directory, and gets every event."""
    source = documented_sink()
    assert len(source.splitlines()) <= 12
    install(source, "my-tracker = my_sink:MySink")
    place = Place(Config(sinks=("my-tracker",)), tmp_path, "tp-0")
    feed(place)
    assert (tmp_path / "differing.tp-0.csv").read_text() == "3,2\n"
    assert place.health.losses["my-tracker"].errors == 0


def test_a_sink_may_be_named_by_its_path(install: Install, tmp_path: Path) -> None:
    """`module:factory` needs no entry point."""
    install(documented_sink(), "unused = my_sink:MySink")
    feed(Place(Config(sinks=("my_sink:MySink",)), tmp_path, "tp-0"))
    assert (tmp_path / "differing.tp-0.csv").exists()


def test_a_sink_that_does_not_exist_is_an_error_that_names_those_that_do(install: Install, tmp_path: Path) -> None:
    """The message has the name asked for, and what there is instead."""
    install("def make(place): ...", "my-tracker = my_sink:make")
    config = Config(sinks=("my-trakcer",))
    with pytest.raises(ConfigError, match=r"my-trakcer.*there are: .*my-tracker"):
        chosen(config)["my-trakcer"](Place(config, tmp_path, "tp-0"))


def test_a_place_has_a_name_for_files_side_by_side(tmp_path: Path) -> None:
    """Run and group."""
    assert Place(Config(), tmp_path / "run-7", "tp-4").name == "run-7.tp-4"
