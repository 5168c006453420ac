"""What the ranks agree on through the store of the process group."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from ddp_trainer.memory.ranks import PeerCounter, RankPlace


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
