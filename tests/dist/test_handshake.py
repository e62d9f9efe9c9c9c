"""Agreement through the store: everyone hears the same word, whoever is missing, late or different."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tpwatch.handshake import Meeting, Payload, next_round

StoreOf = Callable[[], dist.Store]
"""Opens the same store for one more rank."""

LIMIT = timedelta(seconds=20)


@pytest.fixture(params=["hash", "file", "tcp"])
def store_of(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreOf]:
    """Each kind of store that a job may stand on, as several clients see it."""
    if request.param == "hash":
        store = dist.HashStore()
        yield lambda: store
    elif request.param == "file":
        yield lambda: dist.FileStore(str(tmp_path / "store"), -1)
    else:
        host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield lambda: dist.TCPStore("127.0.0.1", host.port, is_master=False, timeout=LIMIT)


@pytest.fixture
def store() -> dist.Store:
    """One store in memory, where the kind does not matter."""
    return dist.HashStore()


def all_at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """Run every call in a thread of its own; their results in order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout=30) for future in [pool.submit(call) for call in calls]]


def hold(store: dist.Store, rank: int, world: int = 3, **options: Any) -> str:
    """Come to the meeting as `rank`; the word that stands."""
    delay, payload = options.pop("delay", 0.0), options.pop("payload", {})
    judge = options.pop("judge", lambda _heard: "")
    time.sleep(delay)
    timeout = options.pop("timeout", 10.0)
    return Meeting(store, options.pop("name", "m"), rank, range(world), timeout).hold(payload, judge)


def version(heard: Mapping[int, Payload]) -> str:
    """Refuse the first payload that differs from the leader's."""
    odd = [rank for rank, said in heard.items() if said != heard[0]]
    return f"rank {odd[0]} is different" if odd else ""


# ------------------------------------------------------------------------------------ on every store


def test_all_agree(store_of: StoreOf) -> None:
    """Nobody is missing and nobody objects: no reason, and everyone's payload can be read."""

    def come(rank: int) -> tuple[str, dict[int, Payload], Payload]:
        meeting = Meeting(store_of(), "m", rank, range(4), 10.0)
        reason = meeting.hold({"rank": rank, "text": "ä ☃"})
        return reason, meeting.payloads(), meeting.payload(3)

    everyone = {rank: {"rank": rank, "text": "ä ☃"} for rank in range(4)}
    assert all_at_once([lambda r=r: come(r) for r in range(4)]) == [("", everyone, everyone[3])] * 4


def test_one_that_is_different_stops_all(store_of: StoreOf) -> None:
    """The judge's word about rank 1 is what every rank hears, rank 1 included."""
    said = [{"version": "1"}, {"version": "2"}, {"version": "1"}]
    words = all_at_once([lambda r=r: hold(store_of(), r, payload=said[r], judge=version) for r in range(3)])
    assert words == ["rank 1 is different"] * 3


def test_one_that_is_missing_stops_all(store_of: StoreOf) -> None:
    """The leader names who did not come, and the rank that did come hears it."""
    words = all_at_once([lambda r=r: hold(store_of(), r, timeout=0.5) for r in (0, 1)])
    assert words[0] == words[1]
    assert words[0].startswith("rank 2 did not answer")


def test_one_that_is_late_hears_what_was_decided_without_it(store_of: StoreOf) -> None:
    """Coming after the decision changes nothing, and is over at once."""
    calls = [
        lambda: hold(store_of(), 0, timeout=0.3),
        lambda: hold(store_of(), 1, timeout=0.3),
        lambda: hold(store_of(), 2, timeout=0.3, delay=1.0),
    ]
    words = all_at_once(calls)
    assert len(set(words)) == 1
    assert words[2].startswith("rank 2 did not answer")


def test_one_that_declines_stops_all_at_once(store_of: StoreOf) -> None:
    """A switched-off rank says so and leaves; the others wait neither for it nor for each other."""
    started = time.monotonic()
    calls = [
        lambda: hold(store_of(), 0, timeout=20.0),
        lambda: Meeting(store_of(), "m", 1, range(3), 20.0).decline("rank 1 is off"),
    ]
    assert all_at_once(calls) == ["rank 1 is off"] * 2
    assert time.monotonic() - started < 10.0


