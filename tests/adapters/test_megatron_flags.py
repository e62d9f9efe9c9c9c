"""Switching tpwatch on from a trainer's own command line, and what a job without replicas is told."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests.adapters import _runs
from tests.commands import run_python

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(180)]


def parse(*argv: str) -> argparse.Namespace:
    """Parse with a provider that adds an option of its own before ours."""
    from tpwatch.adapters.megatron import add_args

    def mine(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--my-own-option", type=int, default=1)
        return parser

    return add_args(mine(argparse.ArgumentParser())).parse_args(argv)


def test_the_options_compose_with_another_provider() -> None:
    """Both the trainer's own option and ours are there."""
    args = parse("--my-own-option=3", "--tpwatch", "--tpwatch-interval=5")
    assert (args.my_own_option, args.tpwatch, args.tpwatch_interval) == (3, True, 5)


def test_the_command_line_wins_over_environment_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interval: 5 by option, 7 in the environment, 9 in the file; patience: only the environment and the file."""
    from tpwatch.adapters.megatron import config_from_args

    file = tmp_path / "tpwatch.yaml"
    file.write_text("interval: 9\npatience: 9\nwarmup: 9\n")
    monkeypatch.setenv("TPWATCH_INTERVAL", "7")
    monkeypatch.setenv("TPWATCH_PATIENCE", "7")
    config = config_from_args(parse("--tpwatch", "--tpwatch-interval=5", f"--tpwatch-config={file}"))
    assert (config.interval, config.patience, config.warmup, config.enabled) == (5, 7, 9, True)


def test_without_the_flag_it_is_switched_off() -> None:
    """The options alone do nothing."""
    from tpwatch.adapters.megatron import config_from_args

    assert not config_from_args(parse()).enabled


def test_a_job_without_tensor_parallelism_has_nothing_to_watch(tmp_path: Path) -> None:
    """It says so once, trains on, and the gate exits with 3: nothing was checked."""
    ended = _runs.ranks(_runs.worker("dense-nosp", tmp_path, 3, "--dp=2", tp=1), 2)
    assert ended.codes == [0, 0]
    assert "nothing to watch: the TP group has one rank" in ended.output
    gate = run_python("-m", "tpwatch", "check", tmp_path)
    assert gate.returncode == 3, gate.stdout + gate.stderr
    assert _runs.summary(tmp_path)["verdict"] == "nothing-checked"


def test_a_pattern_that_matches_nothing_is_a_warning_that_names_it(tmp_path: Path) -> None:
    """A typo in a pattern would silently watch nothing."""
    config = tmp_path / "tpwatch.yaml"
    config.write_text("watch:\n  exclude: ['decoder.*.nrom.weight']\n")
    ended = _runs.ranks(_runs.worker("dense-sp", tmp_path / "run", 1, f"--config={config}"), 2)
    assert ended.output.count("watch.exclude: pattern 'decoder.*.nrom.weight' matches no parameter") == 1


def test_excluded_and_declared_parameters_are_taken_at_their_word(tmp_path: Path) -> None:
    """A declared sum silences the double sum that was inferred; an excluded parameter is listed as not watched."""
    config = tmp_path / "tpwatch.yaml"
    config.write_text("watch:\n  exclude: ['*final_layernorm*']\n  declare: {'*per_layer_embedding*': sum}\n")
    _runs.ranks(_runs.worker("ple-double-sum", tmp_path / "run", 6, f"--config={config}"), 2)
    found = _runs.summary(tmp_path / "run")
    assert (found["verdict"], found["findings"]) == ("clean", [])
    assert ["decoder.final_layernorm.weight", "excluded"] in found["not_watched"]


@pytest.mark.te
def test_the_double_sum_inside_transformer_engine_is_named(tmp_path: Path) -> None:
    """P1 in Transformer Engine's own Python: the gain, the ratio, and nothing else."""
    from tpwatch.lab.launch import Job

    name = "gdn-gamma-double-sum-te"
    for fixed in (False, True):
        job = Job(faults=(name,), out=tmp_path / str(fixed), tp=2, steps=6, fixed=fixed, timeout=170)
        found = _runs.train(job)[name]
        causes = _runs.causes(found)
        expected = {} if fixed else _runs.faulty(name, _runs.watched(tmp_path / str(fixed)))
        assert {n: f["first_step"] for n, f in causes.items()} == expected
        assert all(f["kind"] == "double-reduce" and f["ratio"] == pytest.approx(2, rel=1e-3) for f in causes.values())
