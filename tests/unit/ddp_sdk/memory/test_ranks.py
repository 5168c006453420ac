"""Messages between ranks, and what they agree on through the store of the process group."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from ddp_sdk.memory import ranks
from ddp_sdk.memory.ranks import PeerCounter, RankPlace, Ranks
from tests.support.trainer_ranks import run_as_rank

COLLECTIVES = """
from ddp_sdk.memory import ranks as module
module._CHUNK_BYTES = 1000
place = module.find_place()
ranks = module.Ranks(place)
assert ranks.gather([place.rank, 7]) == [[0, 7], [1, 7]]
assert ranks.find_maximum(3 + place.rank) == 4
assert [ranks.is_true_for_all(place.rank == 0), ranks.is_true_for_all(True)] == [False, True]
memory = torch.full((5,), place.rank, dtype=torch.uint8)
ranks.broadcast(memory)
assert not memory.any()
sent = (torch.arange(2500) % 251).to(torch.uint8)
for source in range(2):
    received = torch.zeros_like(sent)
    ranks.send(sent, 1 - source) if place.rank == source else ranks.receive(received, source)
    assert place.rank == source or torch.equal(received, sent)
assert module.PeerCounter(place, "test").is_called_by_all()
ranks.wait_for_all()
"""
RING = """
from ddp_sdk.memory import ranks as module
from ddp_sdk.memory.agreement import RingNeighbours
module._CHUNK_BYTES = 1000
rank, size = world.rank, world.size
source = (rank - 1) % size
store = module.PeerCounter(module.find_place(), "test").store
ring = module.Ring(RingNeighbours((rank + 1) % size, source, rank, size), rank, store)
assert ring.exchange_numbers([rank, 5]) == [source, 5]
lengths = [2500, 10, 0]
incoming = torch.full((lengths[source],), 9, dtype=torch.uint8)
ring.exchange(torch.full((lengths[rank],), rank, dtype=torch.uint8), incoming)
assert bool((incoming == source).all())
dist.barrier()
"""


@pytest.mark.parametrize(
    ("script", "own", "world"),
    [(COLLECTIVES, 0, 2), (RING, 1, 2), (RING, 0, 3), (RING, 1, 3)],
    ids=["collectives", "ring of 2", "ring of 3, first", "ring of 3, second"],
)
def test_ranks_receive_what_others_send(
    script: str, own: int, world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_CHUNK_BYTES", 1000)
    run_as_rank(own, tmp_path, script, world, monkeypatch)


def test_single_rank_needs_no_messages() -> None:
    alone = Ranks(RankPlace(0, 1, 0, 0))
    assert alone.gather([3, 4]) == [[3, 4]]
    assert alone.find_maximum(3) == 3
    assert not alone.is_true_for_all(False)


@pytest.fixture
def counters() -> Iterator[list[PeerCounter]]:
    """The counters of two ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    yield [PeerCounter(RankPlace(rank, 2, 0, rank), "test", environ) for rank in range(2)]
    del store  # it serves until then


def agree(counters: list[PeerCounter], *outcomes: bool) -> list[bool]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(PeerCounter.agree_on_copy, counters, outcomes))


def test_copy_counts_if_all_ranks_have_it(counters: list[PeerCounter]) -> None:
    outcomes = [(True, True), (True, False), (True, True), (False, True), (False, False), (True, True)]
    assert [agree(counters, *outcome) for outcome in outcomes] == [[all(outcome)] * 2 for outcome in outcomes]


def test_rank_does_not_wait_for_one_that_has_abandoned_its_copies(counters: list[PeerCounter]) -> None:
    assert agree(counters, True, True) == [True, True]
    counters[1].abandon()
    with pytest.raises(TimeoutError, match="another rank did not complete its copy"):
        counters[0].agree_on_copy(True)


def test_rank_that_ends_does_not_wait_for_others(counters: list[PeerCounter]) -> None:
    counters[0].stop_waiting()
    assert counters[0].agree_on_copy(True)


def test_silent_rank_ends_the_wait_and_later_ranks_get_the_same_answer(
    counters: list[PeerCounter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_SECONDS_FOR_PEERS", 0.05)
    assert [counter.is_called_by_all() for counter in counters] == [False, False]
    with pytest.raises(TimeoutError):
        counters[0].agree_on_copy(True)