def test_first_writer_decides(store_of: StoreOf) -> None:
    """Of many proposals made at the same moment, all proposers come away with one."""
    barrier = threading.Barrier(8)

    def propose(rank: int) -> str:
        meeting = Meeting(store_of(), "m", rank, range(8), 1.0)
        barrier.wait(10)
        return meeting.decline(f"said rank {rank}")

    assert len(set(all_at_once([lambda r=r: propose(r) for r in range(8)]))) == 1


def test_rounds_are_counted_by_rank_and_purpose(store_of: StoreOf) -> None:
    """The n-th visit of each rank has the same number on every rank, whatever the others do."""
    store = store_of()
    assert [next_round(store, "attach", 0) for _ in range(3)] == [1, 2, 3]
    assert next_round(store_of(), "attach", 1) == 1
    assert next_round(store, "finish", 0) == 1
    assert next_round(store_of(), "attach", 1) == 2


# --------------------------------------------------------------------------------------- special cases


def test_without_its_leader_a_meeting_fails_for_the_rest(store: dist.Store) -> None:
    """The followers give up a little later than the leader would have, with one word."""
    words = all_at_once([lambda r=r: hold(store, r, timeout=0.2) for r in (1, 2)])
    assert words[0] == words[1]
    assert words[0].startswith("rank 0 gave no decision")


def test_a_leader_that_comes_too_late_obeys(store: dist.Store) -> None:
    """The decision that the followers took without it stands, though it finds everyone's payload."""
    calls = [
        lambda: hold(store, 0, world=2, timeout=0.1, delay=3.5),
        lambda: hold(store, 1, world=2, timeout=0.1),
    ]
    words = all_at_once(calls)
    assert words[0] == words[1]
    assert words[0].startswith("rank 0 gave no decision")


def test_the_first_refused_payload_ends_the_wait(store: dist.Store) -> None:
    """A job of which one rank is known to differ does not wait for the ranks still to come."""
    started = time.monotonic()
    calls = [
        lambda: hold(store, 0, payload={"v": 1}, judge=version, timeout=20.0),
        lambda: hold(store, 1, payload={"v": 2}, judge=version, timeout=20.0),
    ]
    assert all_at_once(calls) == ["rank 1 is different"] * 2
    assert time.monotonic() - started < 10.0


def test_meetings_of_another_name_do_not_mix(store: dist.Store) -> None:
    """A failed meeting leaves no trace in the next round."""
    assert all_at_once([lambda: hold(store, 0, timeout=0.1, name="m/1")])[0] != ""
    words = all_at_once([lambda r=r: hold(store, r, name="m/2") for r in range(3)])
    assert words == ["", "", ""]


def test_a_leader_alone_agrees_with_itself(store: dist.Store) -> None:
    """A group of one rank needs nobody."""
    assert hold(store, 0, world=1, timeout=0.1) == ""


def raced(store: dist.Store, number: int, chance: random.Random) -> list[str]:
    """One meeting whose three ranks arrive around each other's deadlines; the words they hear."""
    timeout = 0.05
    # The followers give up about 2.06 s after they came, the leader 0.05 s after it came.
    spread = [chance.choice((0.0, 0.04, 0.05, 0.06, 2.0, 2.05, 2.06, 2.07, 2.1)) for _ in range(3)]
    delays = [max(0.0, d + chance.uniform(-0.02, 0.02)) for d in spread]
    return all_at_once(
        [lambda r=r: hold(store, r, timeout=timeout, delay=delays[r], name=f"race/{number}") for r in range(3)]
    )


@pytest.mark.parametrize(("kind", "meetings"), [("hash", 60), ("tcp", 15)])
def test_two_ranks_never_decide_differently(kind: str, meetings: int) -> None:
    """Meetings raced around their timeouts: one word each, and not the same in all."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = dist.HashStore()
    chance = random.Random(7)  # noqa: S311 - delays
    seeds = [random.Random(chance.random()) for _ in range(meetings)]  # noqa: S311 - delays

    def race(number: int) -> list[str]:
        store = shared if kind == "hash" else dist.TCPStore("127.0.0.1", host.port, is_master=False, timeout=LIMIT)
        return raced(store, number, seeds[number])

    with ThreadPoolExecutor(meetings) as pool:
        words = list(pool.map(race, range(meetings)))
    assert all(len(set(heard)) == 1 for heard in words)
    outcomes = {heard[0].partition(" ")[0] + heard[0][-20:] for heard in words}
    assert len(outcomes) > 1
