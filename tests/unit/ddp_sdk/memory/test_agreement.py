"""Agreement of the ranks on the step to restore and on its senders."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_sdk.memory.agreement import (
    Held,
    Member,
    choose_step,
    find_changed_size,
    find_ring,
    plan_transfers,
)
from ddp_sdk.memory.copies import REPLICATED, SHARD


def replicated(rank: int, pod: int, *steps: int, local_rank: int = 0, at_least: int = 0) -> Member:
    return Member(rank, pod, local_rank, at_least, tuple(Held(REPLICATED, step, 0, 2, 100) for step in steps))


def sharded(rank: int, *held: tuple[int, int], world: int = 2) -> Member:
    """Return a rank that holds (origin, step)."""
    return Member(rank, rank, 0, 0, tuple(Held(SHARD, step, origin, world, 100) for origin, step in held))


def test_newest_replicated_step_of_any_pod_is_chosen() -> None:
    members = [replicated(0, 0, 4, 5), replicated(1, 1, 5, 6)]
    assert choose_step(members, REPLICATED) == 6


def test_older_step_than_the_disk_is_not_chosen() -> None:
    members = [replicated(0, 0, 4, 5, at_least=6), replicated(1, 1)]
    assert choose_step(members, REPLICATED) is None


def test_shards_of_different_steps_are_no_complete_copy() -> None:
    assert choose_step([sharded(0, (0, 5), (0, 4)), sharded(1, (1, 4), (1, 3))], SHARD) == 4
    assert choose_step([sharded(0, (0, 5)), sharded(1, (1, 4))], SHARD) is None


def test_shard_of_a_lost_pod_comes_from_its_neighbour() -> None:
    members = [sharded(0, (0, 5), (1, 5)), sharded(1)]
    assert choose_step(members, SHARD) == 5
    (transfer,) = plan_transfers(members, SHARD, 5)
    assert (transfer.source, transfer.target, transfer.origin) == (0, 1, 1)


def test_shards_of_another_number_of_ranks_are_not_used() -> None:
    members = [sharded(0, (0, 5), (1, 5), world=3), sharded(1, (2, 5), world=3)]
    assert choose_step(members, SHARD) is None
    assert find_changed_size(members, SHARD) == 3


def test_ranks_of_one_pod_need_one_transfer() -> None:
    members = [replicated(0, 0, 5), replicated(1, 0, local_rank=1), replicated(2, 1), replicated(3, 1, local_rank=1)]
    (transfer,) = plan_transfers(members, REPLICATED, 5)
    assert (transfer.source, transfer.target) == (0, 2)


def test_number_of_holders_doubles() -> None:
    members = [replicated(0, 0, 5), *(replicated(rank, rank) for rank in range(1, 8))]
    sources = [transfer.source for transfer in plan_transfers(members, REPLICATED, 5)]
    assert sources == [0, 0, 1, 0, 1, 2, 3]


@given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_every_pod_has_the_copy_after_the_transfers(has_copy: list[bool]) -> None:
    members = [replicated(rank, rank, *([5] if has else [])) for rank, has in enumerate(has_copy)]
    holders = {rank for rank, has in enumerate(has_copy) if has}
    for transfer in plan_transfers(members, REPLICATED, 5):
        assert transfer.source in holders
        assert transfer.target not in holders
        holders.add(transfer.target)
    assert holders == ({*range(len(members))} if any(has_copy) else set())


@pytest.mark.parametrize("pods", [2, 3, 4, 5, 8])
def test_ring_gives_each_rank_one_target_in_another_pod(pods: int) -> None:
    members = [Member(2 * pod + local, pod, local, 0, ()) for pod in range(pods) for local in range(2)]
    rings = [find_ring(members, member.rank) for member in members]
    assert all(ring is not None for ring in rings)
    targets = [ring.target for ring in rings if ring is not None]
    assert sorted(targets) == list(range(2 * pods))
    assert all(members[target].pod != member.pod for member, target in zip(members, targets, strict=True))
    assert [ring.source for ring in rings if ring is not None] == [targets.index(rank) for rank in range(2 * pods)]


def test_single_pod_has_no_ring() -> None:
    assert find_ring([Member(0, 0, 0, 0, ()), Member(1, 0, 1, 0, ())], 0) is None
