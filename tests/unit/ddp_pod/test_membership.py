"""Which pods are members of a rendezvous round."""

from __future__ import annotations

import pytest

from ddp_pod.torchrun.membership import GroupSize, Heartbeats, choose_members

FIXED = GroupSize(nodes=3, least=3, most=3)
ELASTIC = GroupSize(nodes=3, least=2, most=4)
WITH_SPARES = GroupSize(nodes=2, least=2, most=2)


def members(
    size: GroupSize,
    joined: tuple[int, ...],
    previous: tuple[int, ...] = (),
    dead: tuple[int, ...] = (),
    left: tuple[int, ...] = (),
    waited: float = 0.0,
) -> list[int] | None:
    registrations = {**dict.fromkeys(joined, 0), **dict.fromkeys(left)}
    return choose_members(size, registrations, previous, dead, waited)


class TestFixedSize:
    def test_round_is_complete_when_all_pods_have_joined(self) -> None:
        assert members(FIXED, (2, 0)) is None
        assert members(FIXED, (2, 0), waited=1000.0) is None
        assert members(FIXED, (2, 0, 1)) == [0, 1, 2]

    def test_pod_that_left_has_to_join_again(self) -> None:
        assert members(FIXED, (0, 1), previous=(0, 1, 2), left=(2,)) is None


class TestElasticMembers:
    def test_first_round_waits_for_the_requested_pods_but_not_for_ever(self) -> None:
        assert members(ELASTIC, (0, 1), waited=29.0) is None
        assert members(ELASTIC, (0, 1), waited=31.0) == [0, 1]
        assert members(ELASTIC, (0,), waited=31.0) is None
        assert members(ELASTIC, (0, 1, 2)) == [0, 1, 2]

    def test_later_round_waits_for_living_members(self) -> None:
        assert members(ELASTIC, (0, 1), previous=(0, 1, 2), waited=100.0) is None
        assert members(ELASTIC, (0, 1, 2), previous=(0, 1, 2)) == [0, 1, 2]

    @pytest.mark.parametrize("lost", [{"dead": (2,)}, {"left": (2,)}], ids=str)
    def test_later_round_does_not_wait_for_lost_members(self, lost: dict[str, tuple[int, ...]]) -> None:
        assert members(ELASTIC, (0, 1), previous=(0, 1, 2), **lost) == [0, 1]
        assert members(ELASTIC, (0,), previous=(0, 2), **lost) is None, "the minimum is two"

    def test_newcomers_join_up_to_the_maximum(self) -> None:
        assert members(ELASTIC, (4, 3, 2, 1, 0), previous=(0, 1)) == [0, 1, 2, 3]

    def test_pod_that_died_after_it_registered_is_no_member(self) -> None:
        assert members(ELASTIC, (0, 1, 2), previous=(0, 1), dead=(2,)) == [0, 1]


class TestSpareMembers:
    def test_lower_indices_have_priority_in_the_first_round(self) -> None:
        assert members(WITH_SPARES, (0, 2), waited=29.0) is None
        assert members(WITH_SPARES, (0, 1, 2)) == [0, 1]
        assert members(WITH_SPARES, (0, 2), waited=31.0) == [0, 2]

    def test_members_of_the_round_before_have_priority(self) -> None:
        assert members(WITH_SPARES, (0, 1, 2), previous=(0, 2)) == [0, 2]
        assert members(WITH_SPARES, (0, 1), previous=(0, 2)) is None

    @pytest.mark.parametrize("lost", [{"dead": (1,)}, {"left": (1,)}], ids=str)
    def test_spare_takes_the_seat_of_a_lost_member(self, lost: dict[str, tuple[int, ...]]) -> None:
        assert members(WITH_SPARES, (0, 2), previous=(0, 1), **lost) == [0, 2]
        assert members(WITH_SPARES, (0,), previous=(0, 1), **lost) is None


class TestHeartbeats:
    def test_pod_is_dead_only_after_it_was_observed_for_the_whole_patience(self) -> None:
        beats = Heartbeats(10.0, 100.0)
        assert beats.find_dead({0: b"1", 1: b"1"}, 100.0) == set()
        for now in (103.0, 106.0, 109.0):
            assert beats.find_dead({0: b"1", 1: str(now).encode()}, now) == set()
        assert beats.find_dead({0: b"1", 1: b"109.0"}, 110.1) == {0}
        assert beats.find_dead({0: b"2", 1: b"109.0"}, 111.0) == set()

    def test_frozen_observer_finds_nobody_dead(self) -> None:
        beats = Heartbeats(10.0, 100.0)
        beats.find_dead({0: b"1"}, 100.0)
        assert beats.find_dead({0: b"1"}, 500.0) == set()
        assert beats.find_dead({0: b"1"}, 503.0) == set()
        assert beats.find_dead({0: b"1"}, 506.0) == set()
        assert beats.find_dead({0: b"1"}, 510.0) == {0}
