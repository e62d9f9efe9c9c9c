"""Copies that were found apart are made equal again, where that was asked for, and nothing else is touched."""

from __future__ import annotations

import pytest
import torch

from tests.dist._harness import run_ranks
from tests.dist._parts import Memory, Rig, normal, rig
from tpwatch.config import Config
from tpwatch.exchange import Exchange

SHAPE = (6, 5)
LABELS = ("master", "exp_avg")


def broken(rank: int, how: str, dtype: torch.dtype = torch.float32) -> Rig:
    """Two parameters; after step 2 rank r adds r + 1 to the first one and to what the optimizer keeps of it."""
    values = [normal(1, *SHAPE, dtype=dtype).t(), normal(2, 7, dtype=dtype)]
    watched = rig(values, [None, None], Config(resync=how, patience=2))  # type: ignore[arg-type]
    watched.source.kept = [{label: normal(3 + i, 30) for i, label in enumerate(LABELS)} for _ in values]
    for step in range(1, 7):
        watched.source.gradients = [normal(step, *SHAPE).t(), normal(step, 7)]
        watched.step(step)
        if step == 2:
            for tensor in (values[0], *watched.source.kept[0].values()):
                tensor.add_(rank + 1)
    return watched


def everything(source: Memory) -> list[torch.Tensor]:
    """Copies of all tensors: values, then what is kept of the first and of the second."""
    return [t.clone() for t in (*source.parameters, *source.kept[0].values(), *source.kept[1].values())]


def mended(rank: int, how: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[str]]:
    """Tensors at the end, and the notes."""
    watched = broken(rank, how, dtype)
    return everything(watched.source), [text for _, text in watched.memo.of("note")]


def shifted(dtype: torch.dtype, shift: float) -> list[torch.Tensor]:
    """What value, master and first moment of the first parameter are if `shift` was added to each."""
    kept = [normal(3 + i, 30) for i in range(2)]
    return [normal(1, *SHAPE, dtype=dtype).t() + shift, *(tensor + shift for tensor in kept)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world", [2, 3])
def test_rank0_gives_its_copy_and_its_optimizer_state(world: int, dtype: torch.dtype) -> None:
    """Bit for bit, transposed values included."""
    for (first, _, *kept), notes in run_ranks(world, mended, "rank0", dtype):
        expected = shifted(dtype, 1.0)
        assert torch.equal(first, expected[0])
        assert all(map(torch.equal, kept[:2], expected[1:]))
        assert [note for note in notes if "p0 set to the copy of rank 0; equal by hash" in note]


def test_mean_is_the_mean_of_all_ranks() -> None:
    """Rank r had added r + 1: over three ranks that is 2 on average."""
    for (first, _, *kept), notes in run_ranks(3, mended, "mean", torch.float32):
        for got, expected in zip((first, *kept[:2]), shifted(torch.float32, 2.0), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
        assert [note for note in notes if "p0 set to the mean over ranks; equal by hash" in note]


def test_the_mean_is_the_same_on_every_rank_to_the_last_bit() -> None:
    """In bfloat16 too, where the sum of an all-reduce would depend on its order."""
    ranks = [tensors for tensors, _ in run_ranks(4, mended, "mean", torch.bfloat16)]
    for other in ranks[1:]:
        assert all(map(torch.equal, ranks[0], other))


@pytest.mark.parametrize("how", ["rank0", "mean"])
def test_what_agrees_is_not_touched(how: str) -> None:
    """The second parameter and its state keep every bit."""
    untouched = [normal(2, 7), *(normal(3 + i, 30) for i in range(2))]
    for (_, second, *kept), _ in run_ranks(2, mended, how, torch.float32):
        assert all(map(torch.equal, (second, *kept[2:]), untouched))


def test_nothing_is_changed_unless_asked_for() -> None:
    """By default copies that differ keep differing."""
    (left, notes), (right, _) = run_ranks(2, mended, "off", torch.float32)
    assert not torch.equal(left[0], right[0])
    assert not [note for note in notes if "resync" in note]


def only_here(rank: int) -> tuple[list[torch.Tensor], list[str]]:
    """Rank 0 alone keeps a moment."""
    watched = rig([normal(1, 8)], [None], Config(resync="mean", patience=1))
    watched.source.kept = [{"exp_avg": normal(2, 8)} if rank == 0 else {}]
    watched.source.parameters[0].add_(rank)
    for step in range(1, 4):
        watched.source.gradients = [normal(step, 8)]
        watched.step(step)
    kept = watched.source.kept[0].get("exp_avg")
    return [watched.source.parameters[0], *([] if kept is None else [kept])], [t for _, t in watched.memo.of("note")]


def test_state_that_only_some_ranks_have_is_left_alone_and_said() -> None:
    """It cannot be gathered; the value is mended, and the line says what is still not equal."""
    ((value, moment), notes), ((other,), _) = run_ranks(2, only_here)
    assert torch.equal(value, other)
    assert torch.equal(moment, normal(2, 8))
    assert any("still not equal: p0" in note for note in notes)


def test_a_tensor_is_gathered_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory it takes is bounded by the piece, not by the tensor."""
    monkeypatch.setattr("tpwatch.resync.PIECE", 16)
    largest: list[int] = []
    gather = Exchange.gather

    def spy(exchange: Exchange, tensor: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        largest.append(tensor.numel() if tensor.dtype == torch.uint8 else 0)
        return gather(exchange, tensor, room)

    monkeypatch.setattr(Exchange, "gather", spy)
    for (first, _, *kept), _ in run_ranks(2, mended, "rank0", torch.float32):
        assert all(map(torch.equal, (first, *kept[:2]), shifted(torch.float32, 1.0)))
    assert max(largest) == 16


def lasting(rank: int, steps: int) -> list[str]:
    """A write on rank 1 behind every step."""
    watched = rig([normal(1, 8)], [None], Config(resync="mean", patience=1))
    for step in range(1, steps + 1):
        watched.source.gradients = [normal(step, 8)]
        watched.step(step)
        watched.source.parameters[0].add_(rank)
    return [text for _, text in watched.memo.of("note") if text.startswith("resync")]


def test_a_lasting_fault_is_not_told_at_every_check() -> None:
    """Whenever the count has doubled: notes are kept for ever."""
    for told in run_ranks(2, lasting, 30):
        assert [text.split(",")[0] for text in told] == ["resync 1", "resync 2", "resync 4", "resync 8", "resync 16"]


def not_finite(rank: int, how: str) -> tuple[torch.Tensor, list[str]]:
    """Rank 0 has a NaN."""
    watched = rig([normal(1, 8)], [None], Config(resync=how, patience=1))  # type: ignore[arg-type]
    watched.source.parameters[0][2] = float("nan") if rank == 0 else 1.0
    for step in range(1, 6):
        watched.source.gradients = [normal(step, 8)]
        watched.step(step)
    return watched.source.parameters[0], [text for _, text in watched.memo.of("note") if text.startswith("resync")]


@pytest.mark.parametrize("how", ["rank0", "mean"])
def test_a_result_that_is_not_finite_is_spread_to_nobody(how: str) -> None:
    """The healthy copy stays what it was, and the line says that they are not equal."""
    _, (healthy, told) = run_ranks(2, not_finite, how)
    assert bool(healthy.isfinite().all())
    assert all("still not equal: p0" in text for text in told)
