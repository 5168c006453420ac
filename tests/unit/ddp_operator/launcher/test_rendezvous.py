"""Who takes part in a job with spares."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ddp_operator.launcher.torchrun.rendezvous import Seats, TrainingOver
from tests.support.launcher_config import launcher_pod


class Node(NamedTuple):
    addr: str


class State:
    def __init__(self, round_: int, *participants: Node, complete: bool = False, alive: Any = (), closed: bool = False):
        self.round, self.complete, self.closed = round_, complete, closed
        self.participants = dict.fromkeys(participants, 0)
        self.last_heartbeats = dict.fromkeys([*participants, *alive], 0)


ZERO, ONE, TWO = Node("127.0.0.1"), Node("127.0.100.101"), Node("127.0.100.102")
OF = {ZERO: 0, ONE: 1, TWO: 2}


class Job:
    """Two nodes and a spare, as one of their agents sees it."""

    def __init__(self, tmp_path: Path, node: Node) -> None:
        self.node, self.seats = node, Seats(launcher_pod(tmp_path, nodes=2, spares=1, node=OF[node]))

    def waits(self, state: State, now: float = 0.0) -> bool:
        return self.seats.waits(state, self.node, now)


def test_the_lower_indexes_meet_first_and_a_spare_only_when_one_of_them_does_not_come(tmp_path: Path) -> None:
    assert not Job(tmp_path, ZERO).waits(State(0))
    assert not Job(tmp_path, ONE).waits(State(0, ZERO))
    spare = Job(tmp_path, TWO)
    assert [spare.waits(State(0, ZERO), now) for now in (100.0, 129.0, 131.0)] == [True, True, False]


def test_the_last_seat_is_pod_0s(tmp_path: Path) -> None:
    spare = Job(tmp_path, TWO)
    assert [spare.waits(State(0, ONE), now) for now in (0.0, 31.0)] == [True, True]


def test_a_full_round_is_waited_for_and_one_that_has_lost_a_pod_is_told_of_the_spare(tmp_path: Path) -> None:
    spare = Job(tmp_path, TWO)
    assert spare.waits(State(1, ZERO, ONE, complete=True), 5000.0)
    assert spare.seats.deadline(9.0) == 5600.0
    assert not spare.waits(State(1, ZERO, complete=True), 5001.0)
    assert spare.seats.deadline(9000.0) == 9000.0


def test_the_seats_are_those_of_the_round_before(tmp_path: Path) -> None:
    spare, member = Job(tmp_path, TWO), Job(tmp_path, ONE)
    full, leaving = State(0, ZERO, ONE, complete=True), State(0, ONE, complete=True, alive=[ZERO])
    assert spare.waits(full)
    assert not spare.waits(leaving)
    member.seats.note(full)
    assert not member.waits(State(1, ZERO), 10.0)
    assert spare.waits(State(1, ZERO), 10.0), "who is on the way back is not to be seen"
    assert spare.waits(State(1, ZERO, alive=[ONE]), 20.0), "who lives comes back"
    assert not spare.waits(State(1, ZERO), 20.0)
    assert spare.waits(State(1, ONE), 20.5), "pod 0 is waited for"


def test_a_successor_becomes_the_spare(tmp_path: Path) -> None:
    successor = Job(tmp_path, ONE)
    assert successor.waits(State(1, ZERO, TWO, complete=True))
    assert successor.waits(State(2, ZERO, alive=[TWO]), 9.0)


def test_who_waits_when_training_is_over_is_done(tmp_path: Path) -> None:
    spare, member = Job(tmp_path, TWO), Job(tmp_path, ONE)
    closed = State(0, ZERO, ONE, complete=True, closed=True)
    with pytest.raises(TrainingOver):
        spare.waits(closed)
    assert member.waits(closed)
