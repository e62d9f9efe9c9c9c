"""The gate where Megatron-core really saves and loads: its own `dist_checkpointing`, its own optimizers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.adapters import _runs

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(240)]

SCRIPT = str(Path(__file__).parent / "scripts" / "checkpoints.py")
NORM = "decoder.layers.0.input_layernorm.weight"
REFUSED = {
    "fp32-refuse": "keeps exp_avg exp_avg_sq",
    "bf16-refuse": "keeps master exp_avg exp_avg_sq",
    "distributed-refuse": "keeps master exp_avg exp_avg_sq",
}
CASES = (*REFUSED, "bf16-annotate", "fp32-ignore")

Lines = dict[str, list[list[str]]]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all cases: one set of processes goes through them."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def said(out: Path) -> Lines:
    """What each rank said, by case."""
    ended = _runs.ranks([SCRIPT, str(out), *CASES], 2, timeout=200)
    assert ended.codes == [0, 0], ended.output
    lines = [line.split(" ", 3)[1:] for line in ended.output.splitlines() if line.startswith("rank ")]
    return {case: [[text for r, c, text in lines if (r, c) == (rank, case)] for rank in "01"] for case in CASES}


@pytest.mark.parametrize("case", REFUSED)
def test_a_save_is_refused_on_every_rank_when_a_moment_differs(out: Path, said: Lines, case: str) -> None:
    """The healthy one goes through before, and what the optimizer keeps is found in each kind of it."""
    for lines in said[case]:
        assert "healthy: saved" in lines
        assert REFUSED[case] in lines
        (broken,) = [line for line in lines if line.startswith("broken: ")]
        assert broken.startswith("broken: tpwatch refused to save a checkpoint at step 2: optimizer-mismatch")
        assert f"finding optimizer-mismatch {NORM}: exp_avg differ" in lines
    assert (out / case / "healthy" / "metadata.json").is_file()
    assert not (out / case / "broken" / "metadata.json").exists()


@pytest.mark.parametrize("case", CASES)
def test_detaching_puts_saving_and_loading_back(said: Lines, case: str) -> None:
    """The very same function of the framework, and no attribute left on the optimizer."""
    assert all("restored True True" in lines for lines in said[case])


def test_a_checkpoint_can_carry_what_was_found(out: Path, said: Lines) -> None:
    """Both checkpoints are whole, and each says whether its copies agreed."""
    for lines in said["bf16-annotate"]:
        assert [line for line in lines if line.endswith("saved")] == ["healthy: saved", "broken: saved"]
    for name, differing in (("healthy", {}), ("broken", {NORM: ["exp_avg"]})):
        saved = out / "bf16-annotate" / name
        assert (saved / "metadata.json").is_file()
        assert json.loads((saved / "tpwatch.tp-0.json").read_text())["differing"] == differing


@pytest.mark.parametrize("case", ["fp32-refuse", "bf16-refuse", "bf16-annotate"])
def test_a_load_that_brings_a_difference_is_told_from_one_that_takes_it(out: Path, said: Lines, case: str) -> None:
    """Of four loads (healthy, broken, broken, healthy) the second brings it and the last takes it away."""
    assert all("loaded" in lines for lines in said[case])
    events = map(json.loads, (out / case / "run" / "events.tp-0.jsonl").read_text().splitlines())
    notes = [event["text"] for event in events if event["event"] == "note"]
    assert [note for note in notes if "the checkpoint: " in note] == [
        f"a difference between copies came with the checkpoint: {NORM}",
        f"a difference between copies went with the checkpoint: {NORM}",
    ]


def test_by_default_saving_is_none_of_its_business(said: Lines) -> None:
    """Nothing is wrapped, compared or found."""
    for lines in said["fp32-ignore"]:
        assert [line for line in lines if line.endswith("saved")] == ["healthy: saved", "broken: saved"]
        assert not [line for line in lines if line.startswith("finding")]
